"""The gate when requests are kept through an update: what may leave it, and when."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

from vime.facts.engine import IN_FLIGHT_ROUTES, RESET_ROUTE, TOKEN_ROUTE, VERSION_ROUTE, WITHDRAWN_STATUS
from vime.testing.engine_app import Call, EngineApp
from vime.weights.asgi import App, Receive, Scope, Send
from vime.weights.gate import Gate

TOKEN = {"x-vime-run-token": "run-7"}
UPDATE = {"update_info": {"staged": {}}, "version": "0.2"}


class Server(EngineApp):
    """Answers a generation whole, or with `streams` in two parts, the second when `hold` is set."""

    streams = False

    async def _generate(self, receive: Receive, send: Send) -> None:
        if self.streams:
            await super()._generate(receive, send)
            return
        assert self.hold is not None
        await self.hold.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"whole"})


@pytest.fixture
def app() -> Server:
    server = Server(hold=asyncio.Event())
    server.answers = {RESET_ROUTE: {"success": True}, "/collective_rpc": {"results": [{"seconds": {"update": 0.1}}]}}
    return server


@pytest.fixture
async def gate(app: Server) -> Gate:
    """Open, at version 0.1."""
    gate = Gate(app, token="run-7")
    assert (await post(gate, "/vime/gate/open", {"version": "0.1"}))[0] == 200
    return gate


def generate(gate: Gate, **kwargs: Any) -> Call:
    return Call(gate, "POST", TOKEN_ROUTE, body=b'{"token_ids": [1, 2]}', **kwargs)


async def post(gate: App, path: str, body: Any = None) -> tuple[int, Any]:
    return await Call(gate, "POST", path, body=json.dumps(body or {}).encode(), headers=TOKEN).result()


async def settle() -> None:
    for _ in range(30):
        await asyncio.sleep(0)


async def updated(gate: Gate, app: Server) -> Call:
    """A request that runs, kept through an update; the engine is resumed and its gate shut."""
    running = generate(gate)
    await settle()
    assert (await post(gate, "/vime/gate/shut?pause=keep"))[1]["running"] == 1
    assert (await post(gate, "/vime/update", UPDATE))[0] == 200
    assert (await post(gate, "/vime/resume"))[0] == 200
    return running


async def test_requests_stay_in_the_paused_engine_and_lose_their_caches_with_the_old_weights(gate: Gate, app: Server) -> None:
    running = await updated(gate, app)
    late = generate(gate)
    await settle()
    assert not running.task.done()
    assert [path for path in app.paths if path != TOKEN_ROUTE] == [
        "/pause",
        "/collective_rpc",
        RESET_ROUTE,
        VERSION_ROUTE,
        "/resume",
    ]
    calls = dict(app.calls)
    assert calls["/pause"] == "mode=keep&clear_cache=false"
    assert calls[RESET_ROUTE] == "reset_running_requests=true&reset_external=true"
    assert not late.task.done(), "new requests wait until the gate opens"
    late.disconnect()


async def test_an_update_without_kept_requests_leaves_caches_to_the_pause(gate: Gate, app: Server) -> None:
    await post(gate, "/vime/gate/shut?pause=drain")
    await post(gate, "/vime/update", UPDATE)
    assert RESET_ROUTE not in app.paths


async def test_caches_that_stay_fail_the_update_before_it_has_a_version(gate: Gate, app: Server) -> None:
    app.answers[RESET_ROUTE] = {"success": False}
    running = generate(gate)
    await settle()
    await post(gate, "/vime/gate/shut?pause=keep")
    status, answer = await post(gate, "/vime/update", UPDATE)
    assert (status, answer["error"]["message"]) == (500, f"{RESET_ROUTE}: the engine holds on to caches of the old weights")
    assert VERSION_ROUTE not in app.paths
    running.disconnect()


async def test_a_server_that_cannot_tell_versions_by_token_keeps_nothing(app: Server) -> None:
    listed = SimpleNamespace(routes=[SimpleNamespace(path=path) for path in (TOKEN_ROUTE, *IN_FLIGHT_ROUTES - {VERSION_ROUTE})])

    async def server(scope: Scope, receive: Receive, send: Send) -> None:
        await Gate(app, token="run-7")({**scope, "app": listed}, receive, send)

    status, answer = await post(server, "/vime/gate/shut?pause=keep")
    assert status == 409
    assert "does not tell which weights sampled which token" in answer["error"]["message"]
    assert app.paths == []


async def test_an_answer_that_is_whole_before_the_verdict_leaves_when_the_gate_opens(gate: Gate, app: Server) -> None:
    assert app.hold is not None
    running = await updated(gate, app)
    app.hold.set()
    await settle()
    assert not running.task.done()
    assert await generate(gate, headers=TOKEN).result() == (200, b"whole"), "the probe waits for nobody"
    await post(gate, "/vime/gate/open", {"version": "0.2"})
    assert await running.result() == (200, b"whole")


@pytest.mark.parametrize("ends", ["before", "after"])
async def test_what_refused_weights_sampled_is_withdrawn_whenever_it_ends(gate: Gate, app: Server, ends: str) -> None:
    assert app.hold is not None
    running = await updated(gate, app)
    if ends == "before":
        app.hold.set()
        await settle()
    status, _ = await post(gate, "/vime/gate/shut?pause=abort")
    assert status == 200
    app.hold.set()
    status, answer = await running.result()
    assert status == WITHDRAWN_STATUS
    assert "were refused" in answer["error"]["message"]
    await post(gate, "/vime/update", UPDATE)
    await post(gate, "/vime/gate/open", {"version": "0.2", "resume": True})
    assert await generate(gate).result() == (200, b"whole"), "later requests are not concerned"


async def test_requests_of_refused_weights_that_nobody_could_end_are_withdrawn_too(gate: Gate, app: Server) -> None:
    """The call that ends them was lost; the next publication keeps them through its update."""
    assert app.hold is not None
    running = await updated(gate, app)
    await post(gate, "/vime/gate/shut?pause=keep")
    await post(gate, "/vime/update", {**UPDATE, "version": "0.3"})
    await post(gate, "/vime/gate/open", {"version": "0.3", "resume": True})
    app.hold.set()
    assert (await running.result())[0] == WITHDRAWN_STATUS


async def test_a_stream_waits_for_the_verdict_and_breaks_off_when_its_weights_are_refused(gate: Gate, app: Server) -> None:
    assert app.hold is not None
    app.streams = True
    running = await updated(gate, app)
    app.hold.set()
    await settle()
    assert running.chunks == [b"one "]
    await post(gate, "/vime/gate/shut?pause=abort")
    with pytest.raises(ConnectionAbortedError, match="withdrawn"):
        await running.result()
    assert running.chunks == [b"one "]


async def test_a_pause_without_a_trial_withdraws_nothing(gate: Gate, app: Server) -> None:
    assert app.hold is not None
    running = generate(gate)
    await settle()
    await post(gate, "/vime/gate/shut?pause=keep")
    await post(gate, "/vime/gate/open", {"version": "0.1", "resume": True})
    app.hold.set()
    assert await running.result() == (200, b"whole")
