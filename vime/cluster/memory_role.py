"""Who is on shared devices when: the trainer leaves them between steps (`park`) or everything stays (`resident`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from vime.cluster.links import TrainerLink
from vime.facts.memory import Tag
from vime.memory.residency import TRAINER_TAGS

Log = Callable[[str, Mapping[str, Mapping[str, int]]], None]
"""Gets the edge (`training`, `updating`, `serving`) and bytes by role and tag."""

EngineBytes = Mapping[str, Mapping[str, int]]
"""What an engine has on a device, by edge and tag."""


class TrainerMemory(Protocol):
    """Called at the edges of a step, in this order; `to_train` also before anything else that needs the whole trainer.

    Calling one again changes nothing. Engines that share the devices must have left them before `to_train` and `to_publish`,
    and wake their caches after `to_serve`. `leaves`: in `to_serve` the trainer goes off the devices.
    """

    @property
    def leaves(self) -> bool: ...

    async def to_train(self) -> None: ...

    async def to_publish(self) -> None: ...

    async def to_serve(self) -> None: ...


class Resident:
    """Nothing moves. The bytes are logged once for every edge."""

    leaves = False

    def __init__(self, link: TrainerLink, engine: EngineBytes, log: Log) -> None:
        self._link, self._engine, self._log = link, engine, log
        self._seen: set[str] = set()

    async def to_train(self) -> None:
        await self._edge("training")

    async def to_publish(self) -> None:
        await self._edge("updating")

    async def to_serve(self) -> None:
        await self._edge("serving")

    async def _edge(self, edge: str) -> None:
        if edge not in self._seen:
            self._seen.add(edge)
            await log_bytes(self._link, self._engine, edge, self._log)


class Parked:
    """Gradients and optimizer leave after training, parameters after publishing; all come back for the next step.

    `away` is what has left already.
    """

    leaves = True

    def __init__(self, link: TrainerLink, engine: EngineBytes, log: Log, *, away: Sequence[Tag] = ()) -> None:
        self._link, self._engine, self._log = link, engine, log
        self._away = frozenset(away)

    async def to_train(self) -> None:
        await self._keep(TRAINER_TAGS, "training")

    async def to_publish(self) -> None:
        await self._keep((Tag.PARAMS,), "updating")

    async def to_serve(self) -> None:
        await self._keep((), "serving")

    async def _keep(self, tags: Sequence[Tag], edge: str) -> None:
        """Have these tags on the device and no others."""
        leaving = tuple(tag for tag in TRAINER_TAGS if tag not in tags and tag not in self._away)
        coming = tuple(tag for tag in TRAINER_TAGS if tag in tags and tag in self._away)
        if leaving:
            await self._link.all("park", leaving)
            self._away |= set(leaving)
        if coming:
            await self._link.all("wake", coming)
            self._away -= set(coming)
        await log_bytes(self._link, self._engine, edge, self._log)


async def log_bytes(link: TrainerLink, engine: EngineBytes, edge: str, log: Log) -> None:
    """Bytes on one device of each role."""
    trainer = (await link.all("memory_bytes"))[0]
    log(edge, {"actor": trainer, **({"rollout": engine.get(edge, {})} if engine else {})})
