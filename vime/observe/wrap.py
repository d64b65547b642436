"""Wraps the roles of a run so that they are timed and reported, and the loop shows none of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

from vime.observe.recorder import Recorder
from vime.observe.timeline import EVALUATE, GENERATE, OTHER, SAVE, SYNC, TRAIN
from vime.roles import Checkpoints, DeviceTurns, Evaluation, ExperienceBuffer, Room, Run, Schedule, Trainer, WeightSync
from vime.types import Batch, Group, PolicyVersion, StepReport


def timed_run(run: Run, recorder: Recorder) -> Run:
    """The same run with its learner's calls timed. A step's wall time is from one `buffer.take` to the next.

    The recorder becomes the observer. Exceptions pass through unchanged.
    """
    return replace(
        run,
        buffer=_Buffer(run.buffer, recorder),
        trainer=_Trainer(run.trainer, recorder),
        sync=_Sync(run.sync, recorder),
        turns=_Turns(run.turns, recorder),
        checkpoints=_Checkpoints(run.checkpoints, recorder),
        evaluation=_Evaluation(run.evaluation, recorder),
        schedule=_Schedule(run.schedule, recorder),
        observer=recorder,
    )


class _Buffer:
    def __init__(self, inner: ExperienceBuffer, recorder: Recorder) -> None:
        self._inner, self._recorder = inner, recorder

    def room(self) -> Room:
        return self._inner.room()

    async def put(self, group: Group) -> None:
        await self._inner.put(group)

    async def take(self, step: int) -> Batch:
        self._recorder.begin_step(step)
        with self._recorder.phase(GENERATE):
            batch = await self._inner.take(step)
        self._recorder.batch(batch)
        return batch

    def advance(self, version: PolicyVersion) -> None:
        self._inner.advance(version)

    def close(self) -> None:
        self._inner.close()


class _Trainer:
    def __init__(self, inner: Trainer, recorder: Recorder) -> None:
        self._inner, self._recorder = inner, recorder

    async def step(self, batch: Batch) -> StepReport:
        with self._recorder.phase(TRAIN):
            return await self._inner.step(batch)


class _Sync:
    def __init__(self, inner: WeightSync, recorder: Recorder) -> None:
        self._inner, self._recorder = inner, recorder

    async def publish(self) -> PolicyVersion:
        with self._recorder.phase(SYNC) as phase:
            version = await self._inner.publish()
        self._recorder.published(version, phase)
        return version


class _Turns:
    def __init__(self, inner: DeviceTurns, recorder: Recorder) -> None:
        self._inner, self._recorder = inner, recorder

    @asynccontextmanager
    async def train(self) -> AsyncIterator[None]:
        async with AsyncExitStack() as turn:
            with self._recorder.span(f"{OTHER}/turn"):
                await turn.enter_async_context(self._inner.train())
            yield


class _Checkpoints:
    def __init__(self, inner: Checkpoints, recorder: Recorder) -> None:
        self._inner, self._recorder = inner, recorder

    async def save_if_due(self, report: StepReport) -> None:
        with self._recorder.phase(SAVE):
            await self._inner.save_if_due(report)


class _Evaluation:
    def __init__(self, inner: Evaluation, recorder: Recorder) -> None:
        self._inner, self._recorder = inner, recorder

    async def run_if_due(self, version: PolicyVersion) -> None:
        with self._recorder.phase(EVALUATE):
            await self._inner.run_if_due(version)


class _Schedule:
    """Its end closes the last turn."""

    def __init__(self, inner: Schedule, recorder: Recorder) -> None:
        self._inner, self._recorder = inner, recorder

    def __iter__(self) -> Iterator[int]:
        yield from self._inner
        self._recorder.end_step()
