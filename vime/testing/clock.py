"""An event loop whose time is virtual: sleeps cost nothing, order stays exact, and a hang is an error at once."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

from vime.errors import DeadlineError

T = TypeVar("T")


class _Jump(selectors.DefaultSelector):
    """Where the loop would sleep, its clock jumps."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(0)
        if events or timeout == 0:
            return events
        if timeout is None:
            raise DeadlineError("every task waits and nothing is scheduled: this would hang for ever")
        self.now += timeout
        return events


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """For code that waits on its own tasks and timers only; threads and child processes do not wake it."""

    def __init__(self) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)

    def time(self) -> float:
        return self._jump.now


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` in virtual time, starting at 0. Raises DeadlineError when nothing can ever happen again."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
