"""A plan beside what a device's driver counted, and a run's useful share."""

from __future__ import annotations

from typing import Any

import pytest

from vime.benchmarks import predicted

GIB = 2**30
PLAN: dict[str, Any] = {
    "memory": {
        "rows": [
            {"role": "actor", "phase": "training", "tag": "params", "num_bytes": 4 * GIB},
            {"role": "actor", "phase": "updating", "tag": "params", "num_bytes": 4 * GIB},
            {"role": "rollout", "phase": "serving", "tag": "kv", "num_bytes": 8 * GIB},
        ]
    }
}


def row(kind: str, time: float, seconds: dict[str, float]) -> dict[str, Any]:
    return {"kind": kind, "time": time, "seconds": seconds}


ROWS = [
    row("sync", 10.0, {"sync": 1.0}),
    row("step", 20.0, {"train": 2.0, "other/turn": 1.0}),
    row("sync", 21.0, {"sync": 1.0}),
    row("wall", 21.0, {"wall": 11.0, "generate": 7.0, "train": 2.0}),
    row("step", 30.0, {"train": 2.0, "other/turn": 2.0}),
    row("sync", 31.0, {"sync": 1.0}),
    row("wall", 31.0, {"wall": 10.0, "generate": 5.0, "train": 2.0}),
]


def test_peaks_of_the_device_fall_into_their_phase() -> None:
    samples = [(9.5, 40.0), (12.0, 8.0), (17.5, 99.0), (19.0, 70.0), (25.0, 9.0)]
    found = predicted.device_by_phase(PLAN, ROWS, samples)
    assert {phase: entry["measured"] for phase, entry in found.items()} == {"serving": 9.0, "training": 70.0, "updating": 40.0}
    assert found["serving"]["ratio"] == pytest.approx(9 / 8)


def test_nobody_looked_at_the_device() -> None:
    found = predicted.device_by_phase(PLAN, ROWS, [])
    assert {entry["measured"] for entry in found.values()} == {None}


def test_the_share_is_of_the_steps_after_the_first() -> None:
    assert predicted.useful_share(ROWS) == pytest.approx(0.7)
    assert predicted.useful_share(ROWS[:4]) == pytest.approx(9 / 11)
    assert predicted.useful_share([]) is None
