"""The terms of the loop, with every role in memory and time virtual."""

from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vime.config.schema import StopWhen
from vime.data.schedule import StepSchedule
from vime.errors import CheckpointError, DeadlineError, RolloutError
from vime.loop import train
from vime.testing.clock import run_virtual
from vime.testing.fakes import FakeRun, Script, fake_run
from vime.types import PolicyVersion, PromptId


def run(script: Script, *, saved: dict[str, Any] | None = None) -> FakeRun:
    fake = fake_run(script, saved=saved)
    run_virtual(train(fake.run))
    return fake


def trained(fake: FakeRun) -> list[int]:
    return [group for _, groups in fake.world.values("train") for group in groups]


def slow(*groups: int, seconds: float = 10.0) -> Callable[[PromptId], float]:
    return lambda prompt: seconds if prompt.group in groups else 1.0


def ahead(num_steps: int, **changes: Any) -> Script:
    """Batches of two, one step ahead, on devices of their own."""
    return Script(num_steps=num_steps, batch_size=2, max_staleness=1, shared_devices=False, **changes)


# ---- staleness


def test_zero_staleness_is_on_policy_and_takes_turns() -> None:
    fake = run(Script(num_steps=5, batch_size=3, latency_s=slow(1, 4)))
    assert fake.world.values("staleness") == [(0, 0, 0)] * 5
    assert fake.world.overlaps == 0
    assert fake.world.values("start") == [(group, group // 3) for group in range(15)]


def test_zero_staleness_with_own_devices_still_waits_for_each_publish() -> None:
    fake = run(Script(num_steps=5, batch_size=3, shared_devices=False))
    assert fake.world.values("staleness") == [(0, 0, 0)] * 5
    assert fake.world.overlaps == 0


@pytest.mark.parametrize("order", ["prompt", "completion"])
@pytest.mark.parametrize("bound", [1, 3])
def test_staleness_reaches_its_bound_and_never_exceeds_it(bound: int, order: Any) -> None:
    script = Script(num_steps=12, max_staleness=bound, order=order, shared_devices=False, latency_s=slow(0, 5, 6, seconds=2.5))
    fake = run(script)
    ages = [age for batch in fake.world.values("staleness") for age in batch]
    assert max(ages) == bound
    assert min(ages) >= 0
    assert fake.buffer.counters["returned_stale"] == 0


def test_sampling_runs_beside_training_when_staleness_allows() -> None:
    assert run(Script(max_staleness=1, shared_devices=False)).world.overlaps > 0


def test_shared_devices_never_overlap_even_when_staleness_allows() -> None:
    fake = run(Script(num_steps=6, max_staleness=2, shared_devices=True))
    assert fake.world.overlaps == 0
    assert max(age for batch in fake.world.values("staleness") for age in batch) >= 1


def test_room_of_dropped_groups_is_given_back() -> None:
    fake = run(Script(num_steps=4, batch_size=2, dropped=lambda prompt: prompt.group % 3 == 0))
    assert trained(fake) == [1, 2, 4, 5, 7, 8, 10, 11]
    assert fake.buffer.counters["dropped_by_filter"] == 4
    assert fake.world.values("staleness") == [(0, 0)] * 4


# ---- order


def test_order_prompt_is_the_same_whatever_the_timing() -> None:
    def batches(latency: Any) -> list[tuple[int, tuple[int, ...]]]:
        script = Script(num_steps=4, batch_size=3, max_staleness=2, order="prompt", shared_devices=False, latency_s=latency)
        return run(script).world.values("train")

    expected = [(step, tuple(range(3 * step - 3, 3 * step))) for step in range(1, 5)]
    assert batches(slow()) == batches(slow(0, 4)) == batches(lambda prompt: 1 + prompt.group % 5) == expected


def test_order_completion_delivers_what_is_finished_first() -> None:
    script = Script(
        num_steps=3, batch_size=2, max_staleness=1, order="completion", shared_devices=False, latency_s=slow(0, seconds=2.0)
    )
    assert run(script).world.values("train")[:2] == [(1, (1, 2)), (2, (3, 0))]


def test_order_completion_waits_for_a_group_that_would_grow_too_old() -> None:
    script = Script(
        num_steps=4, batch_size=2, max_staleness=1, order="completion", shared_devices=False, latency_s=slow(0, seconds=30.0)
    )
    fake = run(script)
    assert 0 in fake.world.values("train")[1][1]
    assert fake.buffer.counters["returned_stale"] == 0
    assert max(age for batch in fake.world.values("staleness") for age in batch) == 1


def test_default_order_follows_staleness() -> None:
    late = slow(0, seconds=2.0)
    assert run(Script(num_steps=1, batch_size=2, latency_s=late)).world.values("train") == [(1, (0, 1))]
    assert run(ahead(1, latency_s=late)).world.values("train") == [(1, (1, 2))]


# ---- order of effects


def test_version_zero_is_published_and_evaluated_before_sampling() -> None:
    names = [name for name, _ in run(Script()).world.log]
    assert names[:2] == ["publish", "evaluate"]
    assert names.index("start") > 1


def test_row_then_checkpoint_then_publish_within_the_turn() -> None:
    fake = run(Script(num_steps=3))
    of_step = ["turn", "train", "staleness", "row", "save", "publish", "turn over", "evaluate"]
    assert [name for name, _ in fake.world.log if name not in ("start", "drop")] == ["publish", "evaluate", *of_step * 3]
    assert fake.world.values("publish") == [PolicyVersion(0, step) for step in range(4)]


def test_zero_staleness_awaits_evaluation_before_sampling_goes_on() -> None:
    log = run(Script(num_steps=2)).world.log
    assert log.index(("evaluate", PolicyVersion(0, 1))) < log.index(("start", (2, 1)))


def test_an_evaluation_metric_ends_the_run() -> None:
    schedule = StepSchedule(50, stop_when=StopWhen(metric="eval/version", at_least=3))
    fake = fake_run(Script(num_steps=50), schedule=schedule)
    run_virtual(train(fake.run))
    assert [row.step for row in fake.observer.rows] == [1, 2, 3]


# ---- failures travel


class Boom(Exception):
    pass


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("bound", [0, 2])
@pytest.mark.parametrize("role", ["rollout", "trainer", "sync", "evaluation", "checkpoints", "observer"])
def test_a_failure_stops_both_sides_and_surfaces_as_itself(role: str, bound: int, shared: bool) -> None:
    boom = Boom(role)
    fake = fake_run(Script(max_staleness=bound, shared_devices=shared, faults={role: boom}, latency_s=slow(3, 4)))

    async def main() -> None:
        with pytest.raises(Boom) as caught:
            await train(fake.run)
        assert caught.value is boom
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run_virtual(main())
    assert fake.world.sampling == 0


def test_a_failing_collector_is_not_hidden_by_the_learner_it_starves() -> None:
    boom = Boom()
    fake = fake_run(Script(faults={"rollout": boom}, fault_step=0))
    with pytest.raises(Boom) as caught:
        run_virtual(train(fake.run))
    assert caught.value is boom


def test_a_failing_first_publish_starts_nothing() -> None:
    fake = fake_run(Script(faults={"sync": Boom()}, fault_step=0))
    with pytest.raises(Boom):
        run_virtual(train(fake.run))
    assert fake.world.log == []


@pytest.mark.parametrize("after_s", [0.05, 0.15, 0.7, 1.7, 2.35, 2.45])
def test_cancellation_ends_both_sides(after_s: float) -> None:
    fake = fake_run(Script(max_staleness=1))

    async def main() -> None:
        task = asyncio.create_task(train(fake.run))
        await asyncio.sleep(after_s)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run_virtual(main())


def test_the_virtual_clock_reports_a_hang() -> None:
    async def main() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(DeadlineError, match="hang"):
        run_virtual(main())


# ---- the end of the data


def test_finite_data_ends_with_a_smaller_last_batch_when_allowed() -> None:
    fake = run(Script(num_steps=3, batch_size=4, num_rows=10, epochs=1, partial_last=True))
    assert [len(groups) for _, groups in fake.world.values("train")] == [4, 4, 2]
    assert sorted(trained(fake)) == list(range(10))


def test_a_full_last_batch_ends_the_run_cleanly() -> None:
    fake = run(Script(num_steps=5, batch_size=2, num_rows=5, epochs=2))
    assert sorted(trained(fake)) == list(range(10))
    assert fake.source.exhausted


@pytest.mark.parametrize("rows", [4, 5])
def test_too_little_data_is_an_error_that_names_the_step(rows: int) -> None:
    with pytest.raises(RolloutError, match=f"step 3 needs 2 groups, but sampling has ended with {rows - 4} ready"):
        run(Script(num_steps=3, batch_size=2, num_rows=rows, epochs=1))


# ---- resume and rewind

RESUMABLE = Script(
    num_steps=8,
    batch_size=3,
    order="prompt",
    num_rows=7,
    dropped=lambda prompt: prompt.group % 4 == 1,
    failed=lambda prompt: prompt.group % 5 == 2 and prompt.attempt == 0,
    latency_s=lambda prompt: 1 + prompt.group % 3,
)


@pytest.mark.parametrize("stop", range(1, 8))
def test_a_resumed_run_equals_the_uninterrupted_one(stop: int) -> None:
    whole = run(RESUMABLE)
    first = run(replace(RESUMABLE, num_steps=stop))
    second = run(RESUMABLE, saved=json.loads(json.dumps(first.checkpoints.saved)))
    assert first.world.values("train") + second.world.values("train") == whole.world.values("train")
    assert second.trainer.weights == whole.trainer.weights
    assert second.buffer.counters == whole.buffer.counters
    assert second.warnings == ()


@pytest.mark.parametrize("bound", [1, 3])
@pytest.mark.parametrize("stop", [1, 4, 7])
def test_order_prompt_resumes_to_the_same_groups_when_sampling_runs_ahead(stop: int, bound: int) -> None:
    script = replace(RESUMABLE, max_staleness=bound, shared_devices=False)
    first = run(replace(script, num_steps=stop))
    second = run(script, saved=first.checkpoints.saved)
    assert first.world.values("train") + second.world.values("train") == run(script).world.values("train")


def test_a_dead_trainer_trains_the_journal_again_in_order() -> None:
    fake = run(Script(num_steps=6, save_every=3, trainer_dies_at=frozenset({5}), max_staleness=1, shared_devices=False))
    batches = dict(fake.world.values("train"))
    log = [(name, value) for name, value in fake.world.log if name in ("train", "restart", "publish", "save")]
    restart = log.index(("restart", PolicyVersion(1, 3)))
    assert log[restart - 1 : restart + 5] == [
        ("train", (5, batches[5])),
        ("restart", PolicyVersion(1, 3)),
        ("train", (4, batches[4])),
        ("train", (5, batches[5])),
        ("publish", PolicyVersion(1, 5)),
        ("train", (6, batches[6])),
    ]
    assert fake.world.values("staleness")[-1] == fake.world.values("staleness")[2]


@pytest.mark.parametrize("dies_at", range(1, 7))
def test_a_rewind_changes_nothing_but_the_incarnation(dies_at: int) -> None:
    calm = run(Script(num_steps=6, save_every=2))
    fake = run(Script(num_steps=6, save_every=2, trainer_dies_at=frozenset({dies_at})))
    assert fake.trainer.weights == calm.trainer.weights
    assert fake.world.values("publish")[-1] == PolicyVersion(1, 6)
    assert fake.world.values("staleness")[-1] == (0, 0)


def test_released_batches_cannot_be_trained_again() -> None:
    fake = run(Script(num_steps=4, save_every=2))
    assert fake.buffer.rewind(4) == ()
    with pytest.raises(CheckpointError, match="up to step 4 were released"):
        fake.buffer.rewind(3)


# ---- nothing lost, nothing repeated


def chance(seed: int, salt: str, prompt: PromptId) -> int:
    """0 to 99, the same in every process."""
    return zlib.crc32(f"{seed} {salt} {prompt.group} {prompt.attempt}".encode()) % 100


@st.composite
def scripts(draw: st.DrawFn) -> Script:
    seed = draw(st.integers(0, 2**32 - 1))
    drops, failures = draw(st.integers(0, 40)), draw(st.integers(0, 40))
    return Script(
        num_steps=draw(st.integers(1, 8)),
        batch_size=draw(st.integers(1, 5)),
        max_staleness=draw(st.integers(0, 3)),
        order=draw(st.sampled_from(["prompt", "completion", None])),
        num_rows=draw(st.integers(1, 12)),
        shared_devices=draw(st.booleans()),
        save_every=draw(st.integers(1, 3)),
        train_s=draw(st.sampled_from([0.1, 1.0, 5.0])),
        latency_s=lambda prompt: 0.1 + chance(seed, "latency", prompt) / 20,
        dropped=lambda prompt: chance(seed, "drop", prompt) < drops,
        failed=lambda prompt: chance(seed, "fail", prompt) < failures,
        trainer_dies_at=frozenset(draw(st.sets(st.integers(1, 8), max_size=2))),
    )


@settings(max_examples=150, deadline=None, derandomize=True)
@given(script=scripts(), kill_s=st.floats(0.0, 60.0))
def test_every_group_is_trained_once_or_dropped_or_unfinished(script: Script, kill_s: float) -> None:
    """Killed at any moment, resumed from the last checkpoint, under drops, failures and dying trainers."""
    killed = fake_run(script)

    async def until_killed() -> None:
        task = asyncio.create_task(train(killed.run))
        await asyncio.wait({task}, timeout=kill_s)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    run_virtual(until_killed())
    saved = json.loads(json.dumps(killed.checkpoints.saved))
    resumed = run(script, saved=saved)

    before = saved.get("buffer", {"source": {"next_group": 0, "unfinished": []}})["source"]
    after = resumed.source.state()
    batches = dict(killed.world.values("train"))
    assert all(batches[step] == groups for step, groups in killed.world.values("train"))
    kept = {group for step, groups in batches.items() if step <= saved["step"] for group in groups}
    dropped = set(range(before["next_group"])) - kept - {group for group, *_ in before["unfinished"]}
    again = dict(resumed.world.values("train"))
    done = [*kept, *(group for step in sorted(again) for group in again[step])]
    ends = [*done, *dropped, *resumed.world.values("drop"), *(group for group, *_ in after["unfinished"])]
    assert sorted(ends) == list(range(after["next_group"]))
    assert dropped <= set(killed.world.values("drop"))
    assert len(done) == script.num_steps * script.batch_size
    ages = [age for fake in (killed, resumed) for batch in fake.world.values("staleness") for age in batch]
    assert max(ages, default=0) <= script.max_staleness
    assert resumed.world.overlaps == 0 or (not script.shared_devices and script.max_staleness > 0)
    assert resumed.buffer.counters["returned_stale"] == 0
