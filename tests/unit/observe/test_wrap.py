"""The real loop over roles that move a clock of their own, so that every second is known."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from vime.errors import TrainerError, WeightSyncError
from vime.loop import train
from vime.observe.jsonl import RowKind, read_rows
from vime.observe.recorder import Recorder
from vime.observe.timeline import time_share
from vime.observe.wrap import timed_run
from vime.roles import Room, Run
from vime.types import Batch, Group, PolicyVersion, PromptId, SampleInfo, SampleStatus, StepReport


class World:
    """Every role in one object; each call takes a known time."""

    def __init__(self, *, fail: str = "") -> None:
        self.now = 50.0
        self.published = -1
        self.fail = fail
        self.calls: list[str] = []

    def clock(self) -> float:
        return self.now

    def spend(self, call: str, seconds: float) -> None:
        self.calls.append(call)
        self.now += seconds
        if self.fail == call and self.published > 0:
            raise (TrainerError if call == "step" else WeightSyncError)(f"{call} failed", fix="look")

    def room(self) -> Room:
        return None  # pyright: ignore[reportReturnType]

    async def put(self, group: Group) -> None:
        raise AssertionError("nothing is sampled here")

    async def take(self, step: int) -> Batch:
        self.spend("take", 2.0)
        info = SampleInfo(0, 5, 4, 4, 0.5, SampleStatus.COMPLETED)
        return Batch(step, (Group(PromptId(step, 0, 0), (info,), None, PolicyVersion(0, step - 1)),))

    def advance(self, version: PolicyVersion) -> None:
        self.spend("advance", 0.25)

    def close(self) -> None:
        self.calls.append("close")

    async def groups(self, room: Any) -> AsyncIterator[Group]:
        for group in ():
            yield group

    async def step(self, batch: Batch) -> StepReport:
        self.spend("step", 4.0)
        return StepReport(batch.step, PolicyVersion(0, batch.step), {"train/loss": 0.5})

    async def publish(self) -> PolicyVersion:
        self.spend("publish", 1.0)
        self.published += 1
        return PolicyVersion(0, self.published)

    @asynccontextmanager
    async def train(self) -> AsyncIterator[None]:
        self.spend("turn", 0.5)
        try:
            yield
        finally:
            self.spend("release", 0.25)

    async def save_if_due(self, report: StepReport) -> None:
        self.spend("save", 8.0)

    async def run_if_due(self, version: PolicyVersion) -> None:
        self.spend("evaluate", 16.0)


def assembled(world: World, recorder: Recorder, steps: int) -> Run:
    role: Any = world
    return timed_run(Run(role, role, role, role, role, role, role, range(1, steps + 1), recorder), recorder)


async def test_every_second_of_the_loop_is_accounted_for(tmp_path: Path) -> None:
    world = World()
    recorder = Recorder(tmp_path, clock=world.clock)
    await train(assembled(world, recorder, steps=2))
    rows = read_rows(tmp_path / "metrics.jsonl")
    turns = [row for row in rows if row.kind is RowKind.WALL]
    expected = {"wall": 32.0, "generate": 2.0, "train": 4.0, "sync": 1.0, "save": 8.0, "evaluate": 16.0, "other": 1.0}
    assert [(row.step, row.seconds) for row in turns] == [(step, {**expected, "other/turn": 0.5}) for step in (1, 2)]
    assert time_share(rows) == {"generate": 0.25, "train": 0.5, "sync": 0.125, "other": 0.125}
    assert turns[0].metrics["perf/response_tokens_per_s"] == 4 / 32


async def test_rows_come_in_the_order_of_the_loop(tmp_path: Path) -> None:
    world = World()
    recorder = Recorder(tmp_path, clock=world.clock)
    await train(assembled(world, recorder, steps=2))
    rows = read_rows(tmp_path / "metrics.jsonl")
    assert [(row.kind.value, row.step, row.version) for row in rows] == [
        ("sync", 0, "0.0"), ("event", 0, "0.0"),
        ("step", 1, "0.1"), ("sync", 1, "0.1"), ("wall", 1, "0.1"),
        ("step", 2, "0.2"), ("sync", 2, "0.2"), ("wall", 2, "0.2"),
    ]  # fmt: skip
    started, first = rows[1], rows[2]
    assert started.seconds == {"start": 17.0, "sync": 1.0, "evaluate": 16.0}
    assert first.seconds == {"generate": 2.0, "other/turn": 0.5, "train": 4.0}
    assert first.metrics["rollout/raw_reward"] == 0.5
    assert first.metrics["rollout/staleness/max"] == 0
    assert first.metrics["perf/train_wait_time"] == 2.0
    assert rows[3].seconds == {"sync": 1.0}


async def test_the_roles_are_called_as_the_loop_calls_them(tmp_path: Path) -> None:
    plain, wrapped = World(), World()
    role: Any = plain
    await train(Run(role, role, role, role, role, role, role, range(1, 4), Recorder(tmp_path / "a")))
    await train(assembled(wrapped, Recorder(tmp_path / "b", clock=wrapped.clock), steps=3))
    assert wrapped.calls == plain.calls


@pytest.mark.parametrize(("call", "error"), [("step", TrainerError), ("publish", WeightSyncError)])
async def test_failures_pass_through_unchanged_and_release_the_turn(tmp_path: Path, call: str, error: type[Exception]) -> None:
    world = World(fail=call)
    recorder = Recorder(tmp_path, clock=world.clock)
    with pytest.raises(error, match=f"{call} failed") as caught:
        await train(assembled(world, recorder, steps=3))
    assert type(caught.value) is error
    assert caught.value.__cause__ is None
    assert world.calls.count("release") == 2
    rows = read_rows(tmp_path / "metrics.jsonl")
    assert [row.step for row in rows if row.kind is RowKind.WALL] == [1]
    assert [row.step for row in rows if row.kind is RowKind.STEP] == ([1] if call == "step" else [1, 2])
