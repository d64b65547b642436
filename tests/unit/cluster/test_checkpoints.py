"""When a run writes a checkpoint, and what waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from vime.cluster import checkpoints
from vime.cluster.checkpoints import RunCheckpoints, Writers
from vime.config.schema import CheckpointSection
from vime.data.disk import sync_file
from vime.data.snapshot import latest_snapshot
from vime.data.written import leave_note, note_path
from vime.errors import CheckpointError, DeadlineError
from vime.types import PolicyVersion, StepReport

STEPS = 5


@dataclass
class Ranks:
    """Two ranks that copy at once and write when they are told to; `log` is what happened, in order."""

    directory: Path
    section: CheckpointSection
    saved: list[int] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    begun: list[Path] = field(default_factory=list)

    def __post_init__(self) -> None:
        writers = Writers(save=self._save, export=self._export, state=lambda step: {"step": step})
        self.checkpoints = RunCheckpoints(
            self.directory, writers, self.section, is_last=lambda step: step == STEPS, saved=self._saved
        )

    async def _save(self, folder: Path) -> Sequence[Path]:
        (folder / "trainer").mkdir()
        self.begun.append(folder / "trainer")
        self.log.append("copied")
        if not self.section.asynchronous:
            self.write()
        return [note_path(folder / "trainer", rank) for rank in (0, 1)]

    async def _export(self, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        self.log.append("exported")

    def _saved(self, version: PolicyVersion, waited: float, whole: float) -> None:
        assert 0 <= waited <= whole
        self.saved.append(version.step)
        self.log.append("whole")

    def write(self, ranks: Sequence[int] = (0, 1), *, error: str = "") -> None:
        """Let ranks finish what was begun last."""
        folder = self.begun[-1]
        for rank in ranks:
            (folder / f"__{rank}_0").write_text(f"rank {rank}")
            files = {f"__{rank}_0": sync_file(folder / f"__{rank}_0")}
            leave_note(folder, rank, error or files)

    async def step(self, step: int) -> None:
        await self.checkpoints.save_if_due(report(step))
        self.log.append(f"step {step}")

    def latest(self) -> int | None:
        found = latest_snapshot(self.directory / "checkpoints")
        return found.step if found else None


def report(step: int) -> StepReport:
    return StepReport(step, PolicyVersion(0, step), {}, {})


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "_POLL_S", 0.005)


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({}, [5]),
        ({"last": False}, []),
        ({"every": 2}, [2, 4, 5]),
        ({"every": 2, "last": False}, [2, 4]),
        ({"every": 5, "last": False}, [5]),
        ({"every": 1, "keep": 1, "keep_every": 2}, [1, 2, 3, 4, 5]),
    ],
)
def test_due_steps(tmp_path: Path, section: dict[str, Any], expected: list[int]) -> None:
    ranks = Ranks(tmp_path, CheckpointSection(**section))

    async def train() -> None:
        for step in range(1, STEPS + 1):
            await ranks.step(step)

    asyncio.run(train())
    assert ranks.saved == expected
    kept = [2, 4, 5] if section.get("keep_every") else expected[-2:]
    folder = tmp_path / "checkpoints"
    assert [int(name[-1]) for name in names(folder)] == kept if expected else not folder.exists()


def test_exports_are_due_apart_from_checkpoints(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, CheckpointSection(every=4, export_every=2, export_keep=2, last=False))

    async def train() -> None:
        for step in range(1, 8):
            await ranks.step(step)

    asyncio.run(train())
    assert names(tmp_path / "exports") == ["step-00000004", "step-00000006"]
    assert ranks.saved == [4]


def test_training_goes_on_while_a_checkpoint_is_written_and_the_next_one_waits(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, CheckpointSection(every=2, asynchronous=True))

    async def train() -> None:
        await ranks.step(1)
        await ranks.step(2)
        await ranks.step(3)
        ranks.write([0])
        await asyncio.sleep(0.05)
        assert ranks.latest() is None, "one of two ranks has written"
        waiting = asyncio.create_task(ranks.step(4))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        ranks.write([1])
        await waiting
        assert ranks.latest() == 2
        ranks.write()
        await asyncio.sleep(0.1)
        assert ranks.latest() == 4, "it is whole without anybody asking"
        await ranks.checkpoints.settle()

    asyncio.run(train())
    assert ranks.log == ["step 1", "copied", "step 2", "step 3", "whole", "copied", "step 4", "whole"]
    found = latest_snapshot(tmp_path / "checkpoints")
    assert found is not None
    assert (found.state, names(found.path / "trainer")) == ({"step": 4}, ["__0_0", "__1_0"])


def test_the_end_waits_and_the_last_version_is_saved_once(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, CheckpointSection(asynchronous=True))

    async def train() -> None:
        await ranks.step(STEPS)
        asyncio.get_running_loop().call_later(0.05, ranks.write)
        await ranks.checkpoints.save(PolicyVersion(0, STEPS))

    asyncio.run(train())
    assert ranks.log == ["copied", f"step {STEPS}", "whole"]
    assert ranks.latest() == STEPS


def test_a_writer_s_failure_surfaces_at_the_next_step(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, CheckpointSection(every=2, asynchronous=True))

    async def train() -> None:
        await ranks.step(2)
        ranks.write([1])
        ranks.write([0], error="No space left on device")
        await asyncio.sleep(0.05)
        with pytest.raises(CheckpointError, match="No space left"):
            await ranks.step(3)

    asyncio.run(train())
    assert ranks.latest() is None


def test_ranks_that_do_not_write_are_named_after_the_deadline(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, CheckpointSection(every=2, asynchronous=True, timeout_s=0.05))

    async def train() -> None:
        await ranks.step(2)
        ranks.write([0])
        with pytest.raises(DeadlineError, match=r"1 of 2 ranks did not write .*written-00001"):
            await ranks.checkpoints.settle()

    asyncio.run(train())


@pytest.mark.parametrize("writes", [True, False])
def test_a_run_that_fails_gives_the_checkpoint_on_its_way_a_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writes: bool
) -> None:
    monkeypatch.setattr(checkpoints, "GRACE_S", 10.0 if writes else 0.05)
    ranks = Ranks(tmp_path, CheckpointSection(every=2, asynchronous=True))

    async def train() -> None:
        await ranks.step(2)
        if writes:
            asyncio.get_running_loop().call_later(0.05, ranks.write)
        await ranks.checkpoints.close()
        await ranks.checkpoints.close()

    asyncio.run(train())
    assert ranks.latest() == (2 if writes else None)


def test_a_step_that_is_ended_while_it_waits_leaves_the_checkpoint_on_its_way(tmp_path: Path) -> None:
    """As the loop ends the learner when the collector has failed."""
    ranks = Ranks(tmp_path, CheckpointSection(every=2, asynchronous=True))

    async def train() -> None:
        await ranks.step(2)
        waiting = asyncio.create_task(ranks.step(4))
        await asyncio.sleep(0.02)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        asyncio.get_running_loop().call_later(0.05, ranks.write)
        await ranks.checkpoints.close()

    asyncio.run(train())
    assert (ranks.latest(), ranks.saved) == (2, [2])


def test_kept_ones_must_be_written() -> None:
    for every, keep_every in ((0, 5), (10, 15)):
        with pytest.raises(ValidationError, match="keep_every must be a multiple of every"):
            CheckpointSection(every=every, keep_every=keep_every)
    assert CheckpointSection(every=10, keep_every=20).keep_every == 20
