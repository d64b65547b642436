"""The training roles of a run as one team: roles on the same devices work in turn, the others side by side."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from vime.cluster.links import TrainerLink
from vime.cluster.memory_role import TrainerMemory
from vime.facts.memory import Tag
from vime.facts.process import Parallel
from vime.memory.residency import TRAINER_TAGS
from vime.planning.amounts import FROZEN
from vime.planning.plan import Task


def tags_of(task: Task) -> tuple[Tag, ...]:
    """What a training role has on its devices."""
    return (Tag.PARAMS,) if task in FROZEN else TRAINER_TAGS


@dataclass(frozen=True, eq=False)
class Member:
    """A training role. Members with equal `devices` are on the same ones."""

    role: str
    task: Task
    link: TrainerLink
    parallel: Parallel
    devices: int = 0

    @property
    def tags(self) -> tuple[Tag, ...]:
        """What it has on its devices."""
        return tags_of(self.task)


class Team:
    """Members in the order in which those on the same devices take their turns; the actor is among them."""

    def __init__(self, members: Sequence[Member], memory: TrainerMemory) -> None:
        self.members = tuple(members)
        self._memory = memory
        (self.actor,) = self.of("actor")

    def of(self, *tasks: Task) -> tuple[Member, ...]:
        """The members with one of these tasks."""
        return tuple(member for member in self.members if member.task in tasks)

    async def work(
        self, members: Iterable[Member], do: Callable[[Member], Awaitable[Any]], *, needs: Sequence[Tag]
    ) -> dict[str, Any]:
        """What `do` gives for each of the members, by role. `needs` of what a member has must be on its devices meanwhile.

        The first failure surfaces at once; whoever works beside is not waited for.
        """
        turns: dict[int, list[Member]] = {}
        for member in members:
            turns.setdefault(member.devices, []).append(member)

        async def in_turn(sharing: Sequence[Member]) -> list[tuple[str, Any]]:
            done = []
            for member in sharing:
                await self._memory.take_turn(member.role, [tag for tag in member.tags if tag in needs])
                done.append((member.role, await do(member)))
            return done

        parts = await asyncio.gather(*(in_turn(sharing) for sharing in turns.values()))
        return dict(pair for part in parts for pair in part)
