"""A server that reports no versions, behind the real router: what its gate adds arrives at the client."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from vime.facts.engine import TOKEN_ROUTE
from vime.rollout.client import GenerateClient
from vime.rollout.router import RouterServer, RouterSpec
from vime.types import PolicyVersion, VersionSpan
from vime.weights.control import EngineControl
from vime.weights.gate import Gate

uvicorn = pytest.importorskip("uvicorn")
fastapi = pytest.importorskip("fastapi")
pytest.importorskip("msgspec")

NUM_TOKENS = 4000


def old_server() -> Any:
    """The token route in the shape of vLLM 0.26: no versions, and no route to set one."""
    app = fastapi.FastAPI()

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {}

    @app.post(TOKEN_ROUTE)
    async def generate(body: dict[str, Any]) -> dict[str, Any]:
        tokens = list(range(1, NUM_TOKENS + 1))
        content = [{"token": f"token_id:{t}", "logprob": -t / 8192, "top_logprobs": []} for t in tokens]
        kept = {"finish_reason": "stop", "token_ids": tokens, "logprobs": {"content": content}}
        return {"request_id": "a", "choices": [{"index": i, **kept} for i in range(body["sampling_params"]["n"])]}

    app.add_middleware(Gate, token="t")
    return app


@asynccontextmanager
async def serving(app: Any) -> AsyncIterator[str]:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
        task = asyncio.ensure_future(server.serve(sockets=[listening]))
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            await task


async def test_versions_from_the_gate_pass_the_router(tmp_path: Path) -> None:
    router = RouterServer(RouterSpec(tmp_path / "router.log"))
    async with serving(old_server()) as url:
        router.start()
        try:
            await router.wait_ready(30)
            await router.add_worker(url)
            async with EngineControl(url, run_token="t") as engine, GenerateClient(router.url, timeout_s=30) as client:
                assert TOKEN_ROUTE in (await engine.identity()).routes
                await engine.open("0.7")
                generation = await client.generate([1, 2], n=3, params={"max_tokens": 8})
        finally:
            await asyncio.to_thread(router.stop)
    expected = (VersionSpan(PolicyVersion(0, 7), 0, NUM_TOKENS),)
    assert [choice.spans for choice in generation.choices] == [expected] * 3
    assert json.dumps(generation.choices[2].log_probs[:2]) == json.dumps([-1 / 8192, -2 / 8192])
