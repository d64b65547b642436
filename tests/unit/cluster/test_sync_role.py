"""Publishing survives the death of an engine, whoever replaces it, and gives up on everything else."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from vime.cluster import sync_role
from vime.cluster.sync_role import Publishing, SyncRules
from vime.config.schema import WeightsSection
from vime.errors import DeadlineError, EngineError, ProbeError
from vime.types import PolicyVersion
from vime.weights.report import SyncReport

Leave = Callable[[], Awaitable[None]] | None


@dataclass
class Publisher:
    """Raises what `failures` holds, one a call, then succeeds."""

    failures: list[Exception]
    calls: list[tuple[str, bool, bool]] = field(default_factory=list)
    log: list[str] = field(default_factory=list)

    async def vacate(self) -> None:
        self.log.append("engines leave")

    async def publish(self, version: PolicyVersion, *, fingerprint: bool, probe: bool, before_serving: Leave) -> SyncReport:
        self.calls.append((str(version), fingerprint, probe))
        if self.failures:
            raise self.failures.pop(0)
        self.log.append("engines have the weights")
        if before_serving is not None:
            await before_serving()
        self.log.append("engines serve")
        return SyncReport(version, {}, 0)


@dataclass
class Repair:
    """`notices` calls pass before a dead engine counts as dead."""

    notices: int
    replaced: int = 0

    async def mend(self) -> int:
        self.notices -= 1
        if self.notices == 0:
            self.replaced += 1
        return self.replaced


@dataclass
class Memory:
    log: list[str] = field(default_factory=list)
    leaves: bool = True

    async def to_publish(self) -> None:
        self.log.append("parameters are there")

    async def to_serve(self) -> None:
        self.log.append("the trainer leaves")


async def nothing() -> None: ...


def publishing(publisher: Publisher, repair: Any, *, leaves: bool = True) -> Publishing:
    rules, memory = SyncRules(PolicyVersion(1, 4), WeightsSection()), Memory(publisher.log, leaves)
    return Publishing(publisher, rules, settle=nothing, memory=memory, repair=repair, report=lambda _: None)  # type: ignore[arg-type]


async def test_who_is_on_the_devices_when() -> None:
    publisher = Publisher([EngineError("engine 1: connection reset")])
    await publishing(publisher, Repair(1)).publish()
    first = ["engines leave", "parameters are there"]
    assert publisher.log == [*first, *first, "engines have the weights", "the trainer leaves", "engines serve"]


async def test_engines_do_not_wait_for_a_trainer_that_stays() -> None:
    publisher = Publisher([])
    await publishing(publisher, Repair(0), leaves=False).publish()
    assert publisher.log[-3:] == ["engines have the weights", "engines serve", "the trainer leaves"]


async def test_versions_and_checks_follow_one_another() -> None:
    publisher = Publisher([])
    role = publishing(publisher, Repair(0))
    assert [str(await role.publish()) for _ in range(5)] == ["1.4", "1.5", "1.6", "1.7", "1.8"]
    assert publisher.calls[:4] == [("1.4", True, True), ("1.5", True, True), ("1.6", True, True), ("1.7", False, False)]


@pytest.mark.parametrize("notices", [1, 3])
async def test_an_engine_that_dies_is_waited_for(notices: int) -> None:
    publisher = Publisher([EngineError("engine 1: connection reset")])
    assert await publishing(publisher, Repair(notices)).publish() == PolicyVersion(1, 4)
    assert [call[0] for call in publisher.calls] == ["1.4", "1.4"]


async def test_an_engine_that_somebody_else_replaced_meanwhile_counts() -> None:
    repair = Repair(0)

    class Watched(Publisher):
        async def publish(self, version: PolicyVersion, **asked: Any) -> SyncReport:
            repair.replaced += bool(self.failures)
            return await super().publish(version, **asked)

    assert await publishing(Watched([EngineError("gone")]), repair).publish() == PolicyVersion(1, 4)


@pytest.mark.parametrize("error", [ProbeError("differs"), DeadlineError("engine 0: no answer")])
async def test_other_failures_surface_at_once(error: Exception) -> None:
    publisher = Publisher([error])
    with pytest.raises(type(error)):
        await publishing(publisher, Repair(0)).publish()
    assert len(publisher.calls) == 1


async def test_patience_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sync_role, "DEATH_NOTICE_S", 0.3)
    with pytest.raises(EngineError, match="gone"):
        await publishing(Publisher([EngineError("gone")]), Repair(0)).publish()
