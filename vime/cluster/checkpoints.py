"""The Checkpoints role: training roles write their state, the driver adds its own, the folder becomes visible whole."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vime.cluster.team import Team
from vime.config.schema import CheckpointSection
from vime.data.disk import Retention
from vime.data.exports import begin_export, commit_export
from vime.data.snapshot import begin_snapshot, commit_snapshot
from vime.data.written import collect_notes, missing_notes, note_path
from vime.errors import DeadlineError
from vime.memory.residency import TRAINER_TAGS
from vime.observe import layout
from vime.types import PolicyVersion, StepReport

TRAINER = "trainer"
GRACE_S = 10.0
"""How long a run that fails waits for the checkpoint that is being written."""

_POLL_S = 0.1


def folder_of(role: str, *, is_actor: bool) -> str:
    """A training role's folder in a checkpoint. Frozen roles have none: they are read from their model's folder."""
    return TRAINER if is_actor else f"{TRAINER}-{role}"


async def save_team(team: Team, directory: Path, *, background: bool = False) -> list[Path]:
    """Let every role that trains save its state below a directory -> the notes that all ranks leave when they have written.

    With `background` this returns as soon as they have taken a copy.
    """
    members = team.of("actor", "critic")
    folders = {member.role: directory / folder_of(member.role, is_actor=member is team.actor) for member in members}
    await team.work(members, lambda m: m.link.all("save", folders[m.role], background), needs=TRAINER_TAGS)
    return [note_path(folders[member.role], rank) for member in members for rank in range(member.link.size)]


@dataclass(frozen=True)
class Writers:
    """What the processes of a run do for its checkpoints.

    `save` puts the training roles' state into a folder and gives the notes to come, as `save_team`; `export` writes the model
    as a Hugging Face folder; `state(step)` gives the driver's part as JSON.
    """

    save: Callable[[Path], Awaitable[Sequence[Path]]]
    export: Callable[[Path], Awaitable[Any]]
    state: Callable[[int], Mapping[str, Any]]


Saved = Callable[[PolicyVersion, float, float], None]
"""Told of each whole checkpoint: its version, the seconds that training waited, the seconds until it was whole."""


class RunCheckpoints:
    """Saves every `section.every` steps, and after the last one unless `section.last` is false; exports beside that.

    Where `section.asynchronous`, a checkpoint is written while training goes on, and is whole as soon as all notes of its
    writers are there. There is never more than one on its way: the next one waits for it, and so does the end.
    """

    def __init__(
        self, directory: Path, writers: Writers, section: CheckpointSection, *, is_last: Callable[[int], bool], saved: Saved
    ) -> None:
        self._checkpoints, self._exports = directory / layout.CHECKPOINTS, directory / layout.EXPORTS
        self._writers = writers
        self._section = section
        self._is_last = is_last
        self._saved = saved
        self._last: PolicyVersion | None = None
        self._pending: asyncio.Task[None] | None = None

    async def save_if_due(self, report: StepReport) -> None:
        """See `vime.roles.Checkpoints`. Raises CheckpointError when a folder cannot be written, also the one before."""
        if self._pending is not None and self._pending.done():
            await self.settle()
        section, step = self._section, report.step
        if (section.last and self._is_last(step)) or (section.every > 0 and step % section.every == 0):
            await self.save(report.version)
        if section.export_every > 0 and step % section.export_every == 0:
            partial = begin_export(self._exports, step)
            await self._writers.export(partial)
            await asyncio.to_thread(commit_export, partial, keep=Retention(section.export_keep or None))

    async def save(self, version: PolicyVersion) -> None:
        """Write the checkpoint of `version` unless it is the last one written. What is written before is whole then."""
        await self.settle()
        if version == self._last:
            return
        start = time.perf_counter()
        partial = begin_snapshot(self._checkpoints, version.step, state=self._writers.state(version.step))
        notes = await self._writers.save(partial)
        self._last = version
        if self._section.asynchronous:
            waited = time.perf_counter() - start
            self._pending = asyncio.create_task(self._finish(version, partial, notes, start, waited))
        else:
            await self._finish(version, partial, notes, start)

    async def settle(self) -> None:
        """Until the checkpoint on its way is whole. Raises CheckpointError or DeadlineError where it cannot become so.

        Who is cancelled while it waits leaves the checkpoint on its way, for `close`.
        """
        if (pending := self._pending) is not None:
            await asyncio.wait([pending])
            self._pending = None
            pending.result()

    async def close(self) -> None:
        """Of a run that fails: give the checkpoint on its way a moment to become whole."""
        if self._pending is not None:
            await asyncio.wait({self._pending}, timeout=GRACE_S)
            self._pending.cancel()
            await asyncio.gather(self._pending, return_exceptions=True)
            self._pending = None

    async def _finish(
        self, version: PolicyVersion, partial: Path, notes: Sequence[Path], start: float, waited: float | None = None
    ) -> None:
        await self._wait_for(notes)
        known = await asyncio.to_thread(collect_notes, partial, notes)
        keep = Retention(self._section.keep, self._section.keep_every)
        await asyncio.to_thread(commit_snapshot, partial, known=known, keep=keep)
        seconds = time.perf_counter() - start
        self._saved(version, seconds if waited is None else waited, seconds)

    async def _wait_for(self, notes: Sequence[Path]) -> None:
        deadline = time.monotonic() + self._section.timeout_s
        while missing := await asyncio.to_thread(missing_notes, notes):
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"{len(missing)} of {len(notes)} ranks did not write their part within {self._section.timeout_s:.0f} s, "
                    f"the first is {missing[0].name}",
                    where=str(missing[0].parent),
                    fix="check the disk, or raise checkpoint.timeout_s",
                )
            await asyncio.sleep(_POLL_S)
