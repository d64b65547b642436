"""A plan beside what the driver of a device counted, and the useful share of a run. Pure functions over JSON values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
Samples = Sequence[tuple[float, float]]
"""(seconds since the epoch, GiB in use of the first device)."""


def of_kind(rows: Iterable[Row], kind: str) -> list[Row]:
    return [row for row in rows if row["kind"] == kind]


def device_by_phase(plan: Mapping[str, Any], rows: Sequence[Row], samples: Samples) -> dict[str, dict[str, float | None]]:
    """The plan's bytes of all roles on a device beside the driver's peak in the phase, in GiB, and measured over predicted.

    The driver counts every process' context, caches of the allocators and whatever else is on the device.
    """
    found: dict[str, dict[str, float | None]] = {}
    for phase, spans in phase_windows(rows).items():
        planned = sum(row["num_bytes"] for row in plan["memory"]["rows"] if row["phase"] == phase) / 2**30
        peak = max((used for at, used in samples if any(begin <= at <= end for begin, end in spans)), default=None)
        ratio = peak / planned if peak is not None and planned else None
        found[phase] = {"predicted": planned, "measured": peak, "ratio": ratio}
    return found


def phase_windows(rows: Sequence[Row]) -> dict[str, list[tuple[float, float]]]:
    """When the devices were in which phase, in seconds since the epoch: a step's row ends its training, a publication's row
    ends its update; the engines serve in between.
    """
    windows: dict[str, list[tuple[float, float]]] = {"serving": [], "training": [], "updating": []}
    published: float | None = None
    for row in rows:
        if row["kind"] == "sync":
            windows["updating"].append((row["time"] - row["seconds"]["sync"], row["time"]))
            published = row["time"]
        elif row["kind"] == "step":
            began = row["time"] - row["seconds"].get("train", 0.0)
            windows["training"].append((began, row["time"]))
            if published is not None:
                windows["serving"].append((published, began - row["seconds"].get("other/turn", 0.0)))
    return windows


def useful_share(rows: Sequence[Row], *, skip: int = 1) -> float | None:
    """The part of the steps' wall time that is generation and training; all else is overhead. `skip` steps warm up."""
    walls = [row["seconds"] for row in of_kind(rows, "wall")]
    walls = walls[skip:] or walls
    total = sum(seconds["wall"] for seconds in walls)
    return sum(seconds["generate"] + seconds["train"] for seconds in walls) / total if total else None
