"""The DeviceTurns role for devices that trainer and engines share by time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

from vime.cluster.links import RolloutWorkerLink
from vime.rollout.turns import Turns


class Load(Protocol):
    """`vime.rollout.vllm_rollout.VllmRollout`: how many groups its workers are at."""

    @property
    def outstanding(self) -> int: ...


class SharedTurns:
    """The train turn stops submissions here and, if workers have requests running, in the workers too.

    `on_train` runs once the devices are the trainer's: it begins to pause the engines while the trainer works, and brings
    a parked trainer back. Evaluations and engine restarts hold `local.rollout`.
    """

    def __init__(self, workers: Sequence[RolloutWorkerLink], *, load: Load, on_train: Callable[[], Awaitable[None]]) -> None:
        self._workers = list(workers)
        self._load = load
        self._on_train = on_train
        self.local = Turns()

    async def wait_open(self) -> None:
        """For `SubmitGate`: wait out a train turn."""
        async with self.local.rollout():
            pass

    @asynccontextmanager
    async def train(self) -> AsyncIterator[None]:
        """See `vime.roles.DeviceTurns`."""
        async with self.local.exclusive():
            busy = self._load.outstanding > 0
            if busy:
                await asyncio.gather(*(w.pause() for w in self._workers))
            try:
                await self._on_train()
                yield
            finally:
                if busy:
                    await asyncio.gather(*(w.resume() for w in self._workers))
