"""Every role of the loop in memory. They behave: versions move, requests take time, processes die, checkpoints restore."""

from __future__ import annotations

import asyncio
import copy
import hashlib
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from vime.data.buffer import Buffer, Order, staleness
from vime.data.schedule import StepSchedule
from vime.data.source import PromptSource
from vime.errors import RolloutError, TrainerError
from vime.roles import Room, Run
from vime.rollout.turns import FreeTurns, Turns
from vime.types import Batch, Group, PolicyVersion, PromptId, SampleInfo, SampleStatus, StepReport


def never(_: Any) -> bool:
    return False


@dataclass(frozen=True)
class Script:
    """What happens in a fake run. Times are seconds of the event loop (virtual under `run_virtual`).

    Args:
        latency_s: how long a group is sampled.
        dropped: the filter refuses these prompts.
        failed: sampling these fails; the prompt goes back to the source with the next attempt.
        trainer_dies_at: in these steps the trainer dies once and is restarted from the last checkpoint.
        save_every: steps between checkpoints, 0 for none.
        shared_devices: trainer and engines take turns.
        faults: exceptions by role: `rollout`, `trainer`, `sync`, `evaluation`, `checkpoints`, `observer`; raised when the
            role handles step `fault_step` (for the rollout: the group with this id).
    """

    num_steps: int = 4
    batch_size: int = 2
    max_staleness: int = 0
    order: Order | None = None
    num_rows: int = 100
    epochs: int | None = None
    partial_last: bool = False
    shared_devices: bool = True
    save_every: int = 1
    train_s: float = 1.0
    publish_s: float = 0.1
    evaluate_s: float = 0.1
    latency_s: Callable[[PromptId], float] = lambda _: 1.0
    dropped: Callable[[PromptId], bool] = never
    failed: Callable[[PromptId], bool] = never
    trainer_dies_at: frozenset[int] = frozenset()
    faults: Mapping[str, BaseException] = field(default_factory=dict)
    fault_step: int = 2


@dataclass
class World:
    """What the roles share: the published version and a log of events, in order, with their time."""

    script: Script
    published: PolicyVersion | None = None
    sampling: int = 0
    training: bool = False
    log: list[tuple[str, Any]] = field(default_factory=list)
    overlaps: int = 0

    def note(self, event: str, value: Any = None) -> None:
        self.log.append((event, value))

    def values(self, event: str) -> list[Any]:
        """What was noted under `event`, in order."""
        return [value for name, value in self.log if name == event]

    def fault(self, role: str, step: int) -> None:
        """Raise the script's exception for this role when its step has come."""
        if role in self.script.faults and step == self.script.fault_step:
            raise self.script.faults[role]

    def check_overlap(self) -> None:
        self.overlaps += bool(self.sampling and self.training)


def fake_group(prompt: PromptId, version: PolicyVersion | None, *, rewards: tuple[float, ...] = (0.0, 1.0)) -> Group:
    """A group of one-token prompts and answers; its payload is the text `group.attempt`."""
    samples = tuple(SampleInfo(i, 1, 1, 1, reward, SampleStatus.COMPLETED) for i, reward in enumerate(rewards))
    return Group(prompt, samples, payload=f"{prompt.group}.{prompt.attempt}", oldest=version)


