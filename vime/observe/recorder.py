"""The Observer: writes every row to metrics.jsonl first, then shows it to the console and the trackers."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol

from vime.observe import layout
from vime.observe.console import Console
from vime.observe.jsonl import MetricsFile, Row, RowKind
from vime.observe.metrics import RESPONSE_TOKENS, TOTAL_TOKENS, Number, batch_metrics
from vime.observe.samples import SamplesFile, SampleText
from vime.observe.timeline import GENERATE, LOOP_STARTED, PHASES, START, SYNC, TRAIN, WALL, Phase, StepTime, Timeline
from vime.observe.trackers import TensorBoard
from vime.types import Batch, PolicyVersion, StepReport

MemoryBytes = Mapping[str, Mapping[str, int]]
"""Bytes by role, then tag."""


class Sink(Protocol):
    """Shows rows somewhere. It is never what a run rests on: one that raises is dropped with a warning."""

    def row(self, row: Row) -> None: ...

    def phase(self, name: str | None) -> None:
        """The loop entered a phase (None: left it)."""
        ...

    def resume(self, step: int) -> None:
        """What was shown of later steps does not count."""
        ...

    def close(self) -> None: ...


def open_recorder(directory: Path, *, num_steps: int, tensorboard: bool = True, samples_per_step: int = 2) -> Recorder:
    """The recorder of a real run: standard output and, if wanted, TensorBoard."""
    sinks: list[Sink] = [Console(num_steps)]
    if tensorboard:
        sinks.append(TensorBoard(directory / layout.TENSORBOARD))
    return Recorder(directory, sinks=sinks, samples_per_step=samples_per_step)


class Recorder:
    """Implements `vime.roles.Observer` and takes the notes of everybody else. Used from the event loop's thread only.

    A row is with the operating system when the call that makes it returns. Raises OSError when the disk refuses.
    """

    def __init__(
        self,
        directory: Path,
        *,
        sinks: Sequence[Sink] = (),
        samples_per_step: int = 2,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.timeline = Timeline(clock)
        self._clock = clock
        self._file = MetricsFile(directory / layout.METRICS)
        self._samples = SamplesFile(directory / layout.SAMPLES, per_step=samples_per_step)
        self._sinks = list(sinks)
        self._step = 0
        self._version: PolicyVersion | None = None
        self._batch: dict[str, float] = {}
        self._trained: dict[str, Any] = {}
        self._noted: dict[RowKind, tuple[dict[str, Number | None], dict[str, float]]] = {}
        self._memory: dict[str, dict[str, Any]] = {}
        self._began = clock()
        self._looping = False

    def start(self, data: Mapping[str, Any]) -> None:
        """Describe the run; known keys are name, model, topology, platform, algorithm, devices, vime, resumed_from."""
        self._write(RowKind.RUN, self._step, data=data)

    def position(self) -> int:
        """Where metrics.jsonl ends, for a checkpoint; everything before it is on disk."""
        return self._file.position()

    def cut_back(self, position: int, *, step: int) -> None:
        """Before a run resumes after `step`: drop rows and samples that the restored checkpoint has not seen.

        Raises DataError if the file is shorter than `position`.
        """
        self._file.cut_back(position)
        self._samples.cut_back(step)
        self._step = step
        self._memory.clear()
        self._show("resume", step)

    def begin_step(self, step: int) -> None:
        """A turn of the loop begins; the one before it gets its `wall` row."""
        if not self._looping:
            self._looping = True
            seconds = {START: self._clock() - self._began, **self.timeline.seconds()}
            self._write(RowKind.EVENT, self._step, seconds=seconds, data={"name": LOOP_STARTED})
        finished = self.timeline.begin_step(step)
        if finished is not None:
            self._wall(finished)
        self._step = step
        self._batch = {}

    def end_step(self) -> None:
        """The schedule is done; the last turn gets its `wall` row."""
        finished = self.timeline.end_step()
        if finished is not None:
            self._wall(finished)

    @contextmanager
    def phase(self, name: str) -> Iterator[Phase]:
        """Time a phase of the learner's critical path and show it."""
        self._show("phase", name)
        try:
            with self.timeline.phase(name) as phase:
                yield phase
        finally:
            self._show("phase", None)

    def span(self, name: str) -> AbstractContextManager[None]:
        """Time a detail such as `sync/pause`; it goes into the rows of the phase before the slash and of the step."""
        return self.timeline.span(name)

    def batch(self, batch: Batch) -> None:
        """Take the sizes, rewards, prompt ids and versions of the batch into the step's row."""
        self._batch = batch_metrics(batch)
        self._trained = {
            "groups": [group.prompt.group for group in batch.groups],
            "versions": sorted({str(group.oldest) for group in batch.groups if group.oldest is not None}),
        }

    def note(
        self,
        kind: RowKind,
        *,
        metrics: Mapping[str, Number | None] | None = None,
        seconds: Mapping[str, float] | None = None,
    ) -> None:
        """Add to the next row of kind step or sync: what only the part that does the work knows (bytes, probe, filters)."""
        known_metrics, known_seconds = self._noted.setdefault(kind, ({}, {}))
        known_metrics.update(metrics or {})
        known_seconds.update(seconds or {})

    def count(self, name: str, amount: Number = 1) -> None:
        """Add to a count in the next step's row: groups dropped by a filter, failures by kind."""
        known, _ = self._noted.setdefault(RowKind.STEP, ({}, {}))
        known[name] = (known.get(name) or 0) + amount

    def step(self, report: StepReport) -> None:
        """Write the step's row. The report's own metrics win over those taken from the batch."""
        noted, noted_seconds = self._noted.pop(RowKind.STEP, ({}, {}))
        timed = self.timeline.seconds()
        seconds = {_detail(TRAIN, name): value for name, value in {**report.seconds, **noted_seconds}.items()} | timed
        perf: dict[str, float] = {}
        if GENERATE in timed:
            perf["perf/train_wait_time"] = timed[GENERATE]
        if TRAIN in timed:
            perf["perf/train_time"] = timed[TRAIN]
        self._step, self._version = report.step, report.version
        metrics = {**self._batch, **noted, **perf, **report.metrics}
        self._write(RowKind.STEP, report.step, metrics=metrics, seconds=seconds, data=self._trained)

    def published(self, version: PolicyVersion, phase: Phase) -> None:
        """The row of a publication: its seconds, the spans inside it and what was noted meanwhile."""
        metrics, noted_seconds = self._noted.pop(RowKind.SYNC, ({}, {}))
        noted_seconds = {_detail(SYNC, name): value for name, value in noted_seconds.items()}
        self._version = version
        metrics.setdefault("perf/update_weights_time", phase.seconds)
        seconds = {SYNC: phase.seconds, **phase.details, **noted_seconds}
        self._write(RowKind.SYNC, version.step, metrics=metrics, seconds=seconds)

    def evaluation(
        self,
        version: PolicyVersion,
        metrics: Mapping[str, Number | None],
        *,
        seconds: Mapping[str, float] | None = None,
    ) -> None:
        """The row of a finished evaluation of `version`, whenever it finished."""
        self._write(RowKind.EVAL, version.step, version=version, metrics=metrics, seconds=seconds or {})

    def saved(self, version: PolicyVersion, seconds: float, *, metrics: Mapping[str, Number | None] | None = None) -> None:
        """The row of a checkpoint. It comes after the position that the checkpoint holds, so a resume from it drops it."""
        metrics = {"perf/save_model_time": seconds, **(metrics or {})}
        self._write(RowKind.SAVE, version.step, version=version, metrics=metrics, seconds={"save": seconds})

    def memory(self, edge: str, device: MemoryBytes, *, host: MemoryBytes | None = None) -> None:
        """Bytes at the edge of a phase (`training`, `updating`, `serving`); a row only where they changed at that edge."""
        held = {"edge": edge, "device": {role: dict(tags) for role, tags in device.items()}}
        held["host"] = {role: dict(tags) for role, tags in (host or {}).items()}
        if self._memory.get(edge) != held:
            self._memory[edge] = held
            self._write(RowKind.MEMORY, self._step, data=held)

    def event(self, name: str, message: str, **data: Any) -> None:
        """Something that a person should know: `engine_restarted`, `group_regenerated`, `trainer_restarted`, ..."""
        self._write(RowKind.EVENT, self._step, data={"name": name, "message": message, **data})

    def samples(self, step: int, samples: Iterable[SampleText]) -> None:
        """Keep a few answers of a step to read."""
        self._samples.write(step, samples)

    def close(self) -> None:
        """Close files and sinks; closing twice does nothing."""
        self._show("close")
        self._sinks.clear()
        self._file.close()
        self._samples.close()

    def _wall(self, turn: StepTime) -> None:
        wall = turn.seconds[WALL]
        metrics = {"perf/step_time": wall}
        if wall > 0:
            metrics["perf/wait_time_ratio"] = turn.seconds[GENERATE] / wall
            rates = {RESPONSE_TOKENS: "perf/response_tokens_per_s", TOTAL_TOKENS: "perf/total_tokens_per_s"}
            metrics |= {rate: self._batch[tokens] / wall for tokens, rate in rates.items() if tokens in self._batch}
        self._write(RowKind.WALL, turn.step, metrics=metrics, seconds=turn.seconds)

    def _write(self, kind: RowKind, step: int, *, version: PolicyVersion | None = None, **content: Mapping[str, Any]) -> None:
        version = version or self._version
        row = Row(kind, step, time.time(), version=None if version is None else str(version), **content)
        self._file.write(row)
        self._show("row", row)

    def _show(self, call: str, *args: Any) -> None:
        """A closed terminal or a full tracker must not end a run."""
        for sink in tuple(self._sinks):
            try:
                getattr(sink, call)(*args)
            except Exception as error:  # noqa: BLE001 - sinks are isolated from the run
                self._sinks.remove(sink)
                name = type(sink).__name__
                print(f"vime: {name} is turned off after {type(error).__name__}: {error}", file=sys.stderr)


def _detail(phase: str, name: str) -> str:
    return name if "/" in name or name in PHASES else f"{phase}/{name}"
