"""An engine host as a Ray actor: it owns one engine server, which runs under a guardian of this process."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from vime.cluster.guardian import guardian_command
from vime.platforms.discovery import ResolvedPlugin, impose
from vime.rollout.engine import EngineServer, EngineSpec


@dataclass(frozen=True)
class EngineAddress:
    """Where an engine listens; `pid` is its guardian's."""

    name: str
    url: str
    pid: int


class EngineProcess:
    """Starts, watches and restarts one engine server."""

    def __init__(
        self, spec: EngineSpec, plugins: Sequence[ResolvedPlugin] = (), *, start_timeout_s: float, segments: str
    ) -> None:
        impose(plugins)
        self._spec = replace(spec, command_prefix=guardian_command(segments=segments))
        self._timeout_s = start_timeout_s
        self._server: EngineServer | None = None

    async def start(self) -> EngineAddress:
        """Start the server, or replace one that died. Raises EngineError with the cause from its log."""
        if self._server is not None:
            await asyncio.to_thread(self._server.stop, 1.0)
        self._server = EngineServer(self._spec)
        await asyncio.to_thread(self._server.start)
        await self._server.wait_ready(self._timeout_s)
        return EngineAddress(self._spec.name, self._server.url, self._server.pid)

    async def alive(self) -> bool:
        return self._server is not None and self._server.alive()

    async def stop(self) -> None:
        if self._server is not None:
            await asyncio.to_thread(self._server.stop)
