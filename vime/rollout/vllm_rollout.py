"""The default rollout, seen from the driver: hands prompts to rollout workers and yields groups as references."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from vime.data.source import PromptSource
from vime.errors import RolloutError
from vime.roles import Room
from vime.types import Group, PromptId

MAX_ATTEMPTS = 20
"""Failures of one group before the run gives up: by then it is not the engine's restart that is in the way."""


@dataclass(frozen=True)
class GroupOutcome:
    """What a worker reports of one prompt: the group as control sees it, or why there is none."""

    prompt: PromptId
    group: Group | None = None
    dropped: str | None = None
    failure: str | None = None
    counts: Mapping[str, float] = field(default_factory=dict)


class WorkerLink(Protocol):
    """One rollout worker process."""

    async def submit(self, prompts: Sequence[PromptId]) -> None: ...

    async def finished(self) -> Sequence[GroupOutcome]: ...


class SubmitGate(Protocol):
    """Shut while training has shared devices to itself."""

    async def wait_open(self) -> None: ...


class VllmRollout:
    """Takes as many prompts as the buffer has room for and keeps the workers evenly loaded.

    `on_count` gets `(metric name, amount)` for drops and failures.
    """

    def __init__(
        self,
        workers: Sequence[WorkerLink],
        source: PromptSource,
        *,
        gate: SubmitGate,
        on_count: Callable[[str, float], None],
        chunk: int,
    ) -> None:
        self._workers = list(workers)
        self._source = source
        self._gate = gate
        self._count = on_count
        self._chunk = chunk
        self._load = [0] * len(workers)
        self._by_load = [(0, worker) for worker in range(len(workers))]

    @property
    def outstanding(self) -> int:
        """Groups that workers have not reported yet."""
        return sum(self._load)

    async def groups(self, room: Room) -> AsyncIterator[Group]:
        """See `vime.roles.Rollout`; prompts never end, epoch follows epoch. Raises RolloutError when a group keeps failing."""
        ready: asyncio.Queue[Group | BaseException] = asyncio.Queue()

        def surface(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and (error := task.exception()) is not None:
                ready.put_nowait(error)

        tasks = [asyncio.create_task(self._feed(room))]
        tasks += [asyncio.create_task(self._drain(i, room, ready)) for i in range(len(self._workers))]
        for task in tasks:
            task.add_done_callback(surface)
        try:
            while True:
                item = await ready.get()
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _feed(self, room: Room) -> None:
        while True:
            allowed = await room.take(self._chunk)
            await self._gate.wait_open()
            for worker, prompts in self._shares(self._source.take(allowed)).items():
                await self._workers[worker].submit(prompts)

    def _shares(self, prompts: Sequence[PromptId]) -> dict[int, list[PromptId]]:
        """Each prompt to the worker that has least to do then, by worker; their load counts from here on."""
        shares: dict[int, list[PromptId]] = {}
        for prompt in prompts:
            worker = self._least()
            self._add_load(worker, 1)
            shares.setdefault(worker, []).append(prompt)
        return shares

    def _add_load(self, worker: int, groups: int) -> None:
        self._load[worker] += groups
        heapq.heappush(self._by_load, (self._load[worker], worker))

    def _least(self) -> int:
        """The worker with the lowest load; entries of a load that is no longer true are left out when they come up."""
        heap = self._by_load
        if len(heap) > 8 * len(self._load):
            heap[:] = [(load, worker) for worker, load in enumerate(self._load)]
            heapq.heapify(heap)
        while heap[0][0] != self._load[heap[0][1]]:
            heapq.heappop(heap)
        return heap[0][1]

    async def _drain(self, index: int, room: Room, ready: asyncio.Queue[Group | BaseException]) -> None:
        while True:
            outcomes = await self._workers[index].finished()
            self._add_load(index, -len(outcomes))
            for outcome in outcomes:
                for name, amount in outcome.counts.items():
                    self._count(name, amount)
                if outcome.group is not None:
                    ready.put_nowait(outcome.group)
                else:
                    self._replace(outcome)
                    room.give_back(1)

    def _replace(self, outcome: GroupOutcome) -> None:
        """A dropped group is forgotten; a failed one is generated again."""
        if outcome.dropped is not None:
            self._count(f"rollout/dynamic_filter/drop_{outcome.dropped}", 1)
            self._source.drop([outcome.prompt])
            return
        self._count("rollout/regenerated", 1)
        if outcome.prompt.attempt >= MAX_ATTEMPTS:
            raise RolloutError(
                f"group {outcome.prompt.group} failed {MAX_ATTEMPTS} times; last: {outcome.failure}",
                fix="read the engines' logs in the run's logs folder",
            )
        self._source.give_back([outcome.prompt], regenerate=True)
