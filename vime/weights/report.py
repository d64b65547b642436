"""What a publication tells of itself: seconds by phase, bytes, the probe's results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from vime.types import PolicyVersion
from vime.weights.probe import ProbeResult

N = TypeVar("N", int, float)


def most_of(rows: Iterable[Mapping[str, N]]) -> dict[str, N]:
    """The largest value of each name, by name; a row without it does not count."""
    most: dict[str, N] = {}
    for row in rows:
        for name, value in row.items():
            most[name] = max(value, most.get(name, value))
    return dict(sorted(most.items()))


@dataclass(frozen=True, slots=True)
class SyncReport:
    """One publish. `seconds` by phase, in order and without overlap; `nbytes` is what one engine received.

    `engine_seconds`: by engine, what it spent on the phases of its update (start, update, finish). `stage_s`: what the trainer
    needed to make its weights readable, which lies within `hold` and `stage`. `engine_bytes`: of the fullest engine, by tag.
    """

    version: PolicyVersion
    seconds: Mapping[str, float]
    nbytes: int
    probe: Mapping[str, ProbeResult] = field(default_factory=dict)
    engine_seconds: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    stage_s: float = 0.0
    engine_bytes: Mapping[str, int] = field(default_factory=dict)

    @property
    def slowest_engine(self) -> dict[str, float]:
        """Seconds by phase of an update; in each phase those of the engine that was slowest in it."""
        return most_of(self.engine_seconds.values())

    @property
    def probe_mean(self) -> float | None:
        """The worst engine's mean difference; None when nothing was probed."""
        return max((r.mean for r in self.probe.values()), default=None)

    @property
    def probe_max(self) -> float | None:
        return max((r.max for r in self.probe.values()), default=None)
