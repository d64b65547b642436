import asyncio
import json

import pytest

from vime.testing.engine_app import Call, EngineApp
from vime.weights.gate import Gate

TOKEN = {"x-vime-run-token": "run-7"}


@pytest.fixture
def app():
    return EngineApp()


@pytest.fixture
def gate(app):
    return Gate(app, token="run-7")


def generate(gate, **kwargs):
    return Call(gate, "POST", "/inference/v1/generate", body=b'{"token_ids": [1, 2]}', **kwargs)


def post(gate, path, body=None):
    return Call(gate, "POST", path, body=json.dumps(body or {}).encode(), headers=TOKEN).result()


async def settle():
    for _ in range(20):
        await asyncio.sleep(0)


async def test_it_starts_shut_and_says_who_it_is(gate):
    status, identity = await Call(gate, "GET", "/vime/identity").result()
    assert status == 200
    assert identity["run_token"] == "run-7"
    assert (identity["gate"], identity["version"]) == ("shut", None)


@pytest.mark.parametrize("path", ["/inference/v1/generate", "/v1/completions", "/v1/chat/completions"])
async def test_generation_waits_until_the_gate_opens_and_keeps_its_body(gate, app, path):
    waiting = Call(gate, "POST", path, body=b'{"prompt": "abcdefgh"}', chunks=3)
    await settle()
    assert not waiting.task.done()
    assert app.calls == []
    assert (await post(gate, "/vime/gate/open", {"version": "0.1"}))[1]["gate"] == "open"
    assert await waiting.result() == (200, b"one two")
    assert app.calls == [(path, {"prompt": "abcdefgh"})]
    assert waiting.chunks == [b"one ", b"two"]


async def test_other_routes_pass_while_it_is_shut(gate, app):
    assert (await Call(gate, "GET", "/health").result())[0] == 200
    assert app.paths == ["/health"]


async def test_only_the_run_token_passes_a_shut_gate(gate, app):
    assert await generate(gate, headers=TOKEN).result() == (200, b"one two")
    stranger = generate(gate, headers={"x-vime-run-token": "run-8"})
    await settle()
    assert not stranger.task.done()
    stranger.disconnect()
    await stranger.result()
    assert len(app.calls) == 1


async def test_a_client_that_leaves_while_waiting_never_reaches_the_engine(gate, app):
    waiting = generate(gate)
    await settle()
    waiting.disconnect()
    await waiting.result()
    await post(gate, "/vime/gate/open")
    await settle()
    assert app.calls == []


async def test_a_client_that_leaves_after_waiting_is_noticed_by_the_engine(gate, app):
    app.hold = asyncio.Event()
    waiting = generate(gate)
    await settle()
    await post(gate, "/vime/gate/open")
    await settle()
    assert app.generating == 1
    waiting.disconnect()
    await waiting.result()
    assert (app.cancelled, app.generating) == (1, 0)


async def test_shutting_right_after_opening_lets_no_waiting_request_slip_through(gate, app):
    waiting = [generate(gate) for _ in range(3)]
    await settle()
    gate._open.set()
    gate._open.clear()
    await settle()
    assert app.calls == []
    await post(gate, "/vime/gate/open")
    assert [await w.result() for w in waiting] == [(200, b"one two")] * 3


async def test_draining_waits_for_running_requests_and_then_pauses(gate, app):
    app.hold = asyncio.Event()
    await post(gate, "/vime/gate/open")
    running = generate(gate)
    await settle()
    shut = asyncio.ensure_future(post(gate, "/vime/gate/shut?pause=drain"))
    late = generate(gate)
    await settle()
    assert not shut.done()
    assert "/pause" not in app.paths
    app.hold.set()
    assert (await shut)[1]["gate"] == "shut"
    assert await running.result() == (200, b"one two")
    assert app.paths == ["/inference/v1/generate", "/pause"]
    assert not late.task.done()
    late.disconnect()


async def test_abort_ends_running_requests(gate, app):
    app.hold = asyncio.Event()
    await post(gate, "/vime/gate/open")
    running = generate(gate)
    await settle()
    assert (await post(gate, "/vime/gate/shut?pause=abort"))[0] == 200
    assert running.task.done()
    assert app.paths == ["/inference/v1/generate", "/pause", "/abort_requests"]


UPDATE = {"update_info": {"staged": {"version": "0.3"}}, "version": "0.3"}


