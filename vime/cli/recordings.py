"""Recordings of hardware: what `vime doctor --record` writes and `--inventory` reads."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vime.errors import PluginError
from vime.facts.diagnosis import RecordedFixture

ORIGINS = ("recorded", "synthetic")
_FIX = "write one with `vime doctor --record FILE`"


@dataclass(frozen=True, slots=True)
class Recording:
    """A recording and the file that it was read from."""

    path: Path
    fixture: RecordedFixture

    @property
    def platform(self) -> str:
        return self.fixture.platform

    def __str__(self) -> str:
        return f"{self.path} ({self.fixture.origin} {self.fixture.date}, platform {self.fixture.platform})"


def read_recording(path: Path) -> Recording:
    """Read a recording. Raises PluginError that lists everything that makes the file none."""
    try:
        data: Any = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PluginError(f"not a recording: {error.strerror}", where=str(path), fix=_FIX) from None
    except ValueError as error:
        raise PluginError(f"not a recording: no JSON: {error}", where=str(path), fix=_FIX) from None
    wrong = list(_wrong(data))
    if wrong:
        raise PluginError(f"not a recording: {'; '.join(wrong)}", where=str(path), fix=_FIX)
    return Recording(path, RecordedFixture(data["platform"], data["origin"], data["date"], data["data"]))


def _wrong(data: Any) -> Iterator[str]:
    if not isinstance(data, Mapping):
        yield f"expected an object, got {type(data).__name__}"
        return
    keys = {"platform", "origin", "date", "data"}
    yield from (f"key {name!r} is missing" for name in sorted(keys - set(data)))
    yield from (f"key {name!r} is unknown" for name in sorted(set(data) - keys))
    if not isinstance(data.get("platform", ""), str) or data.get("platform") == "":
        yield "platform must be a name"
    if data.get("origin", ORIGINS[0]) not in ORIGINS:
        yield f"origin must be {' or '.join(ORIGINS)}, not {data['origin']!r}"
    if not isinstance(data.get("data", {}), Mapping):
        yield "data must be an object"
    try:
        datetime.date.fromisoformat(data.get("date", "2000-01-01"))
    except (TypeError, ValueError):
        yield f"date must be like 2026-01-31, not {data['date']!r}"


def write_recording(path: Path, fixture: RecordedFixture) -> None:
    """Write a recording. Raises PluginError where the file cannot be written or the platform's data are not JSON."""
    try:
        text = json.dumps(asdict(fixture), indent=1)
    except (TypeError, ValueError) as error:
        what = f"the recording of platform {fixture.platform} is not JSON: {error}"
        raise PluginError(what, fix=f"mend or update plugin {fixture.platform}") from error
    try:
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise PluginError(f"cannot record: {error.strerror}", where=str(path), fix="name a file that can be written") from None
