"""The loop's WeightSync role: which version goes out, which checks are due, what is reported."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from vime.cluster.memory_role import TrainerMemory
from vime.config.schema import WeightsSection
from vime.errors import DeadlineError, EngineError, WeightSyncError
from vime.types import PolicyVersion
from vime.weights.protocol import Publisher, is_due
from vime.weights.report import SyncReport

DEATH_NOTICE_S = 10.0


@dataclass(frozen=True)
class SyncRules:
    """`first` is the version that the first publish names: (incarnation, restored step)."""

    first: PolicyVersion
    section: WeightsSection


class Repair(Protocol):
    """Replaces dead engines; `mend` returns the count that `replaced` then has."""

    @property
    def replaced(self) -> int: ...

    async def mend(self) -> int: ...


class Publishing:
    """Publishes the trainer's weights after every step.

    `settle` is awaited before: an evaluation in progress sees one version. `repair` replaces dead
    engines. Requests that come meanwhile wait in the engines' gates. `report` gets each result.
    """

    def __init__(
        self,
        publisher: Publisher,
        rules: SyncRules,
        *,
        settle: Callable[[], Awaitable[None]],
        memory: TrainerMemory,
        repair: Repair,
        report: Callable[[SyncReport], None],
    ) -> None:
        self._publisher = publisher
        self._rules = rules
        self._next = rules.first
        self._settle = settle
        self._memory = memory
        self._repair = repair
        self._report = report
        self._count = 0

    async def publish(self) -> PolicyVersion:
        """See `vime.roles.WeightSync`."""
        await self._settle()
        version, section = self._next, self._rules.section
        self._count += 1
        fingerprint, probe = is_due(section.fingerprint, self._count), is_due(section.probe, self._count)
        self._report(await self._attempt(version, fingerprint=fingerprint, probe=probe))
        self._next = PolicyVersion(version.incarnation, version.step + 1)
        return version

    async def _attempt(self, version: PolicyVersion, *, fingerprint: bool, probe: bool) -> SyncReport:
        """Publish; where an engine died on the way, publish again once it is replaced. Other failures surface."""
        while True:
            replaced = self._repair.replaced
            await self._publisher.vacate()
            await self._memory.to_publish()
            leave = self._memory.to_serve if self._memory.leaves else None
            try:
                report = await self._publisher.publish(version, fingerprint=fingerprint, probe=probe, before_serving=leave)
                if leave is None:
                    await self._memory.to_serve()
                return report
            except (EngineError, WeightSyncError, DeadlineError) as error:
                patience_s = DEATH_NOTICE_S if isinstance(error, EngineError) else 0.0
                if not await self._repaired(replaced, patience_s):
                    raise

    async def _repaired(self, before: int, patience_s: float) -> bool:
        """Whether an engine was replaced since. A connection breaks a moment before the process counts as dead."""
        deadline = asyncio.get_running_loop().time() + patience_s
        while await self._repair.mend() == before:
            if asyncio.get_running_loop().time() >= deadline:
                return False
            await asyncio.sleep(0.2)
        return True


class NoSync:
    """A run without engines: versions are counted, nothing is sent."""

    def __init__(self, first: PolicyVersion, *, published: Callable[[PolicyVersion], None]) -> None:
        self._next = first
        self._published = published

    async def publish(self) -> PolicyVersion:
        version = self._next
        self._published(version)
        self._next = PolicyVersion(version.incarnation, version.step + 1)
        return version


@asynccontextmanager
async def no_turn() -> AsyncIterator[None]:
    """The turn of whoever needs none."""
    yield
