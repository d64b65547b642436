"""Who is on shared devices when: the trainer leaves them between steps (`park`) or everything stays (`resident`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from vime.cluster.links import TrainerLink
from vime.facts.memory import Tag

Log = Callable[[str, Mapping[str, Mapping[str, int]]], None]
"""Gets the edge (`training`, `updating`, `serving`) and bytes by role and tag."""


class TrainerMemory(Protocol):
    """Called at the edges of a step, in this order; `to_train` also before anything else that needs the whole trainer."""

    async def to_train(self) -> None: ...

    async def to_publish(self) -> None: ...

    async def to_serve(self) -> None: ...


class Resident:
    """Nothing moves. The bytes are logged once for every edge."""

    def __init__(self, link: TrainerLink, engine: Mapping[str, int], log: Log) -> None:
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
    """Gradients and optimizer leave after training, parameters after publishing; all come back for the next step."""

    def __init__(self, link: TrainerLink, engine: Mapping[str, int], log: Log) -> None:
        self._link, self._engine, self._log = link, engine, log
        self._away: tuple[Tag, ...] = ()

    async def to_train(self) -> None:
        away, self._away = self._away, ()
        if away:
            await self._link.all("wake", away)
        await log_bytes(self._link, self._engine, "training", self._log)

    async def to_publish(self) -> None:
        await self._park((Tag.GRADS, Tag.OPTIMIZER), "updating")

    async def to_serve(self) -> None:
        await self._park((Tag.PARAMS,), "serving")

    async def _park(self, tags: tuple[Tag, ...], edge: str) -> None:
        await self._link.all("park", tags)
        self._away = (*tags, *self._away)
        await log_bytes(self._link, self._engine, edge, self._log)


async def log_bytes(link: TrainerLink, engine: Mapping[str, int], edge: str, log: Log) -> None:
    """Bytes on one device of each role."""
    trainer = (await link.all("memory_bytes"))[0]
    log(edge, {"actor": trainer, **({"rollout": engine} if engine else {})})
