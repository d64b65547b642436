import json
import math
from collections.abc import Mapping
from pathlib import Path

import pytest

from vime.errors import DataError
from vime.observe.jsonl import MetricsFile, Row, RowKind
from vime.observe.summary import load_run, quantile, summarize
from vime.testing.runs import write_example_run

DIFF = "train/train_rollout_logprob_abs_diff"


def write(directory: Path, *rows: Row) -> Path:
    file = MetricsFile(directory / "metrics.jsonl")
    for row in rows:
        file.write(row)
    file.close()
    return directory


def step(number: int, metrics: Mapping[str, float | None]) -> Row:
    return Row(RowKind.STEP, number, 0.0, f"0.{number}", metrics)


def wall(number: int, **seconds: float) -> Row:
    return Row(RowKind.WALL, number, 0.0, seconds=seconds)


def test_numbers_by_hand(tmp_path: Path) -> None:
    write(
        tmp_path,
        Row(RowKind.RUN, 0, 0.0, data={"model": "tiny"}),
        Row(RowKind.EVAL, 0, 0.0, "0.0", {"eval/sums/greedy": 0.25, "eval/sums/sampled": 0.125, "eval/other": 0.5}),
        Row(RowKind.EVENT, 0, 0.0, seconds={"start": 12.0, "evaluate": 2.0}, data={"name": "loop_started"}),
        step(1, {DIFF: 1e-7, f"{DIFF}_max": 1e-5, "rollout/raw_reward": 0.25, "rollout/response_tokens": 30}),
        wall(1, wall=10.0, generate=1.0, train=1.5, sync=0.25, other=0.25, evaluate=3.0, save=4.0),
        Row(RowKind.EVENT, 1, 0.0, data={"name": "engine_restarted", "message": "m"}),
        step(2, {DIFF: 3e-7, f"{DIFF}_max": 4e-5, "rollout/raw_reward": 0.75, "rollout/staleness/mean": 0.5}),
        Row(RowKind.EVAL, 2, 0.0, "0.2", {"eval/sums/greedy": 0.5, "eval/sums/greedy/truncated_ratio": 0.0}),
        wall(2, wall=2.0, generate=0.5, train=0.5, sync=0.5, other=0.5),
        step(3, {DIFF: 2e-7, "rollout/staleness/max": 2, "rollout/staleness/mean": 1.0, "rollout/response_tokens": 999}),
    )
    summary = summarize(load_run(tmp_path))
    assert summary["run"] == str(tmp_path)
    assert summary["about"] == {"name": tmp_path.name, "model": "tiny"}
    assert (summary["steps"], summary["last_step"]) == (3, 3)
    assert summary["time_share"] == {"generate": 0.3, "train": 0.4, "sync": 0.15, "other": 0.15}
    assert summary["seconds"] == {
        "start": 10.0, "loop": 12.0, "save": 4.0, "evaluate": 5.0, "step_mean": 2.5, "step_median": 2.5, "step_p95": 2.95,
    }  # fmt: skip
    assert summary["train_rollout_logprob_abs_diff"] == {
        "mean": pytest.approx(2e-7), "max": 3e-7, "largest_token": 4e-5, "non_finite_steps": 0,
    }  # fmt: skip
    assert summary["reward"] == {"first10": 0.5, "last20": 0.5}
    assert summary["eval"] == {
        "sums": {
            "greedy": {"first": 0.25, "last": 0.5, "by_step": {"0": 0.25, "2": 0.5}},
            "sampled": {"first": 0.125, "last": 0.125, "by_step": {"0": 0.125}},
        },
        "other": {"reward": {"first": 0.5, "last": 0.5, "by_step": {"0": 0.5}}},
    }
    assert summary["staleness"] == {"mean": 0.75, "max": 2}
    assert summary["throughput"]["response_tokens_per_s"] == 6.0, "30 tokens; the step without a finished turn is left out"
    assert summary["throughput"]["steps_per_hour"] == 1440.0
    assert summary["events"] == {"engine_restarted": 1}


def test_first_ten_and_last_twenty(tmp_path: Path) -> None:
    write(tmp_path, *(step(n, {"rollout/raw_reward": float(n)}) for n in range(1, 101)))
    assert summarize(load_run(tmp_path))["reward"] == {"first10": 5.5, "last20": 90.5}


def test_a_step_done_again_after_a_resume_counts_once(tmp_path: Path) -> None:
    write(tmp_path, step(1, {DIFF: 1.0}), step(2, {DIFF: 9.0}), step(2, {DIFF: 3.0}))
    summary = summarize(load_run(tmp_path))
    assert summary["steps"] == 2
    assert summary["train_rollout_logprob_abs_diff"]["mean"] == 2.0


def test_missing_and_broken_numbers_leave_strict_json(tmp_path: Path) -> None:
    write(tmp_path, step(1, {DIFF: math.nan, "rollout/raw_reward": None}), step(2, {DIFF: 1e-7, "train/loss": math.inf}))
    summary = summarize(load_run(tmp_path))
    json.dumps(summary, allow_nan=False)
    difference = {"mean": 1e-7, "max": 1e-7, "largest_token": None, "non_finite_steps": 1}
    assert summary["train_rollout_logprob_abs_diff"] == difference
    assert summary["reward"] == {"first10": None, "last20": None}
    assert summary["time_share"] is None
    assert summary["seconds"]["start"] is None


def test_the_header_comes_from_the_resolved_file_where_no_row_says_more(tmp_path: Path) -> None:
    write(tmp_path, step(1, {}))
    text = "model: {path: a/b/tiny}\ntopology: {name: mine}\nplatform: cpu\nalgorithm: {kind: sft}\n"
    (tmp_path / "resolved.yaml").write_text(text)
    about = {"name": tmp_path.name, "model": "tiny", "topology": "mine", "platform": "cpu", "algorithm": "sft"}
    assert load_run(tmp_path).about == about
    (tmp_path / "resolved.yaml").write_text("a: [")
    assert load_run(tmp_path).about == {"name": tmp_path.name}


def test_quantiles_are_linear_between_order_statistics() -> None:
    assert [quantile([3, 1, 2, 4], share) for share in (0, 0.5, 1)] == [1, 2.5, 4]
    assert quantile([], 0.5) is None


def test_a_folder_that_is_no_run_is_refused_with_the_way_out(tmp_path: Path) -> None:
    for path, problem in ((tmp_path / "absent", "does not exist"), (tmp_path, r"holds no metrics\.jsonl")):
        with pytest.raises(DataError, match=problem) as caught:
            load_run(path)
        assert caught.value.where == str(path)
        assert "run.dir" in (caught.value.fix or "")
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="is not a directory"):
        load_run(tmp_path / "file")


def test_a_run_without_a_step_says_so(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(DataError, match="no step has finished yet"):
        load_run(tmp_path)


def test_a_torn_last_line_is_no_obstacle(tmp_path: Path) -> None:
    write_example_run(tmp_path, 5)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes() + b'{"kind":"step","st')
    assert summarize(load_run(tmp_path))["steps"] == 5


def test_the_example_run_is_the_same_at_every_call(tmp_path: Path) -> None:
    for name in ("metrics.jsonl", "samples.jsonl", "resolved.yaml"):
        first, second = (write_example_run(tmp_path / place, 12) / name for place in ("a", "b"))
        assert first.read_bytes() == second.read_bytes()
    again = write_example_run(tmp_path / "a", 3)
    assert summarize(load_run(again))["steps"] == 3
