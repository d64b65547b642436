"""`report.html`: one self-contained page about a run. No network, no files beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vime.observe import layout
from vime.observe.charts import Series, line_chart, power_of_ten, running_mean, share_bar, stacked_bars
from vime.observe.console import format_number, format_seconds
from vime.observe.jsonl import Row, RowKind
from vime.observe.metrics import DIFF, DIFF_MAX, REWARD, STALENESS_MAX, Number, find
from vime.observe.samples import KeptSample
from vime.observe.summary import RunRecord, evaluations, finite, load_run, mean, quantile, summarize
from vime.observe.timeline import GENERATE, LOOP_STARTED, OTHER, SHARES, SYNC, TRAIN

MAX_EVENTS = 200
MAX_SAMPLES = 12

PHASE_COLOURS = {GENERATE: "c1", TRAIN: "c2", SYNC: "c3", OTHER: "c4"}


@dataclass(frozen=True, slots=True)
class Figure:
    """A chart with its title. `svg` is empty where the run has no values for it."""

    title: str
    svg: str
    legend: tuple[tuple[str, str], ...] = ()
    note: str = ""


@dataclass(frozen=True, slots=True)
class Tile:
    """A number at the top of the page."""

    label: str
    value: str
    detail: str = ""


def write_report(directory: Path, *, out: Path | None = None) -> Path:
    """Write the page and return its path. Raises DataError if `directory` is no run or has no finished step."""
    page = render_html(load_run(directory))
    path = out if out is not None else directory / layout.REPORT
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")
    return path


def render_html(record: RunRecord) -> str:
    """The page as text; the same for the same files."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    loader = PackageLoader("vime.observe")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["svg"] = Markup  # charts.py escapes what it draws
    summary = summarize(record)
    return environment.get_template("report.html.j2").render(
        about=record.about,
        tiles=_tiles(record, summary),
        learning=_learning_figures(record),
        mismatch=_mismatch_figure(record),
        difference=_difference_text(summary["train_rollout_logprob_abs_diff"]),
        timeline=_timeline_figure(record),
        shares=_share_rows(record, summary),
        share_bar=share_bar((PHASE_COLOURS[name], share) for name, share in (summary["time_share"] or {}).items()),
        apart=_time_apart(summary["seconds"]),
        staleness=_staleness_figure(record),
        sync_phases=_sync_phases(record),
        sync_metrics=_sync_metrics(record),
        memory=_memory_tables(record),
        events=_events(record),
        num_events=sum(summary["events"].values()),
        samples=_chosen_samples(record.samples),
        config_text=record.config_text,
        files=[name for name in (layout.METRICS, layout.SAMPLES, layout.RESOLVED) if (record.directory / name).is_file()],
    )


def _tiles(record: RunRecord, summary: Mapping[str, Any]) -> list[Tile]:
    seconds, diff, reward = summary["seconds"], summary["train_rollout_logprob_abs_diff"], summary["reward"]
    loop = format_seconds(seconds["loop"])
    median = f"{format_seconds(seconds['step_median'])} a step (median)" if seconds["step_median"] is not None else ""
    tiles = [
        Tile("Steps", str(summary["steps"]), f"{loop} in the loop"),
        Tile("Step", median.partition(" a ")[0] or "-", "median"),
    ]
    if reward["first10"] is not None:
        tiles.append(Tile("Reward", _from_to(reward["first10"], reward["last20"]), "first 10 to last 20 steps"))
    for dataset, modes in evaluations(record).items():
        tiles += [
            Tile(
                f"{dataset} {mode}",
                _from_to(scores["first"], scores["last"]),
                f"{scores['last'] - scores['first']:+.3f} held out",
            )
            for mode, scores in modes.items()
        ]
    if diff["mean"] is not None:
        tiles.append(Tile("Log-prob difference", _scientific(diff["mean"]), f"worst step {_scientific(diff['max'])}"))
    rate = summary["throughput"]["response_tokens_per_s"]
    if rate is not None:
        tiles.append(Tile("Response tokens/s", f"{rate:,.0f}", "per second of step time"))
    if summary["staleness"]["max"] is not None:
        tiles.append(
            Tile("Staleness", f"{summary['staleness']['max']:g}", f"largest; mean {summary['staleness']['mean']:.2f} steps")
        )
    return tiles


def _learning_figures(record: RunRecord) -> list[Figure]:
    figures = [_smoothed(record, "Reward", REWARD), _evaluation_figure(record), _smoothed(record, "Loss", "train/loss")]
    figures.append(_smoothed(record, "Gradient norm", "train/grad_norm"))
    entropy = "train/entropy_loss" if record.series("train/entropy_loss") else "rollout/entropy"
    figures.append(_smoothed(record, "Entropy", entropy))
    longest = record.series("rollout/response_len/max")
    lengths = [
        Series("longest", longest, "c4", faint=True, peaks=True),
        Series("mean", record.series("rollout/response_len/mean"), "c1"),
    ]
    svg = line_chart(lengths, unit="tokens")
    figures.append(Figure("Response length", svg, (("c1", "mean"), ("c4 faint", "longest"))))
    return [figure for figure in figures if figure.svg]


