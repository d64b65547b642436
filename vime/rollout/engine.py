"""One vLLM server as a child process: its command, its start, its identity, its end."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from vime.config.manifest import installed_version
from vime.errors import DeadlineError, EngineError, PluginError, VimeError
from vime.facts.engine import EngineFeatures, features_of, missing_routes
from vime.facts.process import Factory, Parallel
from vime.planning.engine_args import ENGINE_NEEDS, OWNED_KEYS, TOKEN_FLAGS, engine_needs, merge_engine_args, refuse_owned
from vime.rollout.launcher import Child, child_env
from vime.rollout.ports import LOOPBACK, PortLease, lease_port
from vime.weights.gate import TOKEN_HEADER

__all__ = ["ENGINE_NEEDS", "EngineServer", "EngineSpec", "engine_command", "engine_env", "find_cause", "merge_engine_args"]

SERVED_MODEL = "policy"
DOOR = "vime.weights.door.Door"
"""Around the gate of a server that other machines reach. vLLM puts a later middleware around an earlier one."""

_STORE_TRUE = frozenset(
    {"headless", "grpc", "disable_log_stats", "aggregate_engine_logging", "data_parallel_multi_port_external_lb"}
)
_REPEATED = frozenset({"middleware"})
_PORT_TRIES = 3
_POLL_S = 0.05


@dataclass(frozen=True)
class EngineSpec:
    """Everything that one engine server is started with.

    `args` are vLLM arguments with underscores, merged by `merge_engine_args`; a `max_model_len` in them wins over the
    field. `run_token` identifies the run: the server must repeat it before it is used. `entry_points` are the plugins
    that vLLM may load; `expected_platform` is the vLLM platform class that they must lead to. `unset` are variables that the
    server must not inherit. `halves` are engine halves of transports, by protocol, beyond those that vime has itself.
    `host` is the address that it listens on. `launch` None is the server of the release; `features` None are those of the vLLM
    that is installed where it starts. With `in_flight` the server must be able to keep requests through an update.
    """

    model_path: Path
    dtype: str
    log_path: Path
    run_token: str
    max_model_len: int
    parallel: Parallel = field(default_factory=Parallel)
    args: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    entry_points: tuple[str, ...] = ()
    expected_platform: str | None = None
    unset: tuple[str, ...] = ()
    halves: Mapping[str, Factory] = field(default_factory=dict)
    launch: str | None = None
    features: EngineFeatures | None = None
    in_flight: bool = False
    api_key: str | None = None
    seed: int = 0
    name: str = "engine"
    host: str = LOOPBACK
    command_prefix: tuple[str, ...] = ()


def engine_command(spec: EngineSpec, port: int) -> list[str]:
    """The command line of a server on `port`, with what vime needs of its release.

    Raises ConfigError for an argument that has a field of its own in the spec.
    """
    refuse_owned(spec.args, OWNED_KEYS)
    parallel = spec.parallel
    features = spec.features or features_of(installed_version("vllm"))
    args = {key: value for key, value in spec.args.items() if key not in TOKEN_FLAGS}
    own: dict[str, Any] = {
        "model": str(spec.model_path),
        "served_model_name": SERVED_MODEL,
        "host": spec.host,
        "port": port,
        "dtype": spec.dtype,
        "seed": spec.seed,
        "tensor_parallel_size": parallel.tp if parallel.tp > 1 else None,
        "pipeline_parallel_size": parallel.pp if parallel.pp > 1 else None,
        "data_parallel_size": parallel.dp if parallel.dp > 1 else None,
        "enable_expert_parallel": True if parallel.ep > 1 else None,
        "max_model_len": spec.max_model_len,
    }
    needs = dict(engine_needs(features))
    if spec.host != LOOPBACK:
        needs["middleware"] = [*needs["middleware"], DOOR]
    command = [sys.executable, "-m", spec.launch or features.launch]
    for key, value in {**own, **args, **needs}.items():
        command += flag(key, value)
    return command


def flag(key: str, value: Any) -> list[str]:
    """One vLLM argument as words: `--x`, `--no-x`, `--x VALUE`, `--x A B`, JSON for mappings, nothing for None."""
    option = "--" + key.replace("_", "-")
    if value is None:
        return []
    if isinstance(value, bool):
        if value:
            return [option]
        return [] if key in _STORE_TRUE else ["--no-" + key.replace("_", "-")]
    if isinstance(value, Mapping):
        return [option, json.dumps(value)]
    if isinstance(value, list | tuple):
        words = [json.dumps(item) if isinstance(item, Mapping) else str(item) for item in value]
        if key in _REPEATED:
            return [part for word in words for part in (option, word)]
        return [option, *words] if words else []
    return [option, str(value)]


def engine_env(spec: EngineSpec) -> dict[str, str]:
    """The server's environment: this process's, cleaned, then vime's needs, then `spec.env`."""
    needs = {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "3600",
        "VLLM_NO_USAGE_STATS": "1",
        "VIME_ENGINE": "1",
        "VIME_RUN_TOKEN": spec.run_token,
    }
    if spec.api_key is not None:
        needs["VLLM_API_KEY"] = spec.api_key
    if spec.expected_platform is not None:
        needs["VIME_EXPECTED_PLATFORM"] = spec.expected_platform
    if spec.halves:
        needs["VIME_ENGINE_HALVES"] = _halves_text(spec.halves)
    env = {name: value for name, value in child_env({**needs, **spec.env}).items() if name not in spec.unset}
    chosen = [name.strip() for name in env.get("VLLM_PLUGINS", "").split(",") if name.strip()]
    env["VLLM_PLUGINS"] = ",".join(dict.fromkeys([*spec.entry_points, *chosen]))
    return env


