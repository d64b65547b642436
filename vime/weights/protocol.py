"""Publishing: from the trainer's weights to engines that serve them, with nothing in between served by mistake.

    prepare()   every gate shuts, running requests finish, the engines pause        (may run while the trainer works)
    publish()   trainer's probe log-probs -> stage -> update all engines -> resume with the gate shut -> probe -> open

Engines that leave the devices for the trainer sleep when they have paused; their weights wake before the update, the trainer
leaves (`before_serving`), then their caches wake.

An engine that fails leaves all engines paused with their gates shut until a full publish succeeds.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from vime.config.schema import CheckSchedule
from vime.errors import VimeError, WeightSyncError
from vime.types import PolicyVersion
from vime.weights.control import EngineControl, PauseMode
from vime.weights.probe import LogProbs, ProbeResult, compare, tolerance_for

WEIGHTS, CACHE = "weights", "kv_cache"
"""vLLM's tags of what a sleeping engine gives up, in the order in which they wake."""

REPAUSE_TIMEOUT_S = 5.0
"""How long a failed publish waits for engines that had already been resumed to pause again."""


class TrainerLink(Protocol):
    """The trainer's half as the publisher sees it, over all ranks. Results of several ranks are already merged.

    `merge_stage_info` merges what `TrainerHalf.stage` returns. `init_info` and `connect` are those of rank 0, and other
    ranks are given the former (`TrainerHalf.attach`).
    """

    @property
    def streams(self) -> bool: ...

    async def init_info(self, receivers: int) -> Mapping[str, Any]: ...

    async def connect(self) -> None: ...

    async def stage(self, version: str, fingerprint: bool) -> Mapping[str, Any]: ...

    async def stream(self) -> None: ...

    async def probe_log_probs(self, sequences: Sequence[Sequence[int]]) -> LogProbs: ...


@dataclass(frozen=True, slots=True)
class SyncReport:
    """One publish. `seconds` by phase, in order and without overlap; `nbytes` is what one engine received."""

    version: PolicyVersion
    seconds: Mapping[str, float]
    nbytes: int
    probe: Mapping[str, ProbeResult] = field(default_factory=dict)
    engine_seconds: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    @property
    def probe_mean(self) -> float | None:
        """The worst engine's mean difference; None when nothing was probed."""
        return max((r.mean for r in self.probe.values()), default=None)

    @property
    def probe_max(self) -> float | None:
        return max((r.max for r in self.probe.values()), default=None)


def is_due(schedule: CheckSchedule, count: int) -> bool:
    """Whether the `count`-th publish (from 1) is checked: the first few, then every Nth."""
    return count <= schedule.first or (schedule.every > 0 and count % schedule.every == 0)


def merge_stage_info(infos: Iterable[Mapping[str, Any]], num_tensors: int) -> Mapping[str, Any]:
    """Merge the ranks' `stage` results: mappings are joined, `tensors` summed, other entries must agree.

    Raises WeightSyncError unless the ranks together staged every tensor of the manifest exactly once.
    """
    merged: dict[str, Any] = {"tensors": 0}
    for rank, info in enumerate(infos):
        for key, value in info.items():
            if key == "tensors":
                merged[key] += value
            elif isinstance(value, Mapping):
                merged.setdefault(key, {}).update(value)
            elif merged.setdefault(key, value) != value:
                raise WeightSyncError(f"trainer rank {rank} staged {key} {value}, another {merged[key]}", fix="report a bug")
    if merged["tensors"] != num_tensors:
        raise WeightSyncError(
            f"the trainer staged {merged['tensors']} tensors, the manifest has {num_tensors}",
            fix="every rank yields all tensors it owns, and no tensor has two owners",
        )
    return merged


@dataclass(frozen=True, slots=True)
class ProbeSettings:
    """The tokens every probe uses and how far log-probs may differ. `tolerance` None: by `dtype`, the engines' one."""

    ids: tuple[tuple[int, ...], ...]
    dtype: str = "float32"
    tolerance: float | None = None


