"""The driver's half of the rollout: room, replacement of dropped and failed groups, errors that travel."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from vime.config.schema import EvaluationSection, EvaluationSet
from vime.data.buffer import Buffer
from vime.data.source import PromptSource
from vime.errors import RolloutError
from vime.rollout.evaluate import PeriodicEvaluation
from vime.rollout.vllm_rollout import MAX_ATTEMPTS, GroupOutcome, VllmRollout
from vime.types import Group, PolicyVersion, PromptId, SampleInfo, SampleStatus


class OpenGate:
    async def wait_open(self) -> None:
        await asyncio.sleep(0)


class Worker:
    """Answers every prompt at once; `fate(prompt)` is None, `drop` or `fail`."""

    def __init__(self, fate=lambda prompt: None) -> None:
        self.fate = fate
        self.submitted: list[PromptId] = []
        self._done: asyncio.Queue[GroupOutcome] = asyncio.Queue()

    async def submit(self, prompts: Sequence[PromptId]) -> None:
        self.submitted += prompts
        for prompt in prompts:
            fate = self.fate(prompt)
            info = SampleInfo(0, 1, 1, 1, 1.0, SampleStatus.COMPLETED)
            group = Group(prompt, (info,), None, PolicyVersion(0, 0))
            outcome = GroupOutcome(prompt, group) if fate is None else GroupOutcome(prompt, dropped="flat")
            self._done.put_nowait(GroupOutcome(prompt, failure="engine away") if fate == "fail" else outcome)

    async def finished(self) -> Sequence[GroupOutcome]:
        first = await self._done.get()
        return [first, *(self._done.get_nowait() for _ in range(self._done.qsize()))]


def parts(*workers: Worker, batch: int = 4) -> tuple[VllmRollout, Buffer, dict[str, float]]:
    source = PromptSource(10, identity="x", seed=0, shuffle=False)
    buffer = Buffer(source, batch_size=batch, max_staleness=0)
    counts: dict[str, float] = {}

    def count(name: str, amount: float) -> None:
        counts[name] = counts.get(name, 0) + amount

    return VllmRollout(workers, source, gate=OpenGate(), on_count=count, chunk=2), buffer, counts


async def one_batch(rollout: VllmRollout, buffer: Buffer) -> list[int]:
    async def collect() -> None:
        async for group in rollout.groups(buffer.room()):
            await buffer.put(group)

    collector = asyncio.create_task(collect())
    taking = asyncio.create_task(buffer.take(1))
    done, _ = await asyncio.wait({collector, taking}, return_when=asyncio.FIRST_COMPLETED, timeout=5)
    try:
        if collector in done:
            collector.result()
        return [g.prompt.group for g in (await taking).groups]
    finally:
        for task in (collector, taking):
            task.cancel()
        await asyncio.gather(collector, taking, return_exceptions=True)


async def test_room_bounds_what_is_started() -> None:
    workers = Worker(), Worker()
    rollout, buffer, _ = parts(*workers)
    assert await one_batch(rollout, buffer) == [0, 1, 2, 3]
    assert sum(len(w.submitted) for w in workers) == 4
    assert rollout.outstanding == 0


async def test_a_dropped_group_is_replaced_by_the_next_one() -> None:
    worker = Worker(lambda prompt: "drop" if prompt.group == 1 else None)
    rollout, buffer, counts = parts(worker)
    assert await one_batch(rollout, buffer) == [0, 2, 3, 4]
    assert counts == {"rollout/dynamic_filter/drop_flat": 1}


async def test_a_failed_group_is_generated_again_with_the_next_attempt() -> None:
    worker = Worker(lambda prompt: "fail" if prompt.group == 2 and prompt.attempt < 2 else None)
    rollout, buffer, counts = parts(worker)
    assert await one_batch(rollout, buffer) == [0, 1, 2, 3]
    assert [p.attempt for p in worker.submitted if p.group == 2] == [0, 1, 2]
    assert counts == {"rollout/regenerated": 2}


async def test_a_group_that_keeps_failing_ends_the_run_with_its_reason() -> None:
    rollout, buffer, _ = parts(Worker(lambda prompt: "fail" if prompt.group == 0 else None))
    with pytest.raises(RolloutError, match=rf"group 0 failed {MAX_ATTEMPTS} times; last: engine away"):
        await one_batch(rollout, buffer)


def evaluation(*, every: int, beside: bool = False, done: frozenset[int] = frozenset()) -> tuple[PeriodicEvaluation, list[int]]:
    seen: list[int] = []
    section = EvaluationSection(every=every, sets=(EvaluationSet(name="a", path="a.jsonl"),))

    async def measure() -> dict[str, float]:
        await asyncio.sleep(0.01)
        return {"eval/a/greedy": 1.0}

    return (
        PeriodicEvaluation(
            section, num_steps=7, measure=measure, report=lambda v, m: seen.append(v.step), beside=beside, done=done
        ),
        seen,
    )


async def test_evaluation_is_due_at_start_end_and_every_nth_step_once() -> None:
    role, seen = evaluation(every=3, done=frozenset({3}))
    for step in range(8):
        await role.run_if_due(PolicyVersion(0, step))
    assert seen == [0, 6, 7]


async def test_evaluation_beside_training_is_settled_before_the_next_version() -> None:
    role, seen = evaluation(every=2, beside=True)
    await role.run_if_due(PolicyVersion(0, 2))
    assert seen == []
    await role.settle()
    assert seen == [2]


async def test_one_admission_of_a_whole_batch_is_spread_over_the_workers() -> None:
    workers = Worker(), Worker(), Worker()
    source = PromptSource(10, identity="x", seed=0, shuffle=False)
    buffer = Buffer(source, batch_size=8, max_staleness=0)
    rollout = VllmRollout(workers, source, gate=OpenGate(), on_count=lambda *_: None, chunk=8)
    assert await one_batch(rollout, buffer) == list(range(8))
    assert [len(w.submitted) for w in workers] == [3, 3, 2]