def _halves_text(halves: Mapping[str, Factory]) -> str:
    try:
        return json.dumps({name: {"target": half.target, "options": dict(half.options)} for name, half in halves.items()})
    except TypeError as error:
        what = f"the engine half of {' and '.join(halves)} has options that are not JSON: {error}"
        raise PluginError(what, fix="let the platform offer numbers, text, lists and mappings only") from error


class EngineServer:
    """One running vLLM server. `start`, then `wait_ready`; afterwards `url` holds until `stop`.

    With `port` 0 a free port is taken and another one tried when it turns out to be taken after all.
    """

    def __init__(self, spec: EngineSpec, *, port: int = 0) -> None:
        self.spec = spec
        self._fixed_port = port
        self._lease: PortLease | None = None
        self._child: Child | None = None

    @property
    def url(self) -> str:
        return self._require_lease().url()

    @property
    def pid(self) -> int:
        return self._require_child().pid

    @property
    def group(self) -> int:
        """The process group that holds the server and everything it started."""
        return self._require_child().group

    def alive(self) -> bool:
        return self._child is not None and self._child.alive()

    def start(self) -> None:
        """Start the process and return at once. Raises EngineError when the port is taken or there is no such command."""
        if self.alive():
            raise EngineError("is already running", where=self.spec.name)
        if self._lease is None:
            self._lease = lease_port(self.spec.host, self._fixed_port)
        self._child = Child(
            engine_command(self.spec, self._lease.port),
            name=self.spec.name,
            log_path=self.spec.log_path,
            env=engine_env(self.spec),
            command_prefix=self.spec.command_prefix,
        )

    async def wait_ready(self, timeout_s: float) -> None:
        """Wait until the server is healthy and is this run's own.

        Raises EngineError with the cause from the log when the process died, or when another server answers on the
        port; DeadlineError naming the engine when it does not answer in time. The server is stopped then.
        """
        deadline = time.monotonic() + timeout_s
        timeout = aiohttp.ClientTimeout(total=min(5.0, timeout_s))
        async with aiohttp.ClientSession(trust_env=False, timeout=timeout) as session:
            for attempt in range(1, _PORT_TRIES + 1):
                try:
                    await self._poll(session, deadline, timeout_s)
                    return
                except _PortTaken as error:
                    await asyncio.to_thread(self.stop)
                    if attempt == _PORT_TRIES or self._fixed_port:
                        raise EngineError(error.what, where=error.where, fix=error.fix) from None
                    self.start()
                except VimeError:
                    await asyncio.to_thread(self.stop)
                    raise

    async def healthy(self, timeout_s: float = 5.0) -> bool:
        """One health check, for supervision."""
        if not self.alive():
            return False
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        async with aiohttp.ClientSession(trust_env=False, timeout=timeout) as session:
            return await _answers(session, self.url)

    def stop(self, grace_s: float = 15.0) -> float:
        """End the server and its group, release the port; return the seconds it took. Safe to call again."""
        taken = self._child.stop(grace_s) if self._child is not None else 0.0
        if self._lease is not None:
            self._lease.release()
            self._lease = None
        return taken

    async def _poll(self, session: aiohttp.ClientSession, deadline: float, timeout_s: float) -> None:
        child = self._require_child()
        while True:
            if not child.alive():
                raise self._death()
            if await _answers(session, self.url):
                await self._check_identity(session)
                return
            if time.monotonic() >= deadline:
                raise DeadlineError(
                    f"does not answer its health check at {self.url} within {timeout_s:g} s ({child.exit_text()}); "
                    f"its last words: {child.log_tail(1)}",
                    where=f"{self.spec.name} (pid {child.pid})",
                    fix=f"see {self.spec.log_path}, or raise rollout.start_timeout_s",
                )
            await asyncio.sleep(_POLL_S)

    async def _check_identity(self, session: aiohttp.ClientSession) -> None:
        try:
            identity = await check_identity(session, self.url, self.spec.run_token)
        except EngineError as error:
            raise _PortTaken(error.what, where=self.spec.name, fix=error.fix) from error
        check_routes(identity.get("routes", ()), where=self.spec.name, in_flight=self.spec.in_flight)

    def _death(self) -> VimeError:
        child = self._require_child()
        text = child.log_text()
        cause = find_cause(text)
        kind = _PortTaken if "address already in use" in text.lower() else EngineError
        return kind(
            f"died at start ({child.exit_text()}): {cause or 'nothing in its log explains it'}",
            where=self.spec.name,
            fix=f"see {self.spec.log_path}",
        )

    def _require_lease(self) -> PortLease:
        if self._lease is None:
            raise EngineError("is not started", where=self.spec.name)
        return self._lease

    def _require_child(self) -> Child:
        if self._child is None:
            raise EngineError("is not started", where=self.spec.name)
        return self._child