class FakeRollout:
    """Samples as many groups at once as there is room for, each with the version that is published when it starts."""

    def __init__(self, world: World, source: PromptSource, turns: Turns | FreeTurns) -> None:
        self._world = world
        self._source = source
        self._turns = turns

    async def groups(self, room: Room) -> AsyncIterator[Group]:
        """See `vime.roles.Rollout`. Ends when the data ends and nothing is in flight."""
        sampling: set[asyncio.Task[Any]] = set()
        asking: asyncio.Task[Any] | None = None
        try:
            while not self._source.exhausted or sampling:
                if asking is None and not self._source.exhausted:
                    asking = asyncio.create_task(room.take(3))
                waiting = {*sampling, *([asking] if asking else [])}
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in sorted(done & sampling, key=lambda task: int(task.get_name())):
                    sampling.discard(task)
                    if (group := task.result()) is None:
                        room.give_back(1)
                    else:
                        yield group
                if asking is not None and asking in done:
                    sampling |= self._start(room, asking.result())
                    asking = None
        finally:
            tasks = [*sampling, *([asking] if asking else [])]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _start(self, room: Room, allowed: int) -> set[asyncio.Task[Any]]:
        prompts = self._source.take(allowed)
        room.give_back(allowed - len(prompts))
        return {asyncio.create_task(self._sample(prompt), name=str(prompt.group)) for prompt in prompts}

    async def _sample(self, prompt: PromptId) -> Group | None:
        """The group, or None when it was dropped or given back."""
        world, script = self._world, self._world.script
        async with self._turns.rollout():
            version = world.published
            if version is None:
                raise RolloutError("sampling starts before any version was published")
            world.note("start", (prompt.group, version.step))
            world.sampling += 1
            world.check_overlap()
            try:
                await asyncio.sleep(script.latency_s(prompt))
            finally:
                world.sampling -= 1
        world.fault("rollout", prompt.group)
        if script.failed(prompt):
            self._source.give_back([prompt], regenerate=True)
            return None
        if script.dropped(prompt):
            self._source.drop([prompt])
            world.note("drop", prompt.group)
            return None
        return fake_group(prompt, version)


class FakeCheckpoints:
    """Keeps the last checkpoint in memory: `{"step", "weights", "buffer"}`."""

    def __init__(self, world: World, buffer: Buffer, *, saved: Mapping[str, Any]) -> None:
        self._world = world
        self._buffer = buffer
        self.saved: dict[str, Any] = dict(saved)
        self.trainer: FakeTrainer | None = None

    async def save_if_due(self, report: StepReport) -> None:
        every = self._world.script.save_every
        self._world.fault("checkpoints", report.step)
        if every == 0 or report.step % every or self.trainer is None:
            return
        state = self._buffer.state(report.step)
        self.saved = copy.deepcopy({"step": report.step, "weights": self.trainer.weights, "buffer": state})
        self._buffer.release_until(report.step)
        self._world.note("save", report.step)


class FakeTrainer:
    """Its weights are a hash over everything that it was trained on, in order, so equal weights mean equal training."""

    def __init__(self, world: World, buffer: Buffer, checkpoints: FakeCheckpoints) -> None:
        self._world = world
        self._buffer = buffer
        self._checkpoints = checkpoints
        self._to_die = set(world.script.trainer_dies_at)
        self.weights: str = checkpoints.saved["weights"]
        self.version = PolicyVersion(checkpoints.saved.get("incarnation", 0), checkpoints.saved["step"])
        checkpoints.trainer = self

    async def step(self, batch: Batch) -> StepReport:
        """See `vime.roles.Trainer`. When it dies it restarts from the last checkpoint and trains the journal again."""
        self._world.training = True
        try:
            await self._train(batch)
            self._world.fault("trainer", batch.step)
            if batch.step in self._to_die:
                self._to_die.discard(batch.step)
                await self._restart()
        finally:
            self._world.training = False
        bound = max(staleness(group, batch.step) for group in batch.groups)
        return StepReport(batch.step, self.version, {"rollout/staleness/max": float(bound)})

    async def _restart(self) -> None:
        saved = self._checkpoints.saved
        self.weights = saved["weights"]
        self.version = PolicyVersion(self.version.incarnation + 1, saved["step"])
        self._world.note("restart", self.version)
        for batch in self._buffer.rewind(saved["step"]):
            await self._train(batch)

    async def _train(self, batch: Batch) -> None:
        if batch.step != self.version.step + 1:
            raise TrainerError(f"trainer is at {self.version}, it cannot train step {batch.step}")
        self._world.check_overlap()
        await asyncio.sleep(self._world.script.train_s)
        self._world.check_overlap()
        payloads = [group.payload for group in batch.groups]
        self.weights = hashlib.sha256(repr((self.weights, batch.step, payloads)).encode()).hexdigest()
        self.version = PolicyVersion(self.version.incarnation, batch.step)
        self._world.note("train", (batch.step, tuple(group.prompt.group for group in batch.groups)))
        self._world.note("staleness", tuple(staleness(group, batch.step) for group in batch.groups))


