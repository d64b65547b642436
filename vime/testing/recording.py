"""Records which hooks are asked, with which arguments: in memory, or across the processes of a real run by a trace file.

A hook that nothing asks is a promise that nobody keeps: a test traces a run (`VIME_TRACE_PLUGINS=FILE vime run ...`) and
asserts that `unasked(read_trace(FILE))` is empty.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from vime.hooks.specs import RULES
from vime.platforms.lineage import Platform, Plugin
from vime.platforms.trace import TRACE_VARIABLE, HookCall

__all__ = ["TRACE_VARIABLE", "HookCall", "RecordingPlatform", "read_trace", "record", "unasked"]


class RecordingPlatform(Platform):
    """A platform like any other whose hook calls are kept in `calls`, in order."""

    def __init__(self, plugins: Sequence[Plugin]) -> None:
        self.calls: list[HookCall] = []
        super().__init__(plugins)
        self.monitor(self.calls.append)

    def asked(self) -> frozenset[str]:
        """Names of the hooks that were called at least once."""
        return frozenset(call.hook for call in self.calls)


def record(platform: Platform) -> RecordingPlatform:
    """The same lineage with a record of its own."""
    return RecordingPlatform(platform.plugins)


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
