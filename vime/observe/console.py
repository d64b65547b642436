"""The run on standard output: a live line on a terminal, one plain line a step elsewhere."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import IO, Any

from vime.observe.jsonl import Row, RowKind
from vime.observe.metrics import DIFF, REWARD, STALENESS_MAX, Number, eval_score
from vime.observe.timeline import GENERATE, OTHER, SHARES, SYNC, TRAIN, WALL


def format_number(value: Number | None, spec: str = ".4g") -> str:
    """A number for people; `-` for none, `nan` and `inf` as they are."""
    if value is None:
        return "-"
    return format(value, spec) if math.isfinite(value) else str(float(value))


def format_seconds(seconds: float) -> str:
    """`0.51 s`, `12.3 s`, `4 min 07 s`, `2 h 05 min`."""
    if not math.isfinite(seconds):
        return str(seconds)
    if seconds < 10:
        return f"{seconds:.2f} s"
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min"


class Console:
    """A sink for people. The line of a step is printed when its turn of the loop has ended, so that it holds the sync."""

    def __init__(self, num_steps: int, *, stream: IO[str] | None = None) -> None:
        self._num_steps = num_steps
        self._stream = stream if stream is not None else sys.stdout
        self._pending: Row | None = None
        self._totals: dict[str, float] = dict.fromkeys((*SHARES, WALL), 0.0)
        self._steps = 0
        self._rewards: list[float] = []
        self._largest_diff = -math.inf
        self._live = _Live(self._stream, num_steps) if self._stream.isatty() else None

    def row(self, row: Row) -> None:
        match row.kind:
            case RowKind.STEP:
                self._flush_pending()
                self._pending = row
                self._remember(row.metrics)
            case RowKind.WALL:
                self._step_line(row)
            case RowKind.RUN:
                self._print("  ".join(f"{name} {value}" for name, value in row.data.items() if value not in (None, "")))
            case RowKind.EVAL:
                self._print(f"eval {row.version or row.step}  {_scores(row.metrics)}")
            case RowKind.SAVE:
                self._print(f"saved step {row.step}  {format_seconds(row.seconds.get('save', math.nan))}")
            case RowKind.EVENT:
                self._event(row)
            case RowKind.SYNC | RowKind.MEMORY:
                pass

    def phase(self, name: str | None) -> None:
        if self._live is not None:
            self._live.update(phase=name or "")

    def resume(self, step: int) -> None:
        if self._live is not None:
            self._live.update(completed=step)

    def close(self) -> None:
        """Print what is left and the summary."""
        self._flush_pending()
        if self._live is not None:
            self._live.stop()
            self._live = None
        if self._steps:
            self._print(self._summary())

    def _remember(self, metrics: Mapping[str, Number | None]) -> None:
        reward, diff = metrics.get(REWARD), metrics.get(DIFF)
        if reward is not None and math.isfinite(reward):
            self._rewards.append(reward)
        if diff is not None and not math.isnan(diff):
            self._largest_diff = max(self._largest_diff, diff)

    def _flush_pending(self) -> None:
        """A step whose turn did not end: its line without the time."""
        if self._pending is not None:
            row, self._pending = self._pending, None
            self._print(self._describe(row))

    def _step_line(self, wall: Row) -> None:
        step, self._pending = self._pending, None
        seconds = wall.seconds
        self._steps += 1
        for name in self._totals:
            self._totals[name] += seconds.get(name, 0.0)
        if step is None:
            return
        parts = " ".join(f"{label} {seconds.get(name, 0.0):.2f}" for label, name in _SHORT)
        line = f"{self._describe(step)}  {seconds.get(WALL, 0.0):.2f} s ({parts})"
        if self._live is None:
            self._print(line)
        else:
            metrics = {**step.metrics, **wall.metrics}
            self._live.update(
                completed=step.step,
                reward=format_number(metrics.get(REWARD), ".3f"),
                stale=format_number(metrics.get(STALENESS_MAX), "g"),
                rate=format_number(metrics.get("perf/response_tokens_per_s"), ".0f"),
            )

    def _describe(self, row: Row) -> str:
        metrics = row.metrics
        fields = [
            f"step {row.step}/{self._num_steps}",
            f"reward {format_number(metrics.get(REWARD), '.3f')}",
            f"loss {format_number(metrics.get('train/loss'))}",
            f"diff {format_number(metrics.get(DIFF), '.1e')}",
            f"stale {format_number(metrics.get(STALENESS_MAX), 'g')}",
        ]
        return "  ".join(fields)

    def _event(self, row: Row) -> None:
        message = row.data.get("message")
        if message is None:
            message = "  ".join(f"{name} {format_seconds(value)}" for name, value in row.seconds.items())
        self._print(f"{row.data.get('name', 'event')}: {message}")

    def _summary(self) -> str:
        fields = [f"{self._steps} steps in {format_seconds(self._totals[WALL])}"]
        if self._rewards:
            first, last = self._rewards[:10], self._rewards[-20:]
            fields.append(f"reward {sum(first) / len(first):.3f} -> {sum(last) / len(last):.3f}")
        if math.isfinite(self._largest_diff):
            fields.append(f"largest diff {self._largest_diff:.1e}")
        whole = sum(self._totals[name] for name in SHARES)
        if whole > 0:
            shares = (f"{label} {self._totals[name] / whole:.0%}" for label, name in (*_SHORT, ("other", OTHER)))
            fields.append(" ".join(shares))
        return "  ".join(fields)

    def _print(self, line: str) -> None:
        if self._live is not None:
            self._live.print(line)
        else:
            print(line, file=self._stream, flush=True)


_SHORT = (("gen", GENERATE), ("train", TRAIN), ("sync", SYNC))


def _scores(metrics: Mapping[str, Number | None]) -> str:
    """The rewards by set and mode; details such as lengths stay in the file. Without rewards: whatever was measured."""
    scores = {score: value for name, value in metrics.items() if (score := eval_score(name)) is not None}
    if not scores:
        return "  ".join(f"{name.removeprefix('eval/')} {format_number(value, '.3f')}" for name, value in metrics.items())
    return "  ".join(
        f"{name} {mode} {format_number(value, '.3f')}".replace("  ", " ") for (name, mode), value in scores.items()
    )


class _Live:
    """rich's progress bar with the numbers that matter; it shows the phase that the loop is in."""

    def __init__(self, stream: IO[str], num_steps: int) -> None:
        from rich.console import Console as RichConsole
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._progress = Progress(
            TextColumn("step"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("reward {task.fields[reward]}  stale {task.fields[stale]}  {task.fields[rate]} tokens/s", markup=False),
            TextColumn("{task.fields[phase]:8}", markup=False),
            TimeElapsedColumn(),
            console=RichConsole(file=stream, markup=False, highlight=False, soft_wrap=True),
            refresh_per_second=2,
        )
        self._task = self._progress.add_task("steps", total=num_steps, reward="-", stale="-", rate="-", phase="")
        self._progress.start()

    def update(self, **fields: Any) -> None:
        self._progress.update(self._task, **fields)

    def print(self, line: str) -> None:
        self._progress.console.print(line)

    def stop(self) -> None:
        self._progress.stop()
