"""What one router bears: requests a second, its processor seconds per request, and open files per request that waits.

The router and `GenerateClient` are real; engines are servers in this process that answer at once with a group of responses, so
the rate is a lower bound: this process, not the router, may be the limit. `cpu_s_per_request` is the router's own.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from aiohttp import web

from vime.rollout.client import GENERATE_ROUTE, GenerateClient
from vime.rollout.router import RouterServer, RouterSpec

ENGINES = 2
AT_ONCE = 32
HELD = (50, 100, 200)


def answer_text(tokens: int, group: int) -> bytes:
    """A group of responses in the flat form of the gate."""
    choice = {"token_ids": [100_000 + i for i in range(tokens)], "log_probs": [-0.1234567] * tokens, "finish_reason": "stop"}
    return json.dumps({"request_id": "x", "choices": [{**choice, "index": i} for i in range(group)]}).encode()


class FakeEngines:
    """Servers on loopback; requests wait while `gate` is shut."""

    def __init__(self, body: bytes) -> None:
        self._body = body
        self._runners: list[web.AppRunner] = []
        self.gate = asyncio.Event()
        self.waiting = 0
        self.urls: list[str] = []

    async def start(self, count: int) -> None:
        for _ in range(count):
            app = web.Application()
            app.router.add_post(GENERATE_ROUTE, self._generate)
            app.router.add_get("/{rest:.*}", self._other)
            runner = web.AppRunner(app)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            self._runners.append(runner)
            self.urls.append(f"http://127.0.0.1:{runner.addresses[0][1]}")

    async def stop(self) -> None:
        for runner in self._runners:
            await runner.cleanup()

    async def _generate(self, request: web.Request) -> web.Response:
        await request.read()
        self.waiting += 1
        await self.gate.wait()
        self.waiting -= 1
        return web.Response(body=self._body, content_type="application/json")

    async def _other(self, request: web.Request) -> web.Response:
        del request
        return web.json_response({"data": [{"id": "m"}]})


async def router_row(*, seconds: float, tokens: int, group: int) -> dict[str, Any]:
    """Load one router for about `seconds` with answers of `group` responses of `tokens` tokens."""
    body = answer_text(tokens, group)
    engines = FakeEngines(body)
    await engines.start(ENGINES)
    folder = tempfile.TemporaryDirectory(prefix="vime-scale-router-")
    router = RouterServer(RouterSpec(Path(folder.name) / "router.log", tuple(engines.urls)))
    client: GenerateClient | None = None
    try:
        router.start()
        await router.wait_ready(60.0)
        client = GenerateClient(router.url, timeout_s=60.0)
        files = [await _files_while_held(engines, client, router.pid, held, group) for held in HELD]
        engines.gate.set()
        rate = await _rate(client, router.pid, seconds, group)
        return {"answer_bytes": len(body), "engines": ENGINES, "at_once": AT_ONCE, **rate, "open_files": files}
    finally:
        engines.gate.set()
        if client is not None:
            await client.close()
        await asyncio.to_thread(router.stop)
        await engines.stop()
        folder.cleanup()


async def _files_while_held(engines: FakeEngines, client: GenerateClient, pid: int, held: int, group: int) -> dict[str, int]:
    """Open files of router and client while so many requests wait in engines."""
    engines.gate.clear()
    tasks = [asyncio.create_task(_ask(client, group)) for _ in range(held)]
    deadline = time.monotonic() + 20
    while engines.waiting < held and time.monotonic() < deadline:
        await asyncio.sleep(0.02)
    # Engines live in this process too, with one connection a request that is not the client's.
    found = {"requests": engines.waiting, "router": _open_files(pid), "client_and_engines": _open_files(os.getpid())}
    engines.gate.set()
    await asyncio.gather(*tasks)
    return found


async def _rate(client: GenerateClient, pid: int, seconds: float, group: int) -> dict[str, float]:
    done = 0
    end = time.perf_counter() + seconds

    async def ask() -> None:
        nonlocal done
        while time.perf_counter() < end:
            await _ask(client, group)
            done += 1

    began, cpu = time.perf_counter(), _cpu_seconds(pid)
    await asyncio.gather(*(ask() for _ in range(AT_ONCE)))
    spent, used = time.perf_counter() - began, _cpu_seconds(pid) - cpu
    return {"requests_per_s": done / spent, "cpu_s_per_request": used / done, "router_cores_used": used / spent}


async def _ask(client: GenerateClient, group: int) -> None:
    await client.generate([1, 2, 3], n=group, params={"temperature": 1.0})


def _open_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def _cpu_seconds(pid: int) -> float:
    """User and system time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
