import io
import math
from collections.abc import Mapping

import pytest

from vime.observe.console import Console, format_number, format_seconds
from vime.observe.jsonl import Row, RowKind

TURN = {"wall": 0.514, "generate": 0.2, "train": 0.25, "sync": 0.03, "other": 0.02}
NUMBERS = {
    "rollout/raw_reward": 0.5123,
    "train/loss": 0.012345,
    "train/train_rollout_logprob_abs_diff": 6.1e-7,
    "rollout/staleness/max": 0,
}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def step(number: int, metrics: Mapping[str, float | None]) -> Row:
    return Row(RowKind.STEP, number, 0.0, f"0.{number}", metrics)


def wall(number: int, seconds: Mapping[str, float] = TURN) -> Row:
    return Row(RowKind.WALL, number, 0.0, f"0.{number}", {"perf/response_tokens_per_s": 1234.5}, seconds)


def test_one_plain_line_a_step_with_the_time_of_its_sync() -> None:
    stream = io.StringIO()
    console = Console(200, stream=stream)
    console.row(step(12, NUMBERS))
    assert stream.getvalue() == ""
    console.row(wall(12))
    assert stream.getvalue() == (
        "step 12/200  reward 0.512  loss 0.01235  diff 6.1e-07  stale 0  0.51 s (gen 0.20 train 0.25 sync 0.03)\n"
    )


def test_other_rows_are_lines_of_their_own() -> None:
    stream = io.StringIO()
    console = Console(200, stream=stream)
    console.row(Row(RowKind.RUN, 0, 0.0, data={"model": "tiny", "topology": None, "platform": "cpu"}))
    scores = {"eval/sums/greedy": 0.4634, "eval/sums/sampled": None, "eval/sums/greedy/truncated_ratio": 0.0}
    console.row(Row(RowKind.EVAL, 50, 0.0, "0.50", scores))
    console.row(Row(RowKind.SAVE, 50, 0.0, "0.50", seconds={"save": 0.25}))
    console.row(Row(RowKind.EVENT, 7, 0.0, data={"name": "engine_restarted", "message": "engine 0 [died]"}))
    console.row(Row(RowKind.EVENT, 0, 0.0, seconds={"start": 14.21}, data={"name": "loop_started"}))
    console.row(Row(RowKind.SYNC, 7, 0.0))
    console.row(Row(RowKind.MEMORY, 7, 0.0))
    assert stream.getvalue().splitlines() == [
        "model tiny  platform cpu",
        "eval 0.50  sums greedy 0.463  sums sampled -",
        "saved step 50  0.25 s",
        "engine_restarted: engine 0 [died]",
        "loop_started: start 14.2 s",
    ]


@pytest.mark.parametrize("terminal", [False, True])
def test_missing_and_broken_numbers_are_shown_not_raised(terminal: bool) -> None:
    stream = Terminal() if terminal else io.StringIO()
    console = Console(3, stream=stream)
    broken = {"rollout/raw_reward": None, "train/loss": math.nan, "train/train_rollout_logprob_abs_diff": math.inf}
    for number, metrics in enumerate((broken, {}, dict.fromkeys(NUMBERS, math.nan)), start=1):
        console.row(step(number, metrics))
        console.row(wall(number, {} if number == 2 else TURN))
    console.row(Row(RowKind.EVENT, 1, 0.0))
    console.row(Row(RowKind.EVAL, 1, 0.0))
    console.close()
    if not terminal:
        first, second, third, *_ = stream.getvalue().splitlines()
        assert first.startswith("step 1/3  reward -  loss nan  diff inf  stale -  0.51 s")
        assert second == "step 2/3  reward -  loss -  diff -  stale -  0.00 s (gen 0.00 train 0.00 sync 0.00)"
        assert third.startswith("step 3/3  reward nan  loss nan  diff nan  stale nan")


def test_the_summary_says_what_the_run_came_to() -> None:
    stream = io.StringIO()
    console = Console(30, stream=stream)
    for number in range(1, 31):
        reward = 0.25 if number <= 10 else 0.5
        console.row(step(number, {"rollout/raw_reward": reward, "train/train_rollout_logprob_abs_diff": number * 1e-8}))
        console.row(wall(number, {"wall": 1.5, "generate": 0.4, "train": 0.5, "sync": 0.06, "other": 0.04, "evaluate": 0.5}))
    console.close()
    assert stream.getvalue().splitlines()[-1] == (
        "30 steps in 45.0 s  reward 0.250 -> 0.500  largest diff 3.0e-07  gen 40% train 50% sync 6% other 4%"
    )


def test_a_step_whose_turn_did_not_end_is_printed_without_its_time() -> None:
    stream = io.StringIO()
    console = Console(5, stream=stream)
    console.row(step(1, NUMBERS))
    console.close()
    console.close()
    assert stream.getvalue() == "step 1/5  reward 0.512  loss 0.01235  diff 6.1e-07  stale 0\n"


def test_a_terminal_gets_a_live_line_with_phase_reward_staleness_and_rate() -> None:
    stream = Terminal()
    console = Console(200, stream=stream)
    console.phase("generate")
    console.row(step(1, NUMBERS))
    console.row(wall(1))
    console.row(Row(RowKind.EVENT, 7, 0.0, data={"name": "engine_restarted", "message": "[red]engine 0"}))
    console.phase("train")
    console.close()
    shown = stream.getvalue()
    assert "reward 0.512  stale 0  1234 tokens/s" in shown
    assert "engine_restarted: [red]engine 0" in shown
    assert "train" in shown
    assert "1/200" in shown


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.514, "0.51 s"), (14.21, "14.2 s"), (99.94, "99.9 s"), (247, "4 min 07 s"), (7530, "2 h 05 min"), (math.nan, "nan")],
)
def test_seconds_for_people(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_numbers_for_people() -> None:
    assert [format_number(v, ".2f") for v in (None, 1.234, math.nan, -math.inf, 3)] == ["-", "1.23", "nan", "-inf", "3.00"]
