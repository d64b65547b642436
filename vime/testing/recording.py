"""Records which hooks are asked, with which arguments: in memory, or across the processes of a real run by a trace file.

A hook that nothing asks is a promise that nobody keeps: a test traces a run (`VIME_TRACE_PLUGINS=FILE vime run ...`) and
asserts that `unasked(read_trace(FILE))` is empty.
"""

from __future__ import annotations

from collections.abc import Sequence

from vime.platforms.lineage import Platform, Plugin
from vime.platforms.trace import TRACE_VARIABLE, HookCall, read_trace, unasked

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
