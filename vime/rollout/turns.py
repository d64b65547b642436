"""Who may use shared devices now, and deadlines that do not run while a request waits for its turn."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, nullcontext
from types import TracebackType
from typing import Protocol

from vime.errors import DeadlineError


class PausableDeadline:
    """`async with PausableDeadline(600, what="request 17") as deadline:` raises DeadlineError after 600 s not paused.

    Only the task that entered is interrupted. `paused()` may be nested and may be called from any task.
    """

    def __init__(self, timeout_s: float, *, what: str) -> None:
        self._timeout_s = timeout_s
        self._what = what
        self._spent_s = 0.0
        self._since_s: float | None = None
        self._pauses = 0
        self._entered = False
        self._scope = asyncio.timeout(None)

    @property
    def remaining_s(self) -> float:
        """Seconds left on the clock, never below 0."""
        running = 0.0 if self._since_s is None else asyncio.get_running_loop().time() - self._since_s
        return max(0.0, self._timeout_s - self._spent_s - running)

    async def __aenter__(self) -> PausableDeadline:
        await self._scope.__aenter__()
        self._entered = True
        self._start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()
        self._entered = False
        try:
            await self._scope.__aexit__(kind, error, trace)
        except TimeoutError as expired:
            raise DeadlineError(
                f"{self._what} did not finish in {self._timeout_s:g} s, pauses not counted",
                fix="look for an engine that hangs, or raise rollout.request_timeout_s",
            ) from expired

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the clock for the length of the block."""
        self._pauses += 1
        if self._pauses == 1:
            self._stop()
        try:
            yield
        finally:
            self._pauses -= 1
            if self._pauses == 0:
                self._start()

    def _start(self) -> None:
        if self._entered and self._pauses == 0 and not self._scope.expired():
            self._since_s = asyncio.get_running_loop().time()
            self._scope.reschedule(self._since_s + self.remaining_s)

    def _stop(self) -> None:
        if self._since_s is not None:
            self._spent_s = self._timeout_s - self.remaining_s
            self._since_s = None
            if not self._scope.expired():
                self._scope.reschedule(None)


class RolloutTurns(Protocol):
    """The side of the turns that sampling and evaluation see."""

    def rollout(self, deadline: PausableDeadline | None = None) -> AbstractAsyncContextManager[None]: ...


class Turns:
    """A shared and an exclusive turn on the same devices; whoever wants the exclusive one goes before new shared ones.

    Shared turns that are held run out; new ones wait as soon as the exclusive turn is asked for. A task must not ask for a
    second turn while it holds one: behind a waiting exclusive turn it would wait for ever.
    """

    def __init__(self) -> None:
        self._holders = 0
        self._exclusive = False
        self._exclusive_waiting = 0
        self._waiters: list[asyncio.Future[None]] = []

    @property
    def holders(self) -> int:
        """Shared turns that are held."""
        return self._holders

    @property
    def open(self) -> bool:
        """A shared turn would be granted at once."""
        return not self._exclusive and self._exclusive_waiting == 0

    @asynccontextmanager
    async def rollout(self, deadline: PausableDeadline | None = None) -> AsyncIterator[None]:
        """The shared turn, held per request. The wait for it does not count against `deadline`."""
        with deadline.paused() if deadline is not None else nullcontext():
            await self.acquire_rollout()
        try:
            yield
        finally:
            self.release_rollout()

    @asynccontextmanager
    async def exclusive(self) -> AsyncIterator[None]:
        """Every shared turn has ended, and none starts before this one ends."""
        await self.acquire_exclusive()
        try:
            yield
        finally:
            self.release_exclusive()

    def train(self) -> AbstractAsyncContextManager[None]:
        """`DeviceTurns`: the train turn is the exclusive one."""
        return self.exclusive()

    async def acquire_rollout(self) -> None:
        while not self.open:
            await self._changed()
        self._holders += 1

    def release_rollout(self) -> None:
        self._holders -= 1
        self._wake()

    async def acquire_exclusive(self) -> None:
        """For a holder in another process, which cannot use the context manager. Cancelling the wait gives it up."""
        self._exclusive_waiting += 1
        try:
            while self._exclusive or self._holders > 0:
                await self._changed()
            self._exclusive = True
        finally:
            self._exclusive_waiting -= 1
            self._wake()

    def release_exclusive(self) -> None:
        self._exclusive = False
        self._wake()

    async def _changed(self) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await waiter

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)


class FreeTurns:
    """Trainer and engines have their own devices: nobody waits."""

    def rollout(self, deadline: PausableDeadline | None = None) -> AbstractAsyncContextManager[None]:
        del deadline
        return nullcontext()

    def exclusive(self) -> AbstractAsyncContextManager[None]:
        return nullcontext()

    def train(self) -> AbstractAsyncContextManager[None]:
        return nullcontext()
