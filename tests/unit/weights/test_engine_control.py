"""The control client against a real local server."""

import asyncio
import json
import socket
import time
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from vime.errors import DeadlineError, EngineError, WeightSyncError
from vime.weights.control import EngineControl


@asynccontextmanager
async def served(handler, **kwargs):
    """A server on a free port that answers every route with `handler`; yields its URL."""
    app = web.Application()
    app.router.add_route("*", "/{tail:.*}", handler)
    runner = web.AppRunner(app, **kwargs)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def recording(answers=None):
    seen = []

    async def handler(request):
        body = await request.text()
        seen.append((request.method, request.path_qs, json.loads(body) if body else None, dict(request.headers)))
        return web.json_response((answers or {}).get(request.path, {}))

    return handler, seen


async def test_every_call_has_its_route_body_and_credentials():
    handler, seen = recording({"/vime/update": {"seconds": {"start": 0.5}}, "/is_paused": {"is_paused": True}})
    async with served(handler) as url, EngineControl(url, api_key="key", run_token="tok", name="e0") as engine:
        await engine.shut("drain")
        await engine.shut(None)
        assert await engine.update({"staged": {"version": "0.1"}}, version="0.1") == {"start": 0.5}
        await engine.open("0.1", resume=True)
        assert await engine.is_paused()
        await engine.wake(["weights", "kv_cache"])
    assert [(m, p, b) for m, p, b, _ in seen] == [
        ("POST", "/vime/gate/shut?pause=drain", None),
        ("POST", "/vime/gate/shut", None),
        ("POST", "/vime/update", {"update_info": {"staged": {"version": "0.1"}}, "version": "0.1"}),
        ("POST", "/vime/gate/open", {"version": "0.1", "resume": True}),
        ("GET", "/is_paused", None),
        ("POST", "/wake_up?tags=weights&tags=kv_cache", None),
    ]
    assert all(h["Authorization"] == "Bearer key" and h["x-vime-run-token"] == "tok" for *_, h in seen)


async def test_a_server_that_never_answers_is_named_at_the_deadline():
    async def silent(request):
        await asyncio.sleep(30)

    async with served(silent, shutdown_timeout=0.1) as url, EngineControl(url, timeout_s=0.2, name="engine 3") as engine:
        begin = time.monotonic()
        with pytest.raises(DeadlineError, match=r"engine 3: no answer to /vime/resume within 0\.2 s"):
            await engine.resume()
        assert time.monotonic() - begin < 1.5


async def test_a_server_that_stops_in_mid_answer_is_named_at_the_deadline():
    async def half(request):
        response = web.StreamResponse(headers={"Content-Length": "100", "Content-Type": "application/json"})
        await response.prepare(request)
        await response.write(b"{")
        await asyncio.sleep(30)

    async with served(half, shutdown_timeout=0.1) as url, EngineControl(url, timeout_s=0.2, name="e0") as engine:
        with pytest.raises(DeadlineError, match="e0: no answer to /is_paused"):
            await engine.is_paused()


async def test_a_dead_server_is_named_at_once():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    async with EngineControl(f"http://127.0.0.1:{port}", timeout_s=30, name="e2") as engine:
        with pytest.raises(EngineError, match="e2: no answer to /get_world_size"):
            await engine.world_size()


async def test_proxy_variables_are_ignored(monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    handler, _ = recording({"/get_world_size": {"world_size": 4}})
    async with served(handler) as url, EngineControl(url, timeout_s=5) as engine:
        assert await engine.world_size() == 4


async def test_a_restarted_server_on_the_same_port_gets_a_fresh_connection():
    handler, seen = recording({"/is_paused": {"is_paused": False}})
    async with served(handler) as url:
        engine = EngineControl(url, timeout_s=5)
        await engine.is_paused()
    port = int(url.rsplit(":", 1)[1])
    app = web.Application()
    app.router.add_route("*", "/{tail:.*}", handler)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port, reuse_address=True).start()
    await engine.is_paused()
    assert len(seen) == 2
    await engine.close()
    await runner.cleanup()


async def test_errors_carry_the_engines_words():
    async def failing(request):
        message = "Call to collective_rpc method failed: tensor layers.0.norm was altered on its way"
        return web.json_response({"error": {"message": message, "type": "InternalServerError"}}, status=500)

    async with served(failing) as url, EngineControl(url, name="e1") as engine:
        with pytest.raises(WeightSyncError, match=r"e1: /vime/update answered 500: .*layers\.0\.norm was altered"):
            await engine.update({}, version="0.1")
        with pytest.raises(EngineError, match="e1: /vime/resume answered 500"):
            await engine.resume()


async def test_probe_reads_the_log_prob_of_each_token_after_the_first():
    async def scored(request):
        ids = (await request.json())["token_ids"]
        rows = [None] + [{str(t): {"logprob": -t / 10}, "99": {"logprob": -9.0}} for t in ids[1:]]
        return web.json_response({"prompt_logprobs": rows})

    async with served(scored) as url, EngineControl(url) as engine:
        assert await engine.probe([[5, 10, 20], [7, 1, 2]]) == [[-1.0, -2.0], [-0.1, -0.2]]


async def test_missing_prompt_log_probs_are_an_error():
    handler, _ = recording({"/inference/v1/generate": {"prompt_logprobs": None}})
    async with served(handler) as url, EngineControl(url, name="e0") as engine:
        with pytest.raises(EngineError, match="e0: 0 prompt log-probs for 2 tokens"):
            await engine.probe([[1, 2]])


async def test_an_engine_of_another_run_is_recognised():
    handler, _ = recording({"/vime/identity": {"run_token": "b", "pid": 7, "gate": "open", "version": None, "running": 0}})
    async with served(handler) as url, EngineControl(url, run_token="a", name="e0") as engine:
        with pytest.raises(EngineError, match=r"process 7 .* belongs to another run"):
            await engine.check_identity()
