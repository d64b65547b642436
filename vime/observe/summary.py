"""What a finished (or stopped) run amounts to, as numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vime.errors import DataError
from vime.observe import layout
from vime.observe.jsonl import Row, RowKind, read_rows
from vime.observe.metrics import (
    DIFF,
    DIFF_MAX,
    RESPONSE_TOKENS,
    REWARD,
    STALENESS_MAX,
    STALENESS_MEAN,
    TOTAL_TOKENS,
    Number,
    eval_score,
)
from vime.observe.samples import KeptSample, read_samples
from vime.observe.timeline import EVALUATE, LOOP_STARTED, SAVE, SHARES, START, StepTime, step_times, time_share


@dataclass(frozen=True)
class RunRecord:
    """Everything a run directory tells. `steps` holds one row a step, the last where a step was done again."""

    directory: Path
    rows: tuple[Row, ...]
    steps: tuple[Row, ...]
    turns: tuple[StepTime, ...]
    about: Mapping[str, Any]
    samples: tuple[KeptSample, ...]
    config_text: str

    def of_kind(self, kind: RowKind) -> list[Row]:
        return [row for row in self.rows if row.kind is kind]

    def series(self, name: str) -> list[tuple[int, Number | None]]:
        """A metric over steps; None where a step lacks it. Empty where no step has it."""
        points = [(row.step, row.metrics.get(name)) for row in self.steps]
        return points if any(value is not None for _, value in points) else []


def load_run(directory: Path) -> RunRecord:
    """Read a run directory. Raises DataError if it is none, holds no step yet or has a broken row."""
    layout.require_run(directory)
    path = directory / layout.METRICS
    rows = read_rows(path)
    steps = {row.step: row for row in rows if row.kind is RowKind.STEP}
    if not steps:
        raise DataError("no step has finished yet", where=str(path), fix="wait for the first step, or see the run's logs")
    resolved = directory / layout.RESOLVED
    config_text = resolved.read_text(encoding="utf-8", errors="replace") if resolved.is_file() else ""
    return RunRecord(
        directory=directory,
        rows=tuple(rows),
        steps=tuple(steps[step] for step in sorted(steps)),
        turns=tuple(step_times(rows)),
        about=_about(directory, rows, config_text),
        samples=tuple(sorted(read_samples(directory / layout.SAMPLES), key=lambda kept: kept.step)),
        config_text=config_text,
    )


def _about(directory: Path, rows: Iterable[Row], config_text: str) -> dict[str, Any]:
    """Name, model, topology, platform, algorithm: from the run rows, else from the resolved configuration."""
    about: dict[str, Any] = {"name": directory.resolve().name, **_from_config(config_text)}
    for row in rows:
        if row.kind is RowKind.RUN:
            about |= {name: value for name, value in row.data.items() if value is not None}
    return about


def _from_config(text: str) -> dict[str, Any]:
    import yaml

    try:
        config = yaml.safe_load(text)
    except yaml.YAMLError:
        return {}
    if not isinstance(config, dict):
        return {}
    topology = config.get("topology")
    about = {
        "model": _path_name(config, "model", "path"),
        "topology": topology.get("name", "inline") if isinstance(topology, dict) else topology,
        "platform": config.get("platform"),
        "algorithm": _path_name(config, "algorithm", "kind"),
        "data": _path_name(config, "data", "path"),
    }
    return {name: value for name, value in about.items() if value is not None}


def _path_name(config: Mapping[str, Any], section: str, key: str) -> str | None:
    content = config.get(section)
    value = content.get(key) if isinstance(content, dict) else None
    return Path(str(value)).name if value is not None else None


def finite(values: Iterable[Number | None]) -> list[Number]:
    """The values that are numbers."""
    return [value for value in values if value is not None and math.isfinite(value)]


def mean(values: Sequence[Number]) -> float | None:
    return sum(values) / len(values) if values else None


def quantile(values: Sequence[Number], share: float) -> float | None:
    """Linear between order statistics; None for no values."""
    if not values:
        return None
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def summarize(record: RunRecord) -> dict[str, Any]:
    """Plain JSON values; None where a run has no such number.

    `train_rollout_logprob_abs_diff` holds mean and max over steps of the step's mean over tokens, and the largest
    difference of a single token. Steps whose value is NaN or infinite are left out of both and counted.
    """
    rewards = finite(value for _, value in record.series(REWARD))
    return {
        "run": str(record.directory),
        "about": dict(record.about),
        "steps": len(record.steps),
        "last_step": record.steps[-1].step,
        "time_share": time_share(record.rows) or None,
        "seconds": loop_seconds(record),
        "train_rollout_logprob_abs_diff": _differences(record),
        "reward": {"first10": mean(rewards[:10]), "last20": mean(rewards[-20:])},
        "eval": evaluations(record),
        "staleness": {"mean": _over_steps(record, STALENESS_MEAN, mean), "max": _over_steps(record, STALENESS_MAX, _largest)},
        "throughput": _throughput(record),
        "events": _event_counts(record),
    }


def loop_seconds(record: RunRecord) -> dict[str, float | None]:
    """`loop` is the wall time of all finished turns; evaluation before the first step counts as `evaluate`, not `start`."""
    starts = [row.seconds for row in record.of_kind(RowKind.EVENT) if row.data.get("name") == LOOP_STARTED]
    early = sum(seconds.get(EVALUATE, 0.0) for seconds in starts)
    steps = [sum(turn.seconds.get(name, 0.0) for name in SHARES) for turn in record.turns]
    return {
        "start": sum(seconds.get(START, 0.0) for seconds in starts) - early if starts else None,
        "loop": sum(turn.seconds.get("wall", 0.0) for turn in record.turns),
        "save": sum(turn.seconds.get(SAVE, 0.0) for turn in record.turns),
        "evaluate": early + sum(turn.seconds.get(EVALUATE, 0.0) for turn in record.turns),
        "step_mean": mean(steps),
        "step_median": quantile(steps, 0.5),
        "step_p95": quantile(steps, 0.95),
    }


def evaluations(record: RunRecord) -> dict[str, dict[str, dict[str, Any]]]:
    """By set and mode: first, last and every score by step."""
    found: dict[str, dict[str, dict[int, Number]]] = {}
    for row in record.of_kind(RowKind.EVAL):
        for name, value in row.metrics.items():
            score = eval_score(name)
            if score is not None and value is not None and math.isfinite(value):
                dataset, mode = score
                found.setdefault(dataset, {}).setdefault(mode or "reward", {})[row.step] = value
    return {dataset: {mode: _first_last(values) for mode, values in modes.items()} for dataset, modes in found.items()}


def _first_last(values: Mapping[int, Number]) -> dict[str, Any]:
    ordered = {str(step): values[step] for step in sorted(values)}
    scores = list(ordered.values())
    return {"first": scores[0], "last": scores[-1], "by_step": ordered}


def _differences(record: RunRecord) -> dict[str, Any]:
    points = [value for _, value in record.series(DIFF) if value is not None]
    values = finite(points)
    return {
        "mean": mean(values),
        "max": _largest(values),
        "largest_token": _over_steps(record, DIFF_MAX, _largest),
        "non_finite_steps": len(points) - len(values),
    }


def _largest(values: Sequence[Number]) -> float | None:
    return max(values, default=None)


def _over_steps(record: RunRecord, name: str, reduce: Callable[[Sequence[Number]], float | None]) -> float | None:
    return reduce(finite(value for _, value in record.series(name)))


def _throughput(record: RunRecord) -> dict[str, float | None]:
    """Tokens of the finished turns per second of their critical path."""
    seconds = {turn.step: sum(turn.seconds.get(name, 0.0) for name in SHARES) for turn in record.turns}
    whole = sum(seconds.values())

    def rate(name: str) -> float | None:
        tokens = finite(value for step, value in record.series(name) if step in seconds)
        return sum(tokens) / whole if tokens and whole > 0 else None

    return {
        "response_tokens_per_s": rate(RESPONSE_TOKENS),
        "total_tokens_per_s": rate(TOTAL_TOKENS),
        "steps_per_hour": 3600 * len(seconds) / whole if whole > 0 else None,
    }


def _event_counts(record: RunRecord) -> dict[str, int]:
    counts: dict[str, int] = {}
    for row in record.of_kind(RowKind.EVENT):
        name = str(row.data.get("name", "event"))
        if name != LOOP_STARTED:
            counts[name] = counts.get(name, 0) + 1
    return counts
