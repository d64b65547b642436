"""Graders in processes of their own, with a wall-clock limit on every call."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from vime.errors import RewardError
from vime.rewards.process import GraderProcess, StartFailure, Unsendable, check_sendable
from vime.rewards.registry import check_grader
from vime.rewards.values import GradeJob, GradeOutcome

__all__ = ["GradeJob", "GradeOutcome", "GraderPool"]

_MAX_CHUNK = 512
_MAX_STARTS = 3
_MAX_DEATHS = 2
"""A job whose process died is tried once more: not every death is the job's fault."""


@dataclass(slots=True)
class _Batch:
    """One call of `score`."""

    outcomes: list[GradeOutcome | None]
    done: asyncio.Future[None]
    missing: int


@dataclass(slots=True)
class _Item:
    batch: _Batch
    position: int
    job: GradeJob
    deaths: int = 0

    @property
    def is_settled(self) -> bool:
        return self.batch.outcomes[self.position] is not None

    def resolve(self, outcome: GradeOutcome) -> None:
        self.batch.outcomes[self.position] = outcome
        self.batch.missing -= 1
        if not self.batch.missing and not self.batch.done.done():
            self.batch.done.set_result(None)


class GraderPool:
    """Scores responses in `workers` child processes that hold the grader and nothing else.

    A call that outlives `timeout_s` (wall clock) costs its process, which is replaced, and yields no reward; so does a
    grader that raises. Neither is ever a reward of 0. What `score` gets from several callers at once travels together.
    Belongs to the event loop that uses it first. The children end when this process does.

    Args:
        kind: a grader's name or `module:callable`.
        key: entry to use where the grader returns a mapping.
        start_timeout_s: limit for importing the grader.

    Raises:
        RewardError: `kind` names no grader.
    """

    def __init__(
        self, kind: str, *, workers: int = 1, timeout_s: float = 10.0, key: str | None = None, start_timeout_s: float = 120.0
    ) -> None:
        check_grader(kind)
        if workers < 1 or timeout_s <= 0:
            raise RewardError(f"expected at least one worker and a limit above 0, got {workers} and {timeout_s} s")
        self._kind = kind
        self._key = key
        self._timeout_s = timeout_s
        self._start_timeout_s = start_timeout_s
        self._num_workers = workers
        self._queue: deque[_Item] = deque()
        self._wake = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._ready: list[asyncio.Future[None]] = []
        self._processes: dict[int, GraderProcess] = {}
        self._failure: RewardError | None = None
        self.num_replaced = 0

    async def __aenter__(self) -> GraderPool:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes that are up."""
        return tuple(p.pid for p in self._processes.values() if p.is_alive)

    def launch(self) -> None:
        """Begin to start the processes, to have them imported by the time the first response comes."""
        if self._tasks or self._failure:
            return
        loop = asyncio.get_running_loop()
        self._ready = [loop.create_future() for _ in range(self._num_workers)]
        self._tasks = [loop.create_task(self._serve(slot), name=f"grader-{slot}") for slot in range(self._num_workers)]

    async def start(self) -> None:
        """Start the processes and wait for them. Raises RewardError when the grader cannot be loaded."""
        self.launch()
        for ready in self._ready:
            await asyncio.shield(ready)
        self._check()

    async def score(self, jobs: Sequence[GradeJob]) -> list[GradeOutcome]:
        """Outcomes in the order of `jobs`.

        Raises:
            RewardError: the grader cannot be loaded, its processes die at once every time, or the pool is closed.
        """
        self._check()
        if not jobs:
            return []
        self.launch()
        batch = _Batch([None] * len(jobs), asyncio.get_running_loop().create_future(), len(jobs))
        self._queue.extend(_Item(batch, i, _named(job, i)) for i, job in enumerate(jobs))
        self._wake.set()
        await batch.done
        return [outcome for outcome in batch.outcomes if outcome is not None]

    async def close(self) -> None:
        """End the processes; what is still waiting raises. Calling it again does nothing."""
        self._fail(RewardError("the grader pool is closed"))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _fail(self, failure: RewardError) -> None:
        self._failure = self._failure or failure
        for item in self._queue:
            _refuse(item, self._failure)
        self._queue.clear()
        for ready in self._ready:
            if not ready.done():
                ready.set_result(None)

    async def _serve(self, slot: int) -> None:
        """One worker: a process, replaced when it is lost, that takes its share of the queue again and again."""
        try:
            while True:
                process = self._processes[slot] = await self._start_process()
                if not self._ready[slot].done():
                    self._ready[slot].set_result(None)
                try:
                    await self._use(process)
                finally:
                    await process.end()
                self.num_replaced += 1
        except RewardError as failure:
            self._fail(failure)
        except Exception as error:  # noqa: BLE001  a worker that ended silently would leave its callers waiting
            self._fail(_stopped(error))

    async def _start_process(self) -> GraderProcess:
        reason = ""
        for _ in range(_MAX_STARTS):
            try:
                return await GraderProcess.start(
                    self._kind, key=self._key, timeout_s=self._timeout_s, start_timeout_s=self._start_timeout_s
                )
            except StartFailure as failure:
                reason = str(failure)
        raise RewardError(reason, fix="run the grader by hand to see why its process ends")

    async def _use(self, process: GraderProcess) -> None:
        """Score chunks until the process is lost."""
        while process.is_alive:
            chunk = await self._next_chunk()
            if not process.is_alive:
                self._put_back(chunk)
                return
            try:
                is_good = await self._score_chunk(process, chunk)
            except BaseException as error:
                for item in chunk:
                    _refuse(item, self._failure or _stopped(error))
                raise
            if not is_good:
                return

    async def _next_chunk(self) -> list[_Item]:
        while True:
            while not self._queue:
                self._wake.clear()
                await self._wake.wait()
            share = min(_MAX_CHUNK, -(-len(self._queue) // self._num_workers))
            chunk = [self._queue.popleft() for _ in range(share)]
            if wanted := [item for item in chunk if not item.batch.done.done()]:
                return wanted

    def _put_back(self, items: Sequence[_Item]) -> None:
        self._queue.extendleft(reversed(items))
        self._wake.set()

    async def _score_chunk(self, process: GraderProcess, chunk: list[_Item]) -> bool:
        """Whether the process is still good. What a lost process left undone goes back to the queue."""
        try:
            process.send([item.job for item in chunk])
        except Unsendable:
            self._put_back([item for item in chunk if _is_sendable(item)])
            return True
        unwatch, done = process.watch(), 0
        try:
            while done < len(chunk):
                scores = await process.receive()
                if scores is None:
                    break
                for reward, error, raw in scores:
                    chunk[done].resolve(GradeOutcome(reward, error, raw=raw))
                    done += 1
        finally:
            unwatch()
        if done == len(chunk):
            return True
        self._blame(process, chunk, await process.end())
        return False

    def _blame(self, process: GraderProcess, chunk: list[_Item], ending: str) -> None:
        """Settle the job that the lost process was at; the others are scored again."""
        position, _ = process.position()
        suspects = chunk if position is None else chunk[position : position + 1]
        for item in suspects:
            if item.is_settled:
                continue
            item.deaths += 1
            if process.timed_out and position is not None:
                limit = f"{item.job.name}: the grader took longer than {self._timeout_s:g} s and was killed"
                item.resolve(GradeOutcome(None, limit, timed_out=True))
            elif item.deaths >= _MAX_DEATHS:
                item.resolve(GradeOutcome(None, f"{item.job.name}: the grader process died ({ending})"))
        self._put_back([item for item in chunk if not item.is_settled])


def _named(job: GradeJob, position: int) -> GradeJob:
    if job.name:
        return job
    return GradeJob(job.text, job.label, job.task, job.metadata, job.finished, f"response {position}")


def _is_sendable(item: _Item) -> bool:
    """False after settling an item that no process can be sent."""
    try:
        check_sendable(item.job)
    except Unsendable as error:
        item.resolve(GradeOutcome(None, f"{item.job.name}: cannot be sent to a grader process: {error}"))
        return False
    return True


def _stopped(error: BaseException) -> RewardError:
    """The failure of everyone who waits; its cause is a fault of the pool, not of a grader."""
    failure = RewardError(f"the grader pool stopped: {error!r}")
    failure.__cause__ = error
    return failure


def _refuse(item: _Item, failure: RewardError) -> None:
    if not item.batch.done.done():
        item.batch.done.set_exception(failure)
