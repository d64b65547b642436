"""Control of one engine over HTTP, straight to its server and never through the router. Every wait has a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import aiohttp

from vime.errors import DeadlineError, EngineError, WeightSyncError
from vime.facts.engine import TOKEN_ROUTE
from vime.weights.answers import error_text
from vime.weights.probe import LogProbs

PauseMode = Literal["drain", "abort", "keep"]
"""drain: running requests finish first. abort: they end now, with what they have. keep: they go on after the update."""

KEEP_ALIVE_S = 2.0
"""Below the 5 s after which vLLM closes an idle connection, so a dead one is never used."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Who answers at an address. `version` is the one the gate was opened with last, `host` as of `vime.weights.hosts`."""

    run_token: str
    pid: int
    gate: str
    version: str | None
    running: int
    routes: Sequence[str] = ()
    """Paths that the server has, where it lists them."""
    host: str = ""


class EngineControl:
    """One engine server with vime's gate. Not for use from two event loops.

    Args:
        url: `http://host:port` of the engine itself.
        api_key: vLLM's API key, where the server has one.
        run_token: what the engine's gate was started with (`VIME_RUN_TOKEN`).
        timeout_s: deadline of every call.
        name: how errors name the engine.
    """

    def __init__(
        self, url: str, *, api_key: str | None = None, run_token: str = "", timeout_s: float = 120.0, name: str = ""
    ) -> None:
        self.url = url.rstrip("/")
        self.name = name or self.url
        self.timeout_s = timeout_s
        self._headers = {"x-vime-run-token": run_token}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"
        self._session: aiohttp.ClientSession | None = None
        self.held_bytes: Mapping[str, int] = {}
        """Of the fullest worker by tag, as the last update found it."""

    # ---- who and how

    async def identity(self) -> Identity:
        return Identity(**await self._call("GET", "/vime/identity"))

    async def check_identity(self) -> Identity:
        """The identity. Raises EngineError when another run's engine answers at this address."""
        identity = await self.identity()
        if identity.run_token != self._headers["x-vime-run-token"]:
            raise EngineError(
                f"{self.name}: process {identity.pid} at {self.url} belongs to another run",
                fix="end that run, or give this one other ports",
            )
        return identity

    async def is_paused(self) -> bool:
        return bool((await self._call("GET", "/is_paused"))["is_paused"])

    async def world_size(self) -> int:
        """Worker processes of the engine, data-parallel replicas included."""
        return int((await self._call("GET", "/get_world_size"))["world_size"])

    async def host(self) -> str:
        """The host of the engine's processes (`vime.weights.hosts.host_identity`)."""
        return (await self.identity()).host

    # ---- pausing

    async def shut(self, pause: PauseMode | None = "drain") -> None:
        """Shut the gate and pause the engine, emptied unless its requests are kept; with None only shut the gate."""
        await self._call("POST", "/vime/gate/shut" + (f"?pause={pause}" if pause else ""))

    async def resume(self) -> None:
        """Let the engine run; its gate stays as it is."""
        await self._call("POST", "/vime/resume")

    async def open(self, version: str, *, resume: bool = False) -> None:
        """Open the gate; with `resume` let the engine run first, in the same call."""
        await self._call("POST", "/vime/gate/open", {"version": version, "resume": resume})

    async def sleep(self, level: int = 1) -> None:
        await self._call("POST", f"/sleep?level={level}")

    async def wake(self, tags: Sequence[str] = ()) -> None:
        """Wake what the tags name, or everything."""
        await self._call("POST", "/wake_up" + ("?" + "&".join(f"tags={t}" for t in tags) if tags else ""))

    # ---- weights

    async def init(self, init_info: Mapping[str, Any]) -> None:
        """Build the engine's transport half; the names are checked against its model. Raises WeightSyncError."""
        await self._call("POST", "/vime/init", dict(init_info))

    async def update(self, update_info: Mapping[str, Any], *, version: str) -> Mapping[str, float]:
        """A whole update; seconds by phase. After a failure the engine can take a new one. Raises WeightSyncError."""
        answer = await self._call("POST", "/vime/update", {"update_info": dict(update_info), "version": version})
        self.held_bytes = answer.get("bytes", {})
        return answer["seconds"]

    async def probe(self, sequences: Sequence[Sequence[int]]) -> LogProbs:
        """Log-prob of each token after the first at temperature 1. Passes the gate; the engine must not be paused."""
        return await asyncio.gather(*(self._prompt_log_probs(ids) for ids in sequences))

    async def _prompt_log_probs(self, ids: Sequence[int]) -> list[float]:
        sampling = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0, "detokenize": False}
        answer = await self._call("POST", TOKEN_ROUTE, {"token_ids": list(ids), "sampling_params": sampling})
        rows = answer.get("prompt_logprobs") or []
        if len(rows) != len(ids):
            raise EngineError(
                f"{self.name}: {len(rows)} prompt log-probs for {len(ids)} tokens", fix="check the engine's version and flags"
            )
        return [float(row[str(token)]["logprob"]) for token, row in zip(ids[1:], rows[1:], strict=True)]

    # ---- transport

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def __aenter__(self) -> EngineControl:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        if self._session is None:
            connector = aiohttp.TCPConnector(keepalive_timeout=KEEP_ALIVE_S, limit=0)
            self._session = aiohttp.ClientSession(
                trust_env=False, connector=connector, headers=self._headers, timeout=aiohttp.ClientTimeout(total=None)
            )
        try:
            async with (
                asyncio.timeout(self.timeout_s),
                self._session.request(method, self.url + path, json=body) as response,
            ):
                content = await response.json(content_type=None) if response.status == 200 else await response.text()
        except TimeoutError:
            raise DeadlineError(
                f"{self.name}: no answer to {path} within {self.timeout_s:g} s",
                where=self.url,
                fix="see whether its process lives and what its log says; the engine is restarted by its supervisor",
            ) from None
        except (aiohttp.ClientError, OSError) as error:
            raise EngineError(
                f"{self.name}: no answer to {path}: {error or type(error).__name__}",
                where=self.url,
                fix="the engine's process has ended or never listened; read its log",
            ) from None
        if response.status != 200:
            raise self._error(path, response.status, str(content))
        return content

    def _error(self, path: str, status: int, text: str) -> EngineError | WeightSyncError:
        what = f"{self.name}: {path} answered {status}: {error_text(text.encode(), limit=2000)}"
        if path in ("/vime/init", "/vime/update"):
            return WeightSyncError(what, where=self.url, fix="publish again; the engine stays paused until an update succeeds")
        return EngineError(what, where=self.url, fix="read the engine's log")
