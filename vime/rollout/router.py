"""vllm-router as a child process: the one address that rollouts send to, whichever engines live behind it."""

from __future__ import annotations

import asyncio
import re
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp

from vime.errors import ConfigError, DeadlineError, EngineError, Errors
from vime.rollout.launcher import Child, child_env
from vime.rollout.ports import LOOPBACK, PortLease, lease_port
from vime.weights.answers import error_text

OWNED_KEYS: Mapping[str, str] = {
    "worker_urls": "nothing: vime registers its engines",
    "host": "nothing: the router listens on 127.0.0.1",
    "port": "nothing: vime takes free ports",
    "prometheus_host": "nothing: the router listens on 127.0.0.1",
    "prometheus_port": "nothing: vime takes free ports",
    "api_key": "nothing: vime makes a key for every run",
    "request_timeout_secs": "rollout.request_timeout_s",
    "worker_startup_timeout_secs": "rollout.start_timeout_s",
    "service_discovery": "nothing: vime registers its engines",
    "mini_lb": "nothing: the router itself is used",
    "prefill": "topology roles: prefill and decode stages",
    "decode": "topology roles: prefill and decode stages",
}
"""vllm-router arguments that vime sets itself, and the vime key to use for them."""

ROUTER_DEFAULTS: Mapping[str, Any] = {
    "policy": "round_robin",
    "worker_startup_check_interval": 1,
    "health_check_interval_secs": 2,
    "health_failure_threshold": 2,
    "health_success_threshold": 1,
    "cb_timeout_duration_secs": 2,
    "log_level": "warning",
}
"""Below the user's section. The router's own defaults notice a dead engine after three minutes."""

_POLL_S = 0.05
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_TELLING = re.compile(r"error: |Error|ERROR|Exception: ")


@dataclass(frozen=True)
class RouterSpec:
    """What the router is started with. `args` is the user's section: vllm-router's arguments with underscores."""

    log_path: Path
    worker_urls: tuple[str, ...] = ()
    args: Mapping[str, Any] = field(default_factory=dict)
    request_timeout_s: float = 600.0
    start_timeout_s: float = 300.0
    api_key: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    name: str = "router"
    command_prefix: tuple[str, ...] = ()


def router_command(spec: RouterSpec, port: int, prometheus_port: int) -> list[str]:
    """The command line. Raises ConfigError for arguments that vime owns, naming the vime key to use."""
    args = {key.replace("-", "_"): value for key, value in spec.args.items()}
    _refuse(args)
    own: dict[str, Any] = {
        "host": LOOPBACK,
        "port": port,
        "prometheus_host": LOOPBACK,
        "prometheus_port": prometheus_port,
        "request_timeout_secs": max(1, round(spec.request_timeout_s)),
        "worker_startup_timeout_secs": max(1, round(spec.start_timeout_s)),
        "api_key": spec.api_key,
    }
    # The module, not the script beside the interpreter: packages on PYTHONPATH bring none.
    command = [sys.executable, "-m", "vllm_router.launch_router"]
    for key, value in {**own, **ROUTER_DEFAULTS, **args}.items():
        command += _flag(key, value)
    return [*command, "--worker-urls", *spec.worker_urls] if spec.worker_urls else command