async def test_an_update_runs_in_all_workers_and_reports_the_slowest_and_the_fullest(gate, app):
    app.answers["/collective_rpc"] = {
        "results": [
            {"seconds": {"start": 0.1, "update": 0.4}, "bytes": {"kv": 7, "engine_weights": 3}},
            {"seconds": {"start": 0.2, "update": 0.3}, "bytes": {"kv": 6, "engine_weights": 4}},
        ]
    }
    answer = {"seconds": {"start": 0.2, "update": 0.4}, "bytes": {"kv": 7, "engine_weights": 4}}
    assert await post(gate, "/vime/update", UPDATE) == (200, answer)
    payload = {"staged": {"version": "0.3"}}
    assert app.calls == [
        ("/collective_rpc", {"method": "vime_weights", "kwargs": {"step": "update", "payload": payload}}),
        ("/update_weight_version", {"new_version": "0.3"}),
    ]


async def test_a_failed_update_names_the_worker_and_leaves_gate_and_version_alone(gate, app):
    await post(gate, "/vime/gate/open", {"version": "0.2"})
    app.answers["/collective_rpc"] = {"results": [{"seconds": {"update": 0.1}}, {"error": "tensor b was altered"}]}
    status, answer = await post(gate, "/vime/update", UPDATE)
    assert (status, answer["error"]["message"]) == (500, "update: worker 1: tensor b was altered")
    assert app.paths == ["/collective_rpc"]
    identity = (await Call(gate, "GET", "/vime/identity").result())[1]
    assert (identity["gate"], identity["version"]) == ("shut", "0.2")


async def test_initialising_does_not_shut_the_gate_and_reports_a_single_workers_error(gate, app):
    await post(gate, "/vime/gate/open")
    app.answers["/collective_rpc"] = {"results": [{"error": "unknown tensors"}]}
    status, answer = await post(gate, "/vime/init", {"protocol": "host_shm"})
    assert (status, answer["error"]["message"]) == (500, "init: unknown tensors")
    assert app.calls == [
        ("/collective_rpc", {"method": "vime_weights", "kwargs": {"step": "init", "payload": {"protocol": "host_shm"}}})
    ]
    assert (await Call(gate, "GET", "/vime/identity").result())[1]["gate"] == "open"


async def test_an_update_is_refused_while_requests_run(gate, app):
    app.hold = asyncio.Event()
    await post(gate, "/vime/gate/open")
    running = generate(gate)
    await settle()
    status, answer = await post(gate, "/vime/update", {"update_info": {}, "version": "0.1"})
    assert status == 409
    assert "1 requests are running" in answer["error"]["message"]
    assert app.paths == ["/inference/v1/generate"]
    app.hold.set()
    await running.result()


async def test_starting_an_update_by_the_engines_own_route_shuts_the_gate(gate):
    await post(gate, "/vime/gate/open")
    await Call(gate, "POST", "/start_weight_update").result()
    assert (await Call(gate, "GET", "/vime/identity").result())[1]["gate"] == "shut"


async def test_control_needs_the_run_token_and_a_known_route(gate, app):
    assert (await Call(gate, "POST", "/vime/gate/open").result())[0] == 403
    assert (await Call(gate, "POST", "/vime/gate/opne", headers=TOKEN).result())[0] == 404
    assert app.calls == []


async def test_opening_can_resume_the_engine_first(gate, app):
    app.fail["/resume"] = "engine is dead"
    status, answer = await post(gate, "/vime/gate/open", {"version": "0.2", "resume": True})
    assert (status, answer["error"]["message"]) == (500, "/resume: engine is dead")
    app.fail.clear()
    status, identity = await post(gate, "/vime/gate/open", {"version": "0.2", "resume": True})
    assert (status, identity["gate"], identity["version"]) == (200, "open", "0.2")


async def test_an_app_that_raises_is_an_error_of_its_route(gate):
    async def broken(scope, receive, send):
        raise RuntimeError("boom")

    gate.app = broken
    status, answer = await post(gate, "/vime/resume")
    assert (status, answer["error"]["message"]) == (500, "/resume: RuntimeError: boom")


async def test_lifespan_and_websockets_pass(gate):
    seen = []

    async def app(scope, receive, send):
        seen.append(scope["type"])

    gate.app = app
    for kind in ("lifespan", "websocket"):
        await gate({"type": kind}, None, None)
    assert seen == ["lifespan", "websocket"]
