"""Who may use shared devices now."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext


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
    async def rollout(self) -> AsyncIterator[None]:
        """The shared turn, held per request."""
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

    def rollout(self) -> AbstractAsyncContextManager[None]:
        return nullcontext()

    def exclusive(self) -> AbstractAsyncContextManager[None]:
        return nullcontext()

    def train(self) -> AbstractAsyncContextManager[None]:
        return nullcontext()
