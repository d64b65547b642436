"""Who is on shared devices when: training roles leave them between their turns (`park`) or everything stays (`resident`)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Protocol

from vime.cluster.links import TrainerLink
from vime.facts.memory import Tag
from vime.memory.residency import TRAINER_TAGS, Place, Residency, turn_rules

Log = Callable[[str, Mapping[str, Mapping[str, int]]], None]
"""Gets the edge (`training`, `updating`, `serving`) and bytes by role and tag."""

EngineBytes = Mapping[str, Mapping[str, int]]
"""What an engine has on a device, by edge and tag."""


class TrainerMemory(Protocol):
    """Called at the edges of a step, in this order: the turns of the roles that work, `to_publish`, `to_serve`.

    Calling one again changes nothing. Engines that share the devices must have left them before a turn and `to_publish`,
    and wake their caches after `to_serve`. `leaves`: in `to_serve` the trainer goes off the devices.
    """

    @property
    def leaves(self) -> bool: ...

    async def take_turn(self, role: str, tags: Sequence[Tag]) -> None:
        """The devices are this training role's, for what needs these tags; any other training role on them leaves."""
        ...

    async def to_publish(self) -> None: ...

    async def to_serve(self) -> None: ...


class Resident:
    """Nothing moves. The bytes are logged once for every edge. `links` are the training roles, the actor first."""

    leaves = False

    def __init__(self, links: Mapping[str, TrainerLink], engine: EngineBytes, log: Log) -> None:
        self._links, self._engine, self._log = links, engine, log
        self._seen: set[str] = set()

    async def take_turn(self, role: str, tags: Sequence[Tag]) -> None:
        if set(tags) == set(TRAINER_TAGS):
            await self._edge("training")

    async def to_publish(self) -> None:
        await self._edge("updating")

    async def to_serve(self) -> None:
        await self._edge("serving")

    async def _edge(self, edge: str) -> None:
        if edge not in self._seen:
            self._seen.add(edge)
            await log_bytes(self._links, self._engine, edge, self._log)


class Parked:
    """Whoever is not in turn leaves the devices; after training the actor keeps its parameters until they are published.

    `links` are the training roles on the actor's devices, the actor first, and `tags` what each has there; others keep their
    own devices and never leave. With `away` everything has left already. Nobody comes before everybody else is gone, which
    the state machine of `vime.memory.residency` checks.
    """

    leaves = True

    def __init__(
        self,
        links: Mapping[str, TrainerLink],
        engine: EngineBytes,
        log: Log,
        *,
        tags: Mapping[str, Sequence[Tag]],
        away: bool = False,
    ) -> None:
        self._links, self._engine, self._log = links, engine, log
        self._tags = {role: tuple(tags[role]) for role in links}
        self._actor = next(iter(links))
        self._residency = Residency(turn_rules(self._tags))
        for role in links:
            self._residency.register(role, self._tags[role], Place.HOST if away else Place.DEVICE)
        self._edge = ""

    async def take_turn(self, role: str, tags: Sequence[Tag]) -> None:
        if role in self._links:
            await self._keep(role, tags, turn_edge(role, tags, is_actor=role == self._actor))

    async def to_publish(self) -> None:
        await self._keep(self._actor, (Tag.PARAMS,), "updating")

    async def to_serve(self) -> None:
        await self._keep(self._actor, (), "serving")

    async def _keep(self, role: str, tags: Sequence[Tag], edge: str) -> None:
        """Have these tags of one role on the devices and nothing else."""
        wanted = {other: set(tags) if other == role else set[Tag]() for other in self._links}
        await asyncio.gather(*(self._leave(other, wanted[other]) for other in self._links))
        coming = tuple(tag for tag in self._tags[role] if tag in wanted[role] and not self._is_there(role, tag))
        if coming:
            self._residency.wake(role, coming)
            await self._links[role].all("wake", coming)
        if edge != self._edge:
            self._edge = edge
            await log_bytes(self._links, self._engine, edge, self._log)

    async def _leave(self, role: str, wanted: Set[Tag]) -> None:
        leaving = tuple(tag for tag in self._tags[role] if tag not in wanted and self._is_there(role, tag))
        if leaving:
            await self._links[role].all("park", leaving)
            self._residency.park(role, leaving)

    def _is_there(self, role: str, tag: Tag) -> bool:
        return self._residency.place(role, tag) is Place.DEVICE


def turn_edge(role: str, tags: Sequence[Tag], *, is_actor: bool) -> str:
    """The name of a role's turn: `training` for the actor, else with the role's name; `scoring` where parameters will do."""
    what = "training" if set(tags) == set(TRAINER_TAGS) else "scoring"
    return what if is_actor else f"{what} {role}"


async def log_bytes(links: Mapping[str, TrainerLink], engine: EngineBytes, edge: str, log: Log) -> None:
    """Bytes on one device of each role."""
    found = await asyncio.gather(*(link.all("memory_bytes") for link in links.values()))
    trainers = {role: ranks[0] for role, ranks in zip(links, found, strict=True)}
    rollout = engine.get(edge, engine.get(edge.partition(" ")[0], {}))
    log(edge, {**trainers, **({"rollout": rollout} if engine else {})})
