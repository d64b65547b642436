"""metrics.jsonl: one row a line, appended whole, cut back to a checkpoint on resume."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from vime.errors import DataError
from vime.observe.metrics import Number, as_number


class RowKind(StrEnum):
    """What a row tells.

    run: what was started. step: an update. sync: a publication. wall: a finished turn of the learner's loop, by phase.
    eval, save: what their names say. memory: bytes by role and tag. event: something that a person should know.
    """

    RUN = "run"
    STEP = "step"
    SYNC = "sync"
    WALL = "wall"
    EVAL = "eval"
    SAVE = "save"
    MEMORY = "memory"
    EVENT = "event"


@dataclass(frozen=True, slots=True)
class Row:
    """One line. `version` is `incarnation.step`, `time` is seconds since the epoch; `data` holds what is not a number."""

    kind: RowKind
    step: int
    time: float
    version: str | None = None
    metrics: Mapping[str, Number | None] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        """Strict JSON: NaN and infinities become null in `metrics` and are named in `non_finite`."""
        content: dict[str, Any] = {"kind": self.kind.value, "step": self.step, "version": self.version}
        content["time"] = round(self.time, 3)
        metrics, non_finite = _split(self.metrics)
        content["metrics"] = metrics
        content["seconds"] = {name: round(value, 6) for name, value in self.seconds.items() if math.isfinite(value)}
        if non_finite:
            content["non_finite"] = non_finite
        if self.data:
            content["data"] = self.data
        return json.dumps(content, separators=(",", ":"), ensure_ascii=False, allow_nan=False, default=str)

    @classmethod
    def from_json(cls, text: str) -> Row:
        """Inverse of `to_json`. Raises ValueError, KeyError or TypeError on anything else."""
        content = json.loads(text)
        metrics = dict(content.get("metrics") or {})
        metrics |= {name: float(value) for name, value in (content.get("non_finite") or {}).items()}
        return cls(
            kind=RowKind(content["kind"]),
            step=int(content["step"]),
            time=float(content["time"]),
            version=content.get("version"),
            metrics=metrics,
            seconds=content.get("seconds") or {},
            data=content.get("data") or {},
        )


def _split(metrics: Mapping[str, Any]) -> tuple[dict[str, Number | None], dict[str, str]]:
    finite: dict[str, Number | None] = {}
    non_finite: dict[str, str] = {}
    for name, value in metrics.items():
        number = as_number(value)
        if number is not None and not math.isfinite(number):
            non_finite[name] = str(number)
            number = None
        finite[name] = number
    return finite, non_finite


def reproducible(row: Row) -> dict[str, Any] | None:
    """The part of a row that two equal runs share: no times, no incarnation. None for rows that are all about time."""
    if row.kind not in (RowKind.STEP, RowKind.EVAL):
        return None
    metrics = {name: value for name, value in row.metrics.items() if not name.startswith("perf/")}
    version = row.version.partition(".")[2] if row.version else None
    groups = row.data.get("groups")
    return {"kind": row.kind.value, "step": row.step, "version": version, "metrics": metrics, "groups": groups}


class LineFile:
    """A file of lines that only grows, and shrinks only to an earlier length. A torn last line is dropped on opening.

    Several processes may append to one file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._drop_torn_line()

    def _drop_torn_line(self) -> None:
        size = end = os.fstat(self._fd).st_size
        while end > 0:
            start = max(0, end - 65536)
            newline = os.pread(self._fd, end - start, start).rfind(b"\n")
            if newline >= 0:
                end = start + newline + 1
                break
            end = start
        if end < size:
            os.ftruncate(self._fd, end)

    def append(self, line: str) -> None:
        """Hand a line to the system whole: it survives the end of this process."""
        content = memoryview((line + "\n").encode("utf-8", "replace"))
        while content:
            content = content[os.write(self._fd, content) :]

    def position(self) -> int:
        """Length in bytes, after everything up to it is on disk, so that a checkpoint may name it."""
        os.fsync(self._fd)
        return os.fstat(self._fd).st_size

    def cut_back(self, position: int) -> int:
        """Drop what follows `position`; return the number of dropped bytes. Raises DataError where it is no line's end."""
        where, size = str(self.path), os.fstat(self._fd).st_size
        fix = "resume from another checkpoint, or restore the file that was written along with this one"
        if not 0 <= position <= size:
            raise DataError(f"holds {size} bytes, the checkpoint was written at {position}", where=where, fix=fix)
        if position and os.pread(self._fd, 1, position - 1) != b"\n":
            raise DataError(f"byte {position}, where the checkpoint was written, does not end a line", where=where, fix=fix)
        os.ftruncate(self._fd, position)
        os.fsync(self._fd)
        return size - position

    def close(self) -> None:
        """Further calls raise OSError; closing twice does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class MetricsFile(LineFile):
    """Rows as lines."""

    def write(self, row: Row) -> None:
        """Append one row. Raises OSError when the disk refuses."""
        self.append(row.to_json())


def read_lines(path: Path) -> list[tuple[int, str]]:
    """Complete, non-empty lines with their numbers; a torn last line is left out. Raises DataError if unreadable."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(
            f"cannot be read: {error.strerror}", where=str(path), fix="give a run directory that you may read"
        ) from None
    lines = content.split(b"\n")[:-1]
    return [(number, line.decode("utf-8", "replace")) for number, line in enumerate(lines, start=1) if line.strip()]


def read_rows(path: Path) -> list[Row]:
    """All rows of a metrics file. Raises DataError with file and line for a row that cannot be understood."""
    rows = []
    for number, line in read_lines(path):
        try:
            rows.append(Row.from_json(line))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            what = f"not a row of metrics: {type(error).__name__}: {error}"
            raise DataError(what, where=f"{path}:{number}", fix="remove the line if it was edited by hand") from None
    return rows