class Publisher:
    """Publishes to a set of engines that may change between publishes. One publish or admission at a time.

    Args:
        link: the trainer.
        probe: tokens and tolerance of the probe.
        pause: what happens to requests that run when a publish begins.
        engine_options: options of the engine's transport offer. `in_place`: write into live parameters where that is the
            whole update, instead of vLLM's layerwise reload.
        sleep_level: vLLM's level at which paused engines leave the devices; 0 where they keep them.
    """

    def __init__(
        self,
        link: TrainerLink,
        *,
        probe: ProbeSettings,
        pause: PauseMode = "drain",
        engine_options: Mapping[str, Any] | None = None,
        sleep_level: int = 0,
    ) -> None:
        self._link = link
        self._probe = probe
        self._pause: PauseMode = pause
        self._options = dict(engine_options or {})
        self._engines: dict[str, EngineControl] = {}
        self._joined: set[str] = set()
        self._held: dict[str, asyncio.Task[None]] = {}
        self._sleep_level = sleep_level
        self._asleep: dict[str, tuple[str, ...]] = {}
        self._lock = asyncio.Lock()
        self._nbytes = 0
        self._published: _Published | None = None

    @property
    def engines(self) -> tuple[EngineControl, ...]:
        return tuple(self._engines.values())

    @property
    def version(self) -> PolicyVersion | None:
        """What the engines serve; None before the first publish and after a failed one."""
        return self._published.version if self._published else None

    def set_engines(self, engines: Iterable[EngineControl]) -> None:
        """Engines before the first publish. Later ones come through `admit`, lost ones leave through `remove`."""
        self._engines = {e.name: e for e in engines}
        self._forget(self._engines.keys())

    def remove(self, name: str) -> None:
        """The engine has died or is being restarted; publishes go on without it."""
        self._engines.pop(name, None)
        self._forget([name])

    def trainer_restarted(self, link: TrainerLink) -> None:
        """The trainer's half is new: engines are initialised again and nothing counts as published."""
        self._link = link
        self._published = None
        self._joined.clear()

    def prepare(self) -> None:
        """Begin to empty and pause every engine; returns at once, `publish` waits for it."""
        for name, engine in self._engines.items():
            if name not in self._held:
                self._held[name] = asyncio.ensure_future(self._empty(engine))
                self._held[name].add_done_callback(_mark_seen)

    async def vacate(self) -> None:
        """Return when engines that sleep have left the devices, or failed to: `publish` says so. Others are not touched."""
        if self._sleep_level:
            self.prepare()
            if self._held:
                await asyncio.wait(self._held.values())

    async def publish(
        self,
        version: PolicyVersion,
        *,
        fingerprint: bool = False,
        probe: bool = False,
        before_serving: Callable[[], Awaitable[None]] | None = None,
    ) -> SyncReport:
        """Bring the trainer's current weights to every engine; `before_serving` is awaited once all of them have the weights.

        Raises WeightSyncError, ProbeError or DeadlineError naming the tensor, the rank or the engine; the engines then stay
        paused with their gates shut.
        """
        async with self._lock:
            clock = _Clock()
            await self._join_engines()
            clock.mark("init")
            reference = await self._link.probe_log_probs(self._probe.ids) if probe else None
            clock.mark("reference")
            self._published = None
            staged, _ = await _all([self._link.stage(str(version), fingerprint), self._hold()])
            clock.mark("hold")
            engines = self.engines
            await self._wake(engines, WEIGHTS, clock)
            work = [self._link.stream()] if self._link.streams else []
            try:
                updates = await _all([*(self._update(e, staged, version) for e in engines), *work])
            except VimeError:
                if self._link.streams:
                    self._joined.clear()
                raise
            clock.mark("update")
            if before_serving is not None:
                await before_serving()
                clock.mark("leave")
            await self._wake(engines, CACHE, clock)
            published = _Published(version, staged, reference)
            results = await self._serve(engines, published, clock)
            self._published = published
            seconds = {e.name: update for e, update in zip(engines, updates, strict=False)}
            return SyncReport(version, clock.seconds, self._nbytes, results, seconds)

    async def admit(self, engine: EngineControl, *, probe: bool = True) -> None:
        """Give a started or restarted engine the last published weights; it gets traffic only after that.

        Before the first publish, or after a failed one, it only joins the set and waits for the next. With `probe` it is
        compared with the trainer's log-probs if the last publish computed them. An engine that fails leaves the set.
        """
        async with self._lock:
            self._engines[engine.name] = engine
            self._forget([engine.name])
            published = self._published
            if published is None:
                return
            stream = [self._link.stream] if self._link.streams else []
            try:
                await self._join([engine])
                await engine.shut(self._pause)
                await _all([self._update(engine, published.staged, published.version), *(call() for call in stream)])
                await self._serve([engine], published if probe else published.without_reference(), _Clock())
            except BaseException:
                self.remove(engine.name)
                raise
            finally:
                if self._link.streams:
                    self._joined.clear()

    async def close(self) -> None:
        """End waiting pauses and close the control connections; the engines stay as they are."""
        for task in self._held.values():
            task.cancel()
        await asyncio.gather(*self._held.values(), return_exceptions=True)
        self._held.clear()
        await asyncio.gather(*(e.close() for e in self.engines))

    # ---- steps

    def _forget(self, names: Iterable[str]) -> None:
        for name in names:
            self._joined.discard(name)
            self._asleep.pop(name, None)
            if (task := self._held.pop(name, None)) is not None:
                task.cancel()

    async def _join_engines(self) -> None:
        """Build halves where they are missing; a transport that streams has one group, so there all join anew."""
        missing = [e for name, e in self._engines.items() if name not in self._joined]
        if missing or self._joined - self._engines.keys():
            await self._join(list(self.engines) if self._link.streams else missing)

    async def _join(self, engines: Sequence[EngineControl]) -> None:
        sizes = await _all([e.world_size() for e in engines])
        offer = await self._link.init_info(sum(sizes))
        calls: list[Awaitable[None]] = []
        offset = 0
        for engine, size in zip(engines, sizes, strict=True):
            calls.append(engine.init({**offer, "rank_offset": offset, "options": self._options}))
            offset += size
        await _all([*calls, self._link.connect()])
        self._joined = {e.name for e in engines} | (set() if self._link.streams else self._joined)
        self._nbytes = sum(row[4] for row in offer["manifest"])

    async def _hold(self) -> None:
        self.prepare()
        held, self._held = self._held, {}
        await _all([_after(task) for task in held.values()])

    async def _empty(self, engine: EngineControl) -> None:
        """One that a failed publish left half awake is not put to sleep again: vLLM gives up what is awake only."""
        await engine.shut(self._pause)
        if self._sleep_level and engine.name not in self._asleep:
            await engine.sleep(self._sleep_level)
            self._asleep[engine.name] = (WEIGHTS, CACHE)

    async def _wake(self, engines: Sequence[EngineControl], tag: str, clock: _Clock) -> None:
        """Wake what sleeps under a tag. Waking the last one lets the engine run; its gate is shut."""
        sleeping = [e for e in engines if tag in self._asleep.get(e.name, ())]
        if not sleeping:
            return
        await _all([e.wake([tag]) for e in sleeping])
        for engine in sleeping:
            left = tuple(t for t in self._asleep.pop(engine.name) if t != tag)
            self._asleep |= {engine.name: left} if left else {}
        clock.mark(f"wake_{tag}")

    async def _update(self, engine: EngineControl, staged: Mapping[str, Any], version: PolicyVersion) -> Mapping[str, float]:
        return await engine.update({"staged": dict(staged)}, version=str(version))

    async def _serve(self, engines: Sequence[EngineControl], published: _Published, clock: _Clock) -> Mapping[str, ProbeResult]:
        """Resume, probe behind the gate if there is a reference, open. After a failure all of them are paused again."""
        reference, results = published.reference, {}
        try:
            if reference is not None:
                measured = await _all([self._resume_and_probe(e) for e in engines])
                tolerance = tolerance_for(self._probe.dtype, self._probe.tolerance)
                for engine, log_probs in zip(engines, measured, strict=True):
                    results[engine.name] = compare(reference, log_probs, tolerance=tolerance, engine=engine.name)
                clock.mark("probe")
            await _all([e.open(str(published.version), resume=reference is None) for e in engines])
            clock.mark("open")
        except BaseException:
            await _quietly(lambda e: e.shut("abort"), engines)
            raise
        return results

    async def _resume_and_probe(self, engine: EngineControl) -> LogProbs:
        await engine.resume()
        return await engine.probe(self._probe.ids)