class FakeSync:
    """Publishes by writing the version down."""

    def __init__(self, world: World, trainer: FakeTrainer) -> None:
        self._world = world
        self._trainer = trainer

    async def publish(self) -> PolicyVersion:
        await asyncio.sleep(self._world.script.publish_s)
        self._world.fault("sync", self._trainer.version.step)
        self._world.published = self._trainer.version
        self._world.note("publish", self._trainer.version)
        return self._trainer.version


class FakeTurns:
    """Notes when the train turn starts and ends, around real turns."""

    def __init__(self, world: World, turns: Turns | FreeTurns) -> None:
        self._world = world
        self._turns = turns

    @asynccontextmanager
    async def train(self) -> AsyncIterator[None]:
        async with self._turns.exclusive():
            self._world.note("turn")
            try:
                yield
            finally:
                self._world.note("turn over")


class FakeEvaluation:
    """Evaluates every version, in the rollout turn, and tells the schedule."""

    def __init__(self, world: World, turns: Turns | FreeTurns, schedule: StepSchedule) -> None:
        self._world = world
        self._turns = turns
        self._schedule = schedule

    async def run_if_due(self, version: PolicyVersion) -> None:
        async with self._turns.rollout():
            await asyncio.sleep(self._world.script.evaluate_s)
        self._world.fault("evaluation", version.step)
        self._world.note("evaluate", version)
        self._schedule.observe({"eval/version": float(version.step)})


class FakeObserver:
    """Keeps the rows."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.rows: list[StepReport] = []

    def step(self, report: StepReport) -> None:
        self._world.fault("observer", report.step)
        self.rows.append(report)
        self._world.note("row", report.step)


@dataclass(frozen=True)
class FakeRun:
    """A run and its parts; `warnings` are those of restoring."""

    run: Run
    world: World
    source: PromptSource
    buffer: Buffer
    trainer: FakeTrainer
    checkpoints: FakeCheckpoints
    observer: FakeObserver
    warnings: tuple[str, ...] = ()


def fake_run(script: Script, *, saved: Mapping[str, Any] | None = None, schedule: StepSchedule | None = None) -> FakeRun:
    """A run that follows `script`, continued from `saved` (what `FakeCheckpoints.saved` held) if given."""
    saved = saved or {"step": 0, "weights": ""}
    world = World(script)
    source = PromptSource(script.num_rows, identity="fake", seed=0, shuffle=True, epochs=script.epochs)
    buffer = Buffer(
        source,
        batch_size=script.batch_size,
        max_staleness=script.max_staleness,
        order=script.order,
        partial_last=script.partial_last,
    )
    warnings = tuple(buffer.restore(saved["buffer"])) if "buffer" in saved else ()
    schedule = schedule or StepSchedule(script.num_steps, start=saved["step"])
    turns = Turns() if script.shared_devices else FreeTurns()
    checkpoints = FakeCheckpoints(world, buffer, saved=saved)
    trainer = FakeTrainer(world, buffer, checkpoints)
    observer = FakeObserver(world)
    run = Run(
        rollout=FakeRollout(world, source, turns),
        buffer=buffer,
        trainer=trainer,
        sync=FakeSync(world, trainer),
        turns=FakeTurns(world, turns),
        checkpoints=checkpoints,
        evaluation=FakeEvaluation(world, turns, schedule),
        schedule=schedule,
        observer=observer,
    )
    return FakeRun(run, world, source, buffer, trainer, checkpoints, observer, warnings)
