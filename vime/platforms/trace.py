"""A record of hook calls, so that a hook can be shown to be asked, or not, in a run of many processes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vime.hooks.specs import RULES

TRACE_VARIABLE = "VIME_TRACE_PLUGINS"
"""Names a file to which every process of a run appends one JSON line a hook call."""


@dataclass(frozen=True, slots=True)
class HookCall:
    """One call: which platform was asked what with which arguments, who implements it and how it ended.

    An isolated hook makes one call per implementation.
    """

    platform: str
    hook: str
    arguments: Mapping[str, Any]
    plugins: tuple[str, ...]
    answer: Any = None
    error: str | None = None


OnCall = Callable[[HookCall], None]


def append_to(path: str) -> OnCall:
    """Write calls to a file, one JSON line each, in a single write so that lines of several processes do not mix."""
    from pydantic_core import to_jsonable_python

    def write(call: HookCall) -> None:
        row = to_jsonable_python(call, serialize_unknown=True) | {"pid": os.getpid()}
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(descriptor, (json.dumps(row) + "\n").encode())
        finally:
            os.close(descriptor)

    return write


def read_trace(path: Path | str) -> tuple[HookCall, ...]:
    """Calls of every process that wrote to the file; arguments and answers are JSON values."""
    calls: list[HookCall] = []
    for line in Path(path).read_text().splitlines():
        row = json.loads(line)
        row.pop("pid")
        calls.append(HookCall(**row | {"plugins": tuple(row["plugins"])}))
    return tuple(calls)


def unasked(calls: Iterable[HookCall]) -> tuple[str, ...]:
    """Runtime hooks that no call asked, in the order of the specification."""
    asked = {call.hook for call in calls}
    return tuple(name for name, rule in RULES.items() if rule.runtime and name not in asked)
