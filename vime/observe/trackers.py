"""TensorBoard, through its own event writer: no torch."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

from vime.observe.jsonl import Row, RowKind

_PLOTTED = frozenset({RowKind.STEP, RowKind.SYNC, RowKind.WALL, RowKind.EVAL})


class TensorBoard:
    """Writes the metrics of every row, and the seconds of turns as `perf/seconds/...`.

    The package is imported at the first row. Where it is missing, one warning says so and nothing is written.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._purge_step: int | None = None
        self._opened = False
        self._writer: Any = None
        self._event_class: Any = None
        self._summary_class: Any = None

    def resume(self, step: int) -> None:
        """Later rows replace what an earlier process wrote beyond `step`."""
        self._purge_step = step + 1

    def row(self, row: Row) -> None:
        if row.kind not in _PLOTTED or not self._open():
            return
        values = {name: value for name, value in row.metrics.items() if value is not None and math.isfinite(value)}
        if row.kind is RowKind.WALL:
            values |= {f"perf/seconds/{name}": value for name, value in row.seconds.items()}
        if not values:
            return
        summary = self._summary_class()
        for name, value in values.items():
            summary.value.add(tag=name, simple_value=value)
        self._writer.add_event(self._event_class(wall_time=row.time, step=row.step, summary=summary))

    def phase(self, name: str | None) -> None:
        pass

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _open(self) -> bool:
        if self._opened:
            return self._writer is not None
        self._opened = True
        try:
            from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
            from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError as error:
            message = f"no TensorBoard files: {error}; install tensorboard or set observe.tensorboard to false"
            warnings.warn(message, RuntimeWarning, stacklevel=2)
            return False
        self._event_class, self._summary_class = Event, Summary
        self._writer = EventFileWriter(str(self._directory), flush_secs=30)
        if self._purge_step is not None:
            start = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(step=self._purge_step, session_log=start))
        return True