@dataclass(frozen=True, slots=True)
class _Published:
    version: PolicyVersion
    staged: Mapping[str, Any]
    reference: LogProbs | None

    def without_reference(self) -> _Published:
        return _Published(self.version, self.staged, None)


class _Clock:
    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def mark(self, phase: str) -> None:
        now = time.perf_counter()
        self.seconds[phase], self._last = now - self._last, now


async def _after(task: asyncio.Task[None]) -> None:
    await task


async def _all(calls: Sequence[Awaitable[Any]]) -> list[Any]:
    """Run all at once; the first failure surfaces at once and the others are not waited for."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        if tasks:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in tasks:
            if task.done():
                task.result()
        return [task.result() for task in tasks]
    finally:
        for task in tasks:
            task.add_done_callback(_mark_seen)
            task.cancel()


def _mark_seen(task: asyncio.Future[Any]) -> None:
    """A failure beside the first one is not an error of its own."""
    if not task.cancelled():
        task.exception()


async def _quietly(call: Callable[[EngineControl], Awaitable[None]], engines: Iterable[EngineControl]) -> None:
    """Try on every engine for a bounded time; what fails here must not hide the error that led here."""
    tasks = [asyncio.ensure_future(call(e)) for e in engines]
    if tasks:
        await asyncio.wait(tasks, timeout=REPAUSE_TIMEOUT_S)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