class RouterServer:
    """One running router. Its address survives `restart`, so clients keep theirs."""

    def __init__(self, spec: RouterSpec) -> None:
        self.spec = spec
        self._workers: list[str] = list(spec.worker_urls)
        self._lease: PortLease | None = None
        self._metrics: PortLease | None = None
        self._child: Child | None = None

    @property
    def url(self) -> str:
        if self._lease is None:
            raise EngineError("is not started", where=self.spec.name)
        return self._lease.url()

    @property
    def pid(self) -> int:
        return self._require_child().pid

    @property
    def group(self) -> int:
        return self._require_child().group

    def alive(self) -> bool:
        return self._child is not None and self._child.alive()

    def start(self) -> None:
        """Start the process and return at once. Raises EngineError when its port is taken or it is not installed."""
        if self.alive():
            raise EngineError("is already running", where=self.spec.name)
        self._lease = self._lease or lease_port()
        self._metrics = self._metrics or lease_port()
        spec = replace(self.spec, worker_urls=tuple(self._workers))
        self._child = Child(
            router_command(spec, self._lease.port, self._metrics.port),
            name=spec.name,
            log_path=spec.log_path,
            env=child_env(spec.env),
            command_prefix=spec.command_prefix,
        )

    async def wait_ready(self, timeout_s: float) -> None:
        """Wait until it serves, with at least one healthy engine where it was given any.

        Raises EngineError with the cause from its log when it died, DeadlineError when it does not answer in time.
        """
        child, deadline = self._require_child(), time.monotonic() + timeout_s
        async with _session(min(5.0, timeout_s)) as session:
            while True:
                if not child.alive():
                    raise EngineError(
                        f"died at start ({child.exit_text()}): {router_cause(child.log_text())}",
                        where=self.spec.name,
                        fix=f"see {self.spec.log_path}",
                    )
                if await self._serves(session):
                    return
                if time.monotonic() >= deadline:
                    raise DeadlineError(
                        f"does not serve at {self.url} within {timeout_s:g} s; its last words: {child.log_tail(1)}",
                        where=f"{self.spec.name} (pid {child.pid})",
                        fix=f"see {self.spec.log_path}; the engines it waits for are {', '.join(self._workers) or 'none'}",
                    )
                await asyncio.sleep(_POLL_S)

    async def restart(self, timeout_s: float) -> None:
        """Stop what is left, start again on the same port with the present engines, and wait."""
        if self._child is not None:
            await asyncio.to_thread(self._child.stop)
        self.start()
        await self.wait_ready(timeout_s)

    async def workers(self) -> dict[str, bool]:
        """The registered engines: address -> healthy."""
        answer = await self._call("GET", "/workers")
        return {worker["url"]: bool(worker["is_healthy"]) for worker in answer["workers"]}

    async def add_worker(self, url: str, *, timeout_s: float = 30.0) -> None:
        """Register an engine. One that is known already is removed first, which forgets its failures."""
        if url in await self.workers():
            await self.remove_worker(url)
        await self._call("POST", "/workers", json={"url": url}, timeout_s=timeout_s)
        self._workers = [*(w for w in self._workers if w != url), url]

    async def remove_worker(self, url: str) -> None:
        """Take an engine out; unknown ones are no error."""
        self._workers = [w for w in self._workers if w != url]
        if url in await self.workers():
            await self._call("DELETE", f"/workers/{quote(url, safe='')}")

    def stop(self, grace_s: float = 5.0) -> float:
        """End it and give its port back; return the seconds it took. Safe to call again."""
        taken = self._child.stop(grace_s) if self._child is not None else 0.0
        for lease in (self._lease, self._metrics):
            if lease is not None:
                lease.release()
        self._lease = self._metrics = None
        return taken

    async def _serves(self, session: aiohttp.ClientSession) -> bool:
        try:
            async with session.get(f"{self.url}/readiness") as response:
                state = await response.json(content_type=None)
        except (aiohttp.ClientError, TimeoutError, ValueError):
            return False
        return not self._workers or (isinstance(state, dict) and int(state.get("healthy_workers") or 0) > 0)

    async def _call(
        self, method: str, path: str, *, json: Mapping[str, Any] | None = None, timeout_s: float = 10.0
    ) -> dict[str, Any]:
        call = f"{method} {path}{' ' + str(json['url']) if json else ''}"
        headers = {"Authorization": f"Bearer {self.spec.api_key}"} if self.spec.api_key else None
        try:
            async with (
                _session(timeout_s) as session,
                session.request(method, self.url + path, json=json, headers=headers) as response,
            ):
                payload = await response.read()
                if response.status >= 400:
                    raise EngineError(f"{call} answered {response.status}: {error_text(payload)}", where=self.spec.name)
                return await response.json(content_type=None) if payload else {}
        except TimeoutError as error:
            raise DeadlineError(f"{call} got no answer within {timeout_s:g} s", where=self.spec.name) from error
        except aiohttp.ClientError as error:
            state = self._child.exit_text() if self._child is not None else "not started"
            raise EngineError(f"{call} failed ({state}): {error}", where=self.spec.name) from error

    def _require_child(self) -> Child:
        if self._child is None:
            raise EngineError("is not started", where=self.spec.name)
        return self._child


def router_cause(log: str) -> str:
    """The line of the router's log that says why it ended."""
    lines = [line.strip() for line in _COLOUR.sub("", log).splitlines() if line.strip()]
    telling = next((line for line in lines if _TELLING.search(line)), None)
    return telling or (lines[-1] if lines else "nothing in its log explains it")


def _session(timeout_s: float) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(trust_env=False, timeout=aiohttp.ClientTimeout(total=timeout_s))


def _flag(key: str, value: Any) -> list[str]:
    option = "--" + key.replace("_", "-")
    if value is None or value is False:
        return []
    if value is True:
        return [option]
    if isinstance(value, list | tuple):
        return [option, *map(str, value)]
    return [option, str(value)]


def _refuse(args: Mapping[str, Any]) -> None:
    errors = [ConfigError(f"rollout.router.{k} is set by vime", fix=f"use {OWNED_KEYS[k]}") for k in args if k in OWNED_KEYS]
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise Errors(errors)
