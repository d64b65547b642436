"""The Checkpoints role: training roles write their state, the driver adds its own, the folder becomes visible whole."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from vime.cluster.team import Team
from vime.config.schema import CheckpointSection
from vime.data.snapshot import begin_snapshot, commit_snapshot
from vime.memory.residency import TRAINER_TAGS
from vime.types import PolicyVersion, StepReport

TRAINER = "trainer"


def folder_of(role: str, *, is_actor: bool) -> str:
    """A training role's folder in a checkpoint. Frozen roles have none: they are read from their model's folder."""
    return TRAINER if is_actor else f"{TRAINER}-{role}"


async def save_team(team: Team, directory: Path) -> None:
    """Let every role that trains write its state below a directory."""
    await team.work(
        team.of("actor", "critic"),
        lambda member: member.link.all("save", directory / folder_of(member.role, is_actor=member is team.actor)),
        needs=TRAINER_TAGS,
    )


class RunCheckpoints:
    """Saves every `section.every` steps, and after the last one unless `section.last` is false.

    `write` puts the training roles' state into a folder; `state(step)` gives the driver's part as JSON;
    `saved(version, seconds)` is told of each checkpoint.
    """

    def __init__(
        self,
        root: Path,
        write: Callable[[Path], Awaitable[None]],
        section: CheckpointSection,
        *,
        is_last: Callable[[int], bool],
        state: Callable[[int], Mapping[str, Any]],
        saved: Callable[[PolicyVersion, float], None],
    ) -> None:
        self._root = root
        self._write = write
        self._section = section
        self._is_last = is_last
        self._state = state
        self._saved = saved
        self._last: PolicyVersion | None = None

    async def save_if_due(self, report: StepReport) -> None:
        """See `vime.roles.Checkpoints`. Raises CheckpointError when the folder cannot be written."""
        every, ends = self._section.every, self._section.last and self._is_last(report.step)
        if ends or (every > 0 and report.step % every == 0):
            await self.save(report.version)

    async def save(self, version: PolicyVersion) -> None:
        """Write the checkpoint of `version` unless it is the last one written."""
        if version == self._last:
            return
        start = time.perf_counter()
        state = dict(self._state(version.step))
        partial = begin_snapshot(self._root, version.step)
        await self._write(partial)
        await asyncio.to_thread(commit_snapshot, partial, state=state, keep=self._section.keep)
        self._last = version
        self._saved(version, time.perf_counter() - start)
