"""Where the learner's loop spends its time: phases on the critical path, spans inside them, and their shares."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from vime.observe.jsonl import Row, RowKind

GENERATE: Final = "generate"
TRAIN: Final = "train"
SYNC: Final = "sync"
SAVE: Final = "save"
EVALUATE: Final = "evaluate"
OTHER: Final = "other"
WALL: Final = "wall"
START: Final = "start"

LOOP_STARTED: Final = "loop_started"
"""The event that tells what the time before the first step went to."""

PHASES: Final = (GENERATE, TRAIN, SYNC, SAVE, EVALUATE)
SHARES: Final = (GENERATE, TRAIN, SYNC, OTHER)


@dataclass(slots=True)
class Phase:
    """One pass through a phase. `seconds` (without phases inside it) and `details` are complete when it has ended."""

    name: str
    seconds: float = 0.0
    inside: float = 0.0
    details: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StepTime:
    """A finished turn of the loop. `seconds` holds `wall`, the phases, `other` (wall without the phases) and details."""

    step: int
    seconds: Mapping[str, float]


class Timeline:
    """Accumulates seconds by name for the step in progress. Phases belong to one task; spans may nest and overlap.

    A detail has a slash in its name and belongs to the phase before it: `sync/pause`. `clock` is monotonic, in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._step: int | None = None
        self._began = clock()
        self._seconds: dict[str, float] = {}
        self._open: list[Phase] = []

    def begin_step(self, step: int) -> StepTime | None:
        """A new turn starts now; return the turn that it ends, None before the first."""
        finished = self.end_step()
        self._step = step
        return finished

    def end_step(self) -> StepTime | None:
        """The turn in progress ends now. None where there is none; what was timed before the first turn is dropped."""
        now = self._clock()
        finished = None
        if self._step is not None:
            wall = now - self._began
            phases = {name: self._seconds.get(name, 0.0) for name in PHASES}
            details = {name: value for name, value in self._seconds.items() if name not in phases}
            other = max(0.0, wall - sum(phases.values()))
            finished = StepTime(self._step, {WALL: wall, **phases, OTHER: other, **details})
        self._step = None
        self._began = now
        self._seconds = {}
        return finished

    @contextmanager
    def phase(self, name: str) -> Iterator[Phase]:
        """Time a phase of the critical path; an exception passes through and its time counts.

        A phase inside another (an evaluation that a publication waits for) takes its time from the outer one.
        """
        phase = Phase(name)
        outer = self._open[-1] if self._open else None
        self._open.append(phase)
        start = self._clock()
        try:
            yield phase
        finally:
            elapsed = self._clock() - start
            phase.seconds = elapsed - phase.inside
            self._open.remove(phase)
            if outer is not None:
                outer.inside += elapsed
            self.add(name, phase.seconds)

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Time a detail."""
        start = self._clock()
        try:
            yield
        finally:
            self.add(name, self._clock() - start)

    def add(self, name: str, seconds: float) -> None:
        """Count seconds that were measured elsewhere."""
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds
        owner, slash, _ = name.partition("/")
        if slash:
            for phase in self._open:
                if phase.name == owner:
                    phase.details[name] = phase.details.get(name, 0.0) + seconds

    def seconds(self) -> dict[str, float]:
        """What the turn in progress has accumulated so far."""
        return dict(self._seconds)


def step_times(rows: Iterable[Row]) -> list[StepTime]:
    """The finished turns in a metrics file, in order; of a step that was done again after a resume, the last."""
    turns = {row.step: StepTime(row.step, row.seconds) for row in rows if row.kind is RowKind.WALL}
    return [turns[step] for step in sorted(turns)]


def time_share(rows: Iterable[Row]) -> dict[str, float]:
    """Shares of the loop's critical path, `generate`, `train`, `sync` and `other`, that sum to 1.

    `generate` is the time the learner waits for its batch, `other` the rest of a turn's wall time. Saving and
    evaluation are left out of the whole. Empty where no turn has finished.
    """
    totals = dict.fromkeys(SHARES, 0.0)
    for turn in step_times(rows):
        for name in SHARES:
            totals[name] += turn.seconds.get(name, 0.0)
    whole = sum(totals.values())
    return {name: value / whole for name, value in totals.items()} if whole > 0 else {}