def _smoothed(record: RunRecord, title: str, name: str) -> Figure:
    """A noisy metric: every step thin, the running mean over it."""
    points = record.series(name)
    metric = find(name)
    window = max(1, min(25, len(points) // 20))
    series = [Series("step", points, "c1", faint=window > 1)]
    legend: tuple[tuple[str, str], ...] = ()
    if window > 1:
        series.append(Series(f"mean of {window}", running_mean(points, window), "c1"))
        legend = (("c1 faint", "every step"), ("c1", f"mean of {window} steps"))
    return Figure(title, line_chart(series, unit=metric.unit if metric else ""), legend, note=name)


def _evaluation_figure(record: RunRecord) -> Figure:
    colours = ("c1", "c2", "c3", "c4")
    lines = [
        (f"{dataset} {mode}", scores["by_step"])
        for dataset, modes in evaluations(record).items()
        for mode, scores in modes.items()
    ]
    series = [
        Series(name, [(int(step), value) for step, value in scores.items()], colours[i % len(colours)], dots=True)
        for i, (name, scores) in enumerate(lines)
    ]
    return Figure("Held-out reward", line_chart(series), tuple((s.colour, s.name) for s in series), note="eval/...")


def _mismatch_figure(record: RunRecord) -> Figure:
    series = [
        Series("largest of a token", record.series(DIFF_MAX), "c2", peaks=True),
        Series("mean over tokens", record.series(DIFF), "c1"),
    ]
    svg = line_chart(series, unit="nat", log=True, size=(1100, 270))
    return Figure("Absolute log-prob difference", svg, (("c1", "mean over tokens"), ("c2", "largest of a token")), note=DIFF)


def _difference_text(diff: Mapping[str, Any]) -> str:
    if diff["mean"] is None:
        return "Not recorded in this run."
    text = f"Mean over steps {_scientific(diff['mean'])}, largest step {_scientific(diff['max'])}"
    if diff["largest_token"] is not None:
        text += f", largest token {_scientific(diff['largest_token'])}"
    if diff["non_finite_steps"]:
        text += f"; {diff['non_finite_steps']} steps without a finite value"
    return text + " nat."


def _timeline_figure(record: RunRecord) -> Figure:
    parts = [(name, PHASE_COLOURS[name], [(t.step, t.seconds.get(name)) for t in record.turns]) for name in SHARES]
    legend = tuple((PHASE_COLOURS[name], name) for name in SHARES)
    return Figure("Seconds of every step", stacked_bars(parts, unit="s"), legend)


def _share_rows(record: RunRecord, summary: Mapping[str, Any]) -> list[dict[str, str]]:
    """The four shares, each followed by the details that were timed inside it."""
    share = summary["time_share"] or {}
    whole = sum(turn.seconds.get(name, 0.0) for turn in record.turns for name in SHARES)
    details = sorted(
        {name for turn in record.turns for name in turn.seconds if name.partition("/")[0] in SHARES and "/" in name}
    )
    rows = []
    for phase in SHARES if share else ():
        for name in (phase, *(d for d in details if d.startswith(f"{phase}/"))):
            values = [turn.seconds.get(name, 0.0) for turn in record.turns]
            cells = _spread(values) | {"share": f"{sum(values) / whole:.1%}"}
            rows.append({"name": name, "colour": PHASE_COLOURS[phase] if name == phase else "", **cells})
    return rows


def _spread(values: Sequence[Number]) -> dict[str, str]:
    return {
        "mean": _milliseconds(mean(values)),
        "median": _milliseconds(quantile(values, 0.5)),
        "p95": _milliseconds(quantile(values, 0.95)),
        "max": _milliseconds(max(values, default=None)),
    }


def _time_apart(seconds: Mapping[str, float | None]) -> str:
    parts = [f"{label} {format_seconds(s)}" for label, name in _APART if (s := seconds.get(name)) is not None]
    return "Not part of the shares: " + ", ".join(parts) + "."


_APART = (("start", "start"), ("evaluation", "evaluate"), ("checkpoints", "save"))


def _staleness_figure(record: RunRecord) -> Figure:
    points = record.series(STALENESS_MAX)
    if not any(finite(value for _, value in points)):
        return Figure("", "")
    svg = line_chart([Series("largest", points, "c2", peaks=True)], unit="steps", size=(1100, 180))
    return Figure("Staleness of the oldest group", svg, (("c2", "largest"),), note=STALENESS_MAX)


def _sync_phases(record: RunRecord) -> list[dict[str, str]]:
    rows = record.of_kind(RowKind.SYNC)
    names = sorted({name for row in rows for name in row.seconds}, key=lambda name: (name != SYNC, name))
    whole = sum(row.seconds.get(SYNC, 0.0) for row in rows)
    table = []
    for name in names:
        values = [row.seconds[name] for row in rows if name in row.seconds]
        share = f"{sum(values) / whole:.0%}" if whole > 0 else "-"
        table.append({"name": name, "count": str(len(values)), "share": share, **_spread(values)})
    return table


def _sync_metrics(record: RunRecord) -> list[dict[str, str]]:
    """Bytes, probe and fingerprints: what the updates noted."""
    rows = record.of_kind(RowKind.SYNC)
    names = sorted({name for row in rows for name in row.metrics} - {"perf/update_weights_time"})
    table = []
    for name in names:
        values = [value for row in rows if (value := row.metrics.get(name)) is not None]
        if not values:
            continue
        metric = find(name)
        unit = metric.unit if metric else ""
        good = finite(values)
        show = [_quantity(v, unit) for v in (values[0], mean(good), max(good, default=None), values[-1])]
        cells = dict(zip(("first", "mean", "max", "last"), show, strict=True))
        table.append({"name": name, "unit": "" if unit == "bytes" else unit, "count": str(len(values)), **cells})
    return table


def _memory_tables(record: RunRecord) -> list[dict[str, Any]]:
    """For device and host: rows by role and tag, a column for every edge (its latest row), sums at the end."""
    latest: dict[str, Row] = {}
    for row in record.of_kind(RowKind.MEMORY):
        latest[str(row.data.get("edge"))] = row
    tables = []
    for place, title in (("device", "On the device"), ("host", "Kept on the host")):
        held = {edge: row.data.get(place) or {} for edge, row in latest.items()}
        keys = sorted({(role, tag) for roles in held.values() for role, tags in roles.items() for tag in tags})
        if not keys:
            continue
        largest = max((tags.get(tag, 0) for roles in held.values() for tags in roles.values() for tag in tags), default=0)
        rows = [
            {"role": role, "tag": tag, "cells": [_bytes_cell(held[edge].get(role, {}).get(tag, 0), largest) for edge in held]}
            for role, tag in keys
        ]
        sums = [format_bytes(sum(sum(tags.values()) for tags in held[edge].values())) for edge in held]
        tables.append({"title": title, "edges": list(held), "rows": rows, "sums": sums})
    return tables


def _bytes_cell(num_bytes: int, largest: int) -> dict[str, str]:
    return {"text": format_bytes(num_bytes), "width": f"{100 * num_bytes / largest if largest else 0:.1f}"}


def _events(record: RunRecord) -> list[dict[str, str]]:
    """The last events, with the time since the first row."""
    began = record.rows[0].time
    events = [row for row in record.of_kind(RowKind.EVENT) if row.data.get("name") != LOOP_STARTED]
    return [
        {
            "step": str(row.step),
            "after": format_seconds(max(0.0, row.time - began)),
            "name": str(row.data.get("name", "event")),
            "message": str(row.data.get("message", "")),
        }
        for row in events[-MAX_EVENTS:]
    ]


def _chosen_samples(samples: Sequence[KeptSample]) -> list[dict[str, Any]]:
    """At most MAX_SAMPLES, evenly spread over the run."""
    count = min(MAX_SAMPLES, len(samples))
    places = [round(i * (len(samples) - 1) / max(1, count - 1)) for i in range(count)]
    return [
        {
            "step": samples[i].step,
            "prompt": samples[i].sample.prompt,
            "response": samples[i].sample.response,
            "label": samples[i].sample.label,
            "reward": format_number(samples[i].sample.reward, "g"),
            "good": (samples[i].sample.reward or 0) > 0,
        }
        for i in places
    ]


def format_bytes(num_bytes: Number) -> str:
    """`0`, `512 B`, `3.3 MiB`."""
    value, unit = float(num_bytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024 or unit == "TiB":
            break
        value /= 1024
    return "0" if value == 0 else f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def _quantity(value: Number | None, unit: str) -> str:
    if value is None or unit == "bytes":
        return "-" if value is None else format_bytes(value)
    return _scientific(value, ".2e") if 0 < abs(value) < 1e-3 else format_number(value)


def _milliseconds(seconds: Number | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:,.1f}"


def _scientific(value: Number | None, spec: str = ".1e") -> str:
    """`5.0·10⁻⁷`."""
    mantissa, e, exponent = format_number(value, spec).partition("e")
    return f"{mantissa}·{power_of_ten(int(exponent))}" if e else mantissa


def _from_to(first: Number, last: Number) -> str:
    return f"{first:.3f} → {last:.3f}"
