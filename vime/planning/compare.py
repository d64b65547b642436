"""What a plan predicted beside what a run measured: bytes by role, tag and phase, seconds of updates and switches."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vime.errors import DataError
from vime.facts.memory import Tag
from vime.observe import layout
from vime.observe.jsonl import Row, RowKind, read_rows
from vime.planning.explain_roles import table
from vime.planning.plan import Plan
from vime.planning.switching import switches
from vime.planning.units import in_units

BYTES, SECONDS = "bytes", "s"
_NEEDED = (RowKind.MEMORY, RowKind.SYNC, RowKind.WALL)


@dataclass(frozen=True, slots=True)
class Compared:
    """One number both ways; None where the plan does not estimate it, or knows no rate for it."""

    what: str
    unit: str
    predicted: float | None
    measured: float
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """Measured over predicted; None where either is missing or nothing."""
        return self.measured / self.predicted if self.predicted and self.measured else None


def rows_of_run(directory: Path) -> list[Row]:
    """The rows that can be compared.

    Raises:
        DataError: no run directory, a broken row, or no row of kind memory, sync or wall.
    """
    path = layout.require_run(directory) / layout.METRICS
    rows = [row for row in read_rows(path) if row.kind in _NEEDED]
    if not rows:
        what = f"holds no row of kind {', '.join(_NEEDED[:-1])} or {_NEEDED[-1]}: nothing was measured"
        raise DataError(what, where=str(path), fix="wait until the run has published weights once, or see the run's logs")
    return rows


def compare(plan: Plan, rows: Sequence[Row]) -> tuple[Compared, ...]:
    """Everything that both the plan and the rows of a run say something about, and publications and steps as a whole."""
    return (*_memory(plan, rows), *_sync(plan, rows), *_switch(plan, rows))


def _memory(plan: Plan, rows: Sequence[Row]) -> Iterator[Compared]:
    """The last row of each edge. A run knows its engines' bytes from its own plan alone."""
    names = {trainer.task: trainer.role for trainer in plan.trainers}
    names |= {"rollout": plan.engines[0].request.role} if plan.engines else {}
    last: dict[str, Mapping[str, Any]] = {row.data["edge"]: row.data for row in rows if row.kind is RowKind.MEMORY}
    for phase in (phase for phase in plan.memory.phases if phase in last):
        for role, tags in last[phase].get("device", {}).items():
            for tag, measured in tags.items():
                predicted = _planned(plan, names.get(role, role), tag, phase)
                if predicted or measured:
                    note = "the run's own plan, not measured" if role == "rollout" else ""
                    yield Compared(f"{phase} {names.get(role, role)} {tag}", BYTES, predicted, measured, note)


def _planned(plan: Plan, role: str, tag: str, phase: str) -> int:
    return sum(r.num_bytes for r in plan.memory.rows if (r.role, r.tag, r.phase) == (role, tag, phase))


def _sync(plan: Plan, rows: Sequence[Row]) -> Iterator[Compared]:
    syncs = [row for row in rows if row.kind is RowKind.SYNC]
    predicted = plan.transport.seconds if plan.transport else None
    updates = [
        row.seconds["sync/update"] + (row.metrics.get("sync/staging") or 0.0)
        for row in _unchecked(syncs)
        if "sync/update" in row.seconds
    ]
    if updates:
        yield Compared("update of the weights", SECONDS, predicted, *_median(updates, warm=len(updates) == len(syncs)))
    yield from _engines(plan, syncs)
    whole = [row.seconds["sync"] for row in syncs if "sync" in row.seconds]
    if whole:
        yield Compared("publication as a whole", SECONDS, None, *_median(whole))


def _engines(plan: Plan, syncs: Sequence[Row]) -> Iterator[Compared]:
    """What an engine said at its last update that it holds."""
    said = syncs[-1].metrics if syncs else {}
    for tag in (Tag.ENGINE_WEIGHTS, Tag.KV):
        if (held := said.get(f"sync/held_{tag}")) is not None:
            predicted = _planned(plan, plan.engines[0].request.role, tag, "serving") if plan.engines else 0
            yield Compared(f"an engine's {tag}", BYTES, predicted, held, "as the engine counts its tensors")


def _unchecked(syncs: Sequence[Row]) -> Sequence[Row]:
    """Publications that were not probed, where there are any: checks read all weights once more on both sides."""
    return [row for row in syncs if "sync/probe" not in row.seconds] or syncs


def _switch(plan: Plan, rows: Sequence[Row]) -> Iterator[Compared]:
    """Parking is what no part of a publication names, and its part `leave`; waking is the turn before a step.

    Beside other training roles the trainer wakes inside the step.
    """
    if plan.residency != "park":
        return
    predicted = next((e.seconds for name, e in switches(plan) if name == plan.actor.request.role), None)
    syncs = [row.seconds for row in rows if row.kind is RowKind.SYNC and "sync" in row.seconds]
    parks = [_unnamed(seconds) + seconds.get("sync/leave", 0.0) for seconds in syncs]
    if parks:
        yield Compared("parking the trainer", SECONDS, predicted, *_median(parks))
    turns = [row.seconds["other/turn"] for row in rows if row.kind is RowKind.WALL and "other/turn" in row.seconds]
    if turns and not any(plan.shares_actor(other) for other in plan.others):
        yield Compared("waking the trainer", SECONDS, predicted, *_median(turns, warm=False))


def _unnamed(seconds: Mapping[str, float]) -> float:
    """`sync/engine_*` lie inside `sync/update`."""
    named = (name for name in seconds if name.startswith("sync/") and not name.startswith("sync/engine_"))
    return max(0.0, seconds["sync"] - sum(seconds[name] for name in named))


def _median(values: Sequence[float], *, warm: bool = True) -> tuple[float, str]:
    """The median and what it is of. `warm` leaves out a first one that others follow: it connects and page-locks memory."""
    kept = values[1:] if warm and len(values) > 1 else values
    return statistics.median(kept), f"median of {len(kept)}" + (", the first left out" if len(kept) < len(values) else "")


def compare_text(compared: Sequence[Compared]) -> str:
    """A table: what, predicted, measured, their ratio, a note."""
    rows = [("", "predicted", "measured", "measured / predicted", "")]
    for one in compared:
        ratio = "" if one.ratio is None else f"{one.ratio:.2f}"
        rows.append((one.what, _value(one.predicted, one.unit), _value(one.measured, one.unit), ratio, one.note))
    return "\n".join(("predicted and measured", *table(rows)))


def compare_json(compared: Sequence[Compared]) -> list[dict[str, Any]]:
    """The same as JSON values."""
    names = ("what", "unit", "predicted", "measured", "ratio", "note")
    return [{name: getattr(one, name) for name in names} for one in compared]


def _value(value: float | None, unit: str) -> str:
    if value is None:
        return "no estimate"
    return in_units(int(value)) if unit == BYTES else f"{value:.3g} s"
