"""What the loop speaks to. Every role is a Protocol; `Run` bundles them. Optional work is a role that does nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from vime.types import Batch, Group, PolicyVersion, StepReport


class Room(Protocol):
    """Permission to start groups, so that no more is sampled than training may use."""

    async def take(self, limit: int) -> int:
        """Wait until at least one group may start; return how many may (1 to `limit`)."""
        ...

    def give_back(self, count: int) -> None:
        """Return permission for groups that were dropped or not started."""
        ...


class Rollout(Protocol):
    """Takes prompts, samples, filters and scores them: a group comes out whole or not at all."""

    def groups(self, room: Room) -> AsyncIterator[Group]:
        """Yield scored groups as they finish, starting only what `room` allows. Ends when the data ends."""
        ...


class ExperienceBuffer(Protocol):
    """Holds groups between sampling and training and keeps the staleness bound."""

    def room(self) -> Room: ...

    async def put(self, group: Group) -> None: ...

    async def take(self, step: int) -> Batch:
        """Wait for the groups of a step."""
        ...

    def advance(self, version: PolicyVersion) -> None:
        """The batch is trained and `version` is published: its room is free again."""
        ...

    def close(self) -> None:
        """No more groups will come; a waiting `take` that cannot be served raises RolloutError."""
        ...


class Trainer(Protocol):
    """Turns a batch into an update of the weights."""

    async def step(self, batch: Batch) -> StepReport: ...


class WeightSync(Protocol):
    """Brings the trainer's weights to every engine."""

    async def publish(self) -> PolicyVersion:
        """Publish the current weights and return their version. Raises WeightSyncError, ProbeError or DeadlineError."""
        ...


class DeviceTurns(Protocol):
    """Who may use shared devices. The rollout turn is shared and held per request, the train turn is exclusive."""

    def train(self) -> AbstractAsyncContextManager[None]:
        """Running requests finish, new ones wait. Free where trainer and engines have their own devices."""
        ...


class Checkpoints(Protocol):
    async def save_if_due(self, report: StepReport) -> None: ...


class Evaluation(Protocol):
    async def run_if_due(self, version: PolicyVersion) -> None: ...


class Schedule(Protocol):
    def __iter__(self) -> Iterator[int]:
        """The steps still to do, the first one after the restored version."""
        ...


class Observer(Protocol):
    def step(self, report: StepReport) -> None:
        """Write the step's row; it is on disk when this returns."""
        ...


@dataclass(frozen=True)
class Run:
    """Everything the loop needs, and nothing else."""

    rollout: Rollout
    buffer: ExperienceBuffer
    trainer: Trainer
    sync: WeightSync
    turns: DeviceTurns
    checkpoints: Checkpoints
    evaluation: Evaluation
    schedule: Schedule
    observer: Observer
