import pytest

from vime.observe.jsonl import Row, RowKind
from vime.observe.timeline import Timeline, time_share


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def wall(step: int, **seconds: float) -> Row:
    return Row(RowKind.WALL, step, 0.0, seconds=seconds)


def test_a_turn_is_split_into_phases_details_and_the_rest() -> None:
    clock = Clock()
    timeline = Timeline(clock)
    assert timeline.begin_step(1) is None
    with timeline.phase("generate"):
        clock.now += 0.25
    clock.now += 0.125
    with timeline.phase("sync") as phase:
        clock.now += 0.5
        with timeline.span("sync/pause"):
            clock.now += 0.25
        with timeline.span("sync/pause"):
            clock.now += 0.25
        timeline.add("train/late", 4.0)
    turn = timeline.begin_step(2)
    assert turn is not None
    assert turn.step == 1
    assert turn.seconds == {
        "wall": 1.375, "generate": 0.25, "train": 0.0, "sync": 1.0, "save": 0.0, "evaluate": 0.0, "other": 0.125,
        "sync/pause": 0.5, "train/late": 4.0,
    }  # fmt: skip
    assert (phase.seconds, phase.details) == (1.0, {"sync/pause": 0.5})


def test_a_new_turn_starts_from_nothing() -> None:
    clock = Clock()
    timeline = Timeline(clock)
    with timeline.phase("evaluate"):
        clock.now += 5
    timeline.begin_step(1)
    clock.now += 1
    turn = timeline.end_step()
    assert turn is not None
    assert (turn.seconds["wall"], turn.seconds["evaluate"], turn.seconds["other"]) == (1.0, 0.0, 1.0)
    assert timeline.end_step() is None


def test_a_phase_that_fails_still_counts_and_lets_the_error_through() -> None:
    clock = Clock()
    timeline = Timeline(clock)
    error = RuntimeError("no")

    def fail() -> None:
        with timeline.phase("train"):
            clock.now += 2
            raise error

    with pytest.raises(RuntimeError) as caught:
        fail()
    assert caught.value is error
    assert timeline.seconds() == {"train": 2.0}


def test_a_phase_inside_another_is_not_counted_twice() -> None:
    clock = Clock()
    timeline = Timeline(clock)
    timeline.begin_step(1)
    with timeline.phase("sync") as sync:
        clock.now += 1
        with timeline.phase("evaluate"):
            clock.now += 4
        clock.now += 2
    turn = timeline.end_step()
    assert turn is not None
    assert sync.seconds == 3.0
    assert {name: turn.seconds[name] for name in ("wall", "sync", "evaluate", "other")} == {
        "wall": 7.0, "sync": 3.0, "evaluate": 4.0, "other": 0.0,
    }  # fmt: skip


def test_shares_sum_to_one_without_saving_and_evaluation() -> None:
    rows = [
        wall(1, wall=20.0, generate=1.0, train=2.0, sync=0.5, other=0.5, save=10.0, evaluate=6.0),
        wall(2, wall=4.0, generate=3.0, train=0.0, sync=0.5, other=0.5),
        Row(RowKind.STEP, 2, 0.0, seconds={"generate": 99.0}),
    ]
    assert time_share(rows) == {"generate": 0.5, "train": 0.25, "sync": 0.125, "other": 0.125}


def test_a_step_done_again_after_a_resume_counts_once() -> None:
    rows = [wall(1, generate=1.0, train=1.0), wall(2, generate=9.0), wall(2, generate=1.0, train=1.0)]
    assert time_share(rows) == {"generate": 0.5, "train": 0.5, "sync": 0.0, "other": 0.0}


def test_no_finished_turn_has_no_shares() -> None:
    assert time_share([Row(RowKind.STEP, 1, 0.0, seconds={"train": 1.0})]) == {}
