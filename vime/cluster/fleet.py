"""The engines of a run and their router: started together, watched, replaced one by one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from typing import Any, Protocol

from vime.cluster.engine_process import EngineAddress
from vime.cluster.links import answer
from vime.errors import EngineError, VimeError
from vime.rollout.router import RouterServer, RouterSpec
from vime.weights.control import EngineControl

WATCH_INTERVAL_S = 1.0


class Admission(Protocol):
    """`vime.weights.protocol.Publisher`: gives a restarted engine the last published weights before it gets traffic."""

    def remove(self, name: str) -> None: ...

    async def admit(self, engine: EngineControl) -> None: ...


@dataclass(frozen=True)
class FleetRules:
    """Deadlines and keys of the fleet. `max_restarts` counts over all engines of the run."""

    run_token: str
    api_key: str | None
    start_timeout_s: float
    call_timeout_s: float
    max_restarts: int = 10


Event = Callable[[str, str], None]
Turn = Callable[[], AbstractAsyncContextManager[None]]


class EngineFleet:
    """Engine processes (Ray actors of `EngineProcess`), their control connections and the router."""

    def __init__(self, actors: Sequence[Any], router: RouterSpec, rules: FleetRules, *, on_event: Event) -> None:
        self._actors = list(actors)
        self._router = RouterServer(router)
        self._rules = rules
        self._event = on_event
        self._addresses: list[EngineAddress] = []
        self._restarts = 0
        self._replaced = 0
        self._controls: list[EngineControl] = []
        self._mending = asyncio.Lock()
        self._serving = asyncio.Event()
        self._serving.set()

    @property
    def router_url(self) -> str:
        return self._router.url

    @property
    def controls(self) -> tuple[EngineControl, ...]:
        return tuple(self._controls)

    async def start(self) -> None:
        """Start all engines at once, then the router over them. Raises EngineError naming the one that failed."""
        self._addresses = list(await asyncio.gather(*(self._start(i) for i in range(len(self._actors)))))
        self._controls = [self._control(a) for a in self._addresses]
        await asyncio.gather(*(c.check_identity() for c in self._controls))
        self._router = RouterServer(replace(self._router.spec, worker_urls=tuple(a.url for a in self._addresses)))
        await asyncio.to_thread(self._router.start)
        await self._router.wait_ready(self._rules.start_timeout_s)

    async def watch(self, admission: Admission, turn: Turn) -> None:
        """Look after engines and router until cancelled.

        A dead engine is restarted inside `turn()` (the rollout turn where it shares devices), gets the last published
        weights and returns to the router. Raises EngineError after too many restarts.
        """
        while True:
            await asyncio.sleep(WATCH_INTERVAL_S)
            lives = await self._alive()
            if not any(lives):
                self._serving.clear()
            if not all(lives):
                async with turn():
                    await self.mend(admission)
                self._serving.set()
            if not self._router.alive():
                self._event("router_restarted", "the router died and was started again")
                await self._router.restart(self._rules.start_timeout_s)

    async def mend(self, admission: Admission) -> int:
        """Replace every engine that is dead now; returns how many were replaced since the start of the run."""
        async with self._mending:
            for index, lives in enumerate(await self._alive()):
                if not lives:
                    await self._replace(index, admission)
            return self._replaced

    async def wait_serving(self) -> None:
        """Return while any engine lives, so that work waits for a restart instead of failing again and again."""
        await self._serving.wait()

    @property
    def replaced(self) -> int:
        """Engines replaced so far."""
        return self._replaced

    async def _replace(self, index: int, admission: Admission) -> None:
        old = self._addresses[index]
        self._restarts += 1
        if self._restarts > self._rules.max_restarts:
            raise EngineError(
                f"engines died {self._restarts} times; last: {old.name} at {old.url}",
                fix="read the engines' logs in the run's logs folder",
            )
        admission.remove(old.name)
        self._event("engine_died", f"{old.name} at {old.url} died; it is started again")
        await self._quietly(self._router.remove_worker(old.url))
        new = await self._start(index)
        control = self._control(new)
        await admission.admit(control)
        await self._router.add_worker(new.url)
        await self._controls[index].close()
        self._addresses[index], self._controls[index] = new, control
        self._replaced += 1
        self._event("engine_restarted", f"{new.name} serves again at {new.url}")

    async def _quietly(self, call: Awaitable[None]) -> None:
        """The router drops a dead worker by itself as well; a refusal changes nothing."""
        try:
            await call
        except VimeError as error:
            self._event("router_refused", str(error))

    async def _start(self, index: int) -> EngineAddress:
        timeout_s = self._rules.start_timeout_s
        return await answer(self._actors[index].start.remote(), who=f"engine {index}", what="start", timeout_s=timeout_s + 30.0)

    async def _alive(self) -> list[bool]:
        calls = [
            answer(a.alive.remote(), who=f"engine host {i}", what="alive", timeout_s=30.0) for i, a in enumerate(self._actors)
        ]
        return await asyncio.gather(*calls)

    def _control(self, address: EngineAddress) -> EngineControl:
        rules = self._rules
        return EngineControl(
            address.url, api_key=rules.api_key, run_token=rules.run_token, timeout_s=rules.call_timeout_s, name=address.name
        )

    async def stop(self) -> None:
        """End the router, then the engines."""
        await asyncio.to_thread(self._router.stop)
        await asyncio.gather(
            *(answer(a.stop.remote(), who=f"engine {i}", what="stop", timeout_s=30.0) for i, a in enumerate(self._actors)),
            return_exceptions=True,
        )
