"""The evaluation role: when it is due, and whether training waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from vime.config.schema import EvaluationSection
from vime.types import PolicyVersion

Measure = Callable[[], Awaitable[Mapping[str, float]]]
Report = Callable[[PolicyVersion, Mapping[str, float]], None]


class PeriodicEvaluation:
    """Evaluates at the start, every `section.every` steps and after the last one.

    With `beside` the evaluation runs next to the following step; `settle` must be awaited before new weights go out, so
    that one evaluation sees one version. A failure surfaces at the next call.
    """

    def __init__(
        self,
        section: EvaluationSection,
        *,
        num_steps: int,
        measure: Measure,
        report: Report,
        beside: bool = False,
        done: frozenset[int] = frozenset(),
    ) -> None:
        self._section = section
        self._num_steps = num_steps
        self._measure = measure
        self._report = report
        self._beside = beside
        self.done = set(done)
        self._running: asyncio.Task[None] | None = None

    def is_due(self, step: int) -> bool:
        """Whether the version after `step` is to be evaluated and has not been."""
        if not self._section.sets or step in self.done:
            return False
        if step == 0:
            return self._section.at_start
        return step == self._num_steps or (self._section.every > 0 and step % self._section.every == 0)

    async def run_if_due(self, version: PolicyVersion) -> None:
        """See `vime.roles.Evaluation`."""
        await self.settle()
        if not self.is_due(version.step):
            return
        self._running = asyncio.create_task(self._run(version))
        if not self._beside or version.step in (0, self._num_steps):
            await self.settle()

    async def settle(self) -> None:
        """Wait for a running evaluation."""
        if self._running is not None:
            running, self._running = self._running, None
            await running

    async def _run(self, version: PolicyVersion) -> None:
        metrics = await self._measure()
        self.done.add(version.step)
        self._report(version, metrics)