class _PortTaken(EngineError):
    """Another server has the port: worth another try on another one."""


async def check_identity(session: aiohttp.ClientSession, url: str, run_token: str) -> Mapping[str, Any]:
    """What the server at `url` says of itself. Raises EngineError when it is no engine of this run."""
    answer: Any = None
    try:
        async with session.get(f"{url}/vime/identity", headers={TOKEN_HEADER.decode(): run_token}) as response:
            if response.status == 200:
                answer = await response.json(content_type=None)
    except (aiohttp.ClientError, TimeoutError, ValueError):
        answer = None
    if not isinstance(answer, dict) or answer.get("run_token") != run_token:
        raise EngineError(
            f"the server at {url} is not an engine of this run",
            where=url,
            fix="another run or program listens on this port: stop it, or start this run again to take other ports",
        )
    return answer


def check_routes(routes: Sequence[str], *, where: str, in_flight: bool = False) -> None:
    """Raise EngineError where a server that lists its routes lacks some that vime needs, or that updates in flight need."""
    if routes and (missing := missing_routes(routes)):
        raise EngineError(
            f"this vLLM's server has no route {', '.join(missing)}",
            where=where,
            fix="install a vLLM release that vime is made for (0.26 or 0.32); VLLM_SERVER_DEV_MODE must stay 1",
        )
    if routes and in_flight and (missing := missing_routes(routes, in_flight=True)):
        raise EngineError(
            f"this vLLM's server has no route {', '.join(missing)}: it cannot tell which weights sampled which token",
            where=where,
            fix="set weights.update: drain, or install vLLM 0.32",
        )


async def _answers(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(f"{url}/health") as response:
            return response.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False


# ---- what a log says

_PREFIX = re.compile(r"^(?:\([^)]*pid=\d+\)\s?)?(?:[A-Z]+ \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]*\]\s?)?")
_RAISED = re.compile(r"^(?:[A-Za-z_][\w.]*\.)?[A-Z]\w*(?:Error|Exception|Interrupt|Exit|NotFound|Refused)\b(?::|$)")
_USAGE = re.compile(r"^[\w.\-/]+: error: ")
_OWN_ERRORS = "vime.errors."
_WRAPPERS = ("Engine core initialization failed", "Failed core proc", "WorkerProc initialization failed")


def find_cause(log: str) -> str | None:
    """The first error in a server's log that is not merely the echo of another one, with the lines that belong to it.

    An error of vime's own goes before all others: it names the reason of what else went wrong.
    Tracebacks of several processes interleave and the end of the log is the shutdown's noise, so the tail says little.
    """
    lines = [_PREFIX.sub("", line).rstrip() for line in log.splitlines()]
    for index, line in enumerate(lines):
        if line.startswith(_OWN_ERRORS):
            return "\n".join([line.removeprefix(_OWN_ERRORS).partition(": ")[2], *_continuation(lines[index + 1 :])])
    for index, line in enumerate(lines):
        if _USAGE.match(line):
            return line
        if _RAISED.match(line) and not any(word in line for word in _WRAPPERS):
            return "\n".join([line, *_continuation(lines[index + 1 :])])
    errors = [line for line in log.splitlines() if " ERROR " in line or line.startswith("Error")]
    return _PREFIX.sub("", errors[0]).strip() if errors else None


def _continuation(lines: Sequence[str]) -> list[str]:
    """Indented lines after an error belong to it (a validation error lists its findings so)."""
    kept: list[str] = []
    for line in lines[:12]:
        if not line.startswith("  ") or line.lstrip().startswith("File "):
            break
        kept.append(line)
    return kept
