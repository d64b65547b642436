"""Waiting for several calls at once, and telling where the time went."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Sequence
from typing import Any


class Clock:
    """Seconds by phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def mark(self, phase: str) -> None:
        """What passed since the last mark belongs to this phase."""
        now = time.perf_counter()
        self.seconds[phase], self._last = self.seconds.get(phase, 0.0) + now - self._last, now


async def all_of(calls: Sequence[Awaitable[Any]]) -> list[Any]:
    """Run all at once; the first failure surfaces at once and the others are not waited for."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        if tasks:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in tasks:
            if task.done():
                task.result()
        return [task.result() for task in tasks]
    finally:
        for task in tasks:
            task.add_done_callback(mark_seen)
            task.cancel()


async def try_for(calls: Sequence[Awaitable[Any]], seconds: float) -> None:
    """Run all for a bounded time; what fails here must not hide the error that led here."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    if tasks:
        await asyncio.wait(tasks, timeout=seconds)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def timed(call: Awaitable[Any]) -> tuple[Any, float]:
    """What a call gives, and its seconds."""
    began = time.perf_counter()
    found = await call
    return found, time.perf_counter() - began


async def ended(task: asyncio.Task[None]) -> None:
    """A task as a call."""
    await task


def mark_seen(task: asyncio.Future[Any]) -> None:
    """A failure beside the first one is not an error of its own."""
    if not task.cancelled():
        task.exception()
