import math
from collections.abc import Sequence
from pathlib import Path

import pytest

from vime.observe.metrics import REGISTRY, Metrics, batch_metrics, eval_score, find, render_docs
from vime.types import Batch, Group, PolicyVersion, PromptId, SampleInfo, SampleStatus


def group(rewards: Sequence[float | None], lengths: Sequence[int], version: int | None, **metrics: float) -> Group:
    samples = tuple(
        SampleInfo(i, 10, length, length - 1, reward, SampleStatus.TRUNCATED if length >= 8 else SampleStatus.COMPLETED)
        for i, (reward, length) in enumerate(zip(rewards, lengths, strict=True))
    )
    oldest = None if version is None else PolicyVersion(2, version)
    return Group(PromptId(0, 0, 0), samples, None, oldest, metrics)


def test_a_batch_in_numbers() -> None:
    groups = (group([1.0, 0.0], [2, 4], 5), group([1.0, 1.0], [6, 8], 4), group([0.0, 0.0], [1, 3], 6))
    assert batch_metrics(Batch(7, groups)) == {
        "rollout/response_len/mean": 4.0,
        "rollout/response_len/median": 3.5,
        "rollout/response_len/max": 8,
        "rollout/response_len/min": 1,
        "rollout/truncated_ratio": 1 / 6,
        "rollout/samples": 6,
        "rollout/response_tokens": 24,
        "rollout/trainable_tokens": 18,
        "rollout/total_tokens": 84,
        "rollout/raw_reward": 0.5,
        "rollout/staleness/mean": 1.0,
        "rollout/staleness/max": 2,
        "rollout/staleness/count_0": 1,
        "rollout/staleness/count_1": 1,
        "rollout/staleness/count_2": 1,
        "rollout/zero_std/count_0": 1,
        "rollout/zero_std/count_1": 1,
    }


def test_samples_without_a_reward_do_not_count_and_nan_shows() -> None:
    assert batch_metrics(Batch(1, (group([None, 0.5], [1, 1], 0),)))["rollout/raw_reward"] == 0.5
    unscored = batch_metrics(Batch(1, (group([None, None], [1, 1], None),)))
    assert "rollout/raw_reward" not in unscored
    assert not [name for name in unscored if "staleness" in name or "zero_std" in name]
    assert math.isnan(batch_metrics(Batch(1, (group([math.nan, 1.0], [1, 1], 0),)))["rollout/raw_reward"])
    assert batch_metrics(Batch(1, ())) == {}


def test_what_rollout_functions_report_is_averaged_over_the_groups_that_report_it() -> None:
    groups = (group([1], [1], 0, tool_calls=2.0), group([1], [1], 0, tool_calls=4.0), group([1], [1], 0, **{"perf/x": 1.0}))
    metrics = batch_metrics(Batch(1, groups))
    assert (metrics["rollout/tool_calls"], metrics["perf/x"]) == (3.0, 1.0)


def test_means_sums_and_maxima() -> None:
    metrics = Metrics()
    metrics.mean("loss", 1.0, weight=3)
    metrics.mean("loss", 5.0, weight=1)
    metrics.mean("loss", None, weight=9)
    metrics.mean("loss", math.nan, weight=0)
    metrics.sum("dropped")
    metrics.sum("dropped", 2)
    metrics.max("worst", 1.0)
    metrics.max("worst", -1.0)
    metrics.update({"a": 1.0, "b": None})
    metrics.update({"a": 2.0})
    assert metrics.as_dict() == {"loss": 2.0, "dropped": 3, "worst": 1.0, "a": 1.5}


def test_nan_is_kept_by_mean_and_maximum() -> None:
    metrics = Metrics()
    for value in (1.0, math.nan, 2.0):
        metrics.mean("m", value)
        metrics.max("x", value)
    result = metrics.as_dict()
    assert math.isnan(result["m"])
    assert math.isnan(result["x"])


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("train/loss", "train/loss"),
        ("rollout/response_len/mean", "rollout/response_len/{stat}"),
        ("rollout/zero_std/count_0.5", "rollout/zero_std/count_{reward}"),
        ("train/critic-value_loss", "train/critic-{metric}"),
        ("eval/sums/greedy", "eval/{set}/{mode}"),
        ("eval/gsm8k-pass@4", "eval/{set}-pass@{k}"),
    ],
)
def test_a_concrete_name_finds_its_entry(name: str, pattern: str) -> None:
    metric = find(name)
    assert metric is not None
    assert metric.name == pattern


def test_names_of_custom_functions_have_no_entry() -> None:
    assert find("rollout/my_metric") is None
    assert find("train/loss/extra") is None


@pytest.mark.parametrize(
    ("name", "score"),
    [
        ("eval/chain-sum", ("chain-sum", "")),
        ("eval/sums/greedy", ("sums", "greedy")),
        ("eval/sums/truncated_ratio", None),
        ("eval/sums/greedy/response_len/mean", None),
        ("eval/sums-truncated_ratio", None),
        ("eval/sums-pass@2", None),
        ("eval/step", None),
        ("eval", None),
        ("train/loss", None),
    ],
)
def test_scores_of_evaluations_are_told_from_their_details(name: str, score: tuple[str, str] | None) -> None:
    assert eval_score(name) == score


def test_names_are_registered_once() -> None:
    names = [metric.name for metric in REGISTRY]
    assert len(names) == len(set(names))
    assert all(metric.meaning.endswith(".") for metric in REGISTRY)


def test_the_metrics_page_is_current() -> None:
    page = Path(__file__).resolve().parents[3] / "docs" / "metrics.md"
    assert page.read_text() == render_docs(), "run: python -m vime.observe.metrics > docs/metrics.md"
    assert all(f"`{metric.name}`" in page.read_text() for metric in REGISTRY)
