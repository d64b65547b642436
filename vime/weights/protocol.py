"""Publishing: from the trainer's weights to engines that serve them, with nothing in between served by mistake.

    prepare()   every gate shuts, running requests finish, the engines pause        (may run while the trainer works)
    publish()   trainer's probe log-probs -> stage -> update all engines -> resume with the gate shut -> probe -> open -> keep

With the pause `keep`, requests stay in the paused engines and go on after the update with caches that are computed anew. The
engines then pause for the update only: the trainer stages first. A probe runs beside the kept requests, and what they sampled
before it failed never leaves the engine's gate; the others' requests are ended with it.

Engines that leave the devices for the trainer sleep when they have paused; their weights wake before the update, the trainer
leaves (`before_serving`), then their caches wake.

A transport that streams sends from the trainer's own tensors. The copy for engines that start later (`keep`) is made once all
gates are open, beside what the run does next, or before the trainer leaves, where it does.

An engine that fails leaves all engines paused with their gates shut until a full publish succeeds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from vime.config.schema import CheckSchedule
from vime.errors import VimeError
from vime.types import PolicyVersion
from vime.weights.control import EngineControl, PauseMode
from vime.weights.joining import Offering, join
from vime.weights.probe import LogProbs, ProbeResult, compare, tolerance_for
from vime.weights.report import SyncReport, most_of
from vime.weights.waits import Clock, all_of, ended, mark_seen, timed, try_for

WEIGHTS, CACHE = "weights", "kv_cache"
"""vLLM's tags of what a sleeping engine gives up, in the order in which they wake."""

REPAUSE_TIMEOUT_S = 5.0
"""How long a failed publish waits for engines that had already been resumed to pause again."""


class TrainerLink(Offering, Protocol):
    """The trainer's half as the publisher sees it, over all ranks. Results of several ranks are already merged.

    `vime.weights.merge` merges what halves of several ranks say. Where only rank 0 sends, `init_info` and `connect` are its
    own, and other ranks are given the former (`TransferContext.lead`).
    """

    @property
    def streams(self) -> bool: ...

    async def stage(self, version: str, fingerprint: bool) -> Mapping[str, Any]: ...

    async def stream(self, *, kept: bool = False) -> None:
        """Send the trainer's tensors, or with `kept` what `keep` took."""
        ...

    def keep(self) -> Awaitable[None]:
        """Copy what was streamed for engines that start later (`TrainerHalf.keep`).

        Every rank has been asked when this returns, not when it was awaited: a rank does what it is asked in order, so a
        training step that is asked for afterwards cannot change the weights before they are copied.
        """
        ...

    async def probe_log_probs(self, sequences: Sequence[Sequence[int]]) -> LogProbs: ...


def is_due(schedule: CheckSchedule, count: int) -> bool:
    """Whether the `count`-th publish (from 1) is checked: the first few, then every Nth."""
    return count <= schedule.first or (schedule.every > 0 and count % schedule.every == 0)


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
        self._waking: set[str] = set()
        self._keeping: asyncio.Future[None] | None = None
        self._lock = asyncio.Lock()
        self._nbytes = 0
        self._published: _Published | None = None

    @property
    def engines(self) -> tuple[EngineControl, ...]:
        return tuple(self._engines.values())

    @property
    def version(self) -> PolicyVersion | None:
        """What the engines serve and what is kept for new ones; None before the first publish and after a failed one."""
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
        self._published = self._keeping = None
        self._joined.clear()

    def prepare(self) -> None:
        """Begin to empty and pause every engine; returns at once, `publish` waits for it."""
        for name, engine in self._engines.items():
            if name not in self._held:
                self._held[name] = asyncio.ensure_future(self._empty(engine))
                self._held[name].add_done_callback(mark_seen)

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
        """Bring the trainer's current weights to every engine; `before_serving` is awaited once all of them have the weights
        and those are kept for later engines: the trainer may leave then. Without it, the copy is made after the gates open.

        Raises WeightSyncError, ProbeError or DeadlineError naming the tensor, the rank or the engine; engines that have paused
        stay so, with their gates shut. What the last publish failed to keep raises here too, before an engine is touched.
        """
        async with self._lock:
            clock = Clock()
            await self._finish_keeping(clock)
            if not self._sleep_level:
                await self._join_engines(clock)
            reference = await self._link.probe_log_probs(self._probe.ids) if probe else None
            clock.mark("reference")
            self._published = None
            staged, stage_s = await self._stage_and_hold(str(version), fingerprint, clock)
            engines = self.engines
            await self._wake(engines, WEIGHTS, clock)
            if self._sleep_level:
                # A model's own loader is tried on names, and may look at parameters that have no memory in an asleep engine.
                await self._join_engines(clock)
            updates = await self._update_all(engines, staged, version)
            clock.mark("update")
            if before_serving is not None:
                await self._leave(before_serving, clock)
            await self._wake(engines, CACHE, clock)
            published = _Published(version, staged, reference)
            results = await self._serve(engines, published, clock)
            self._published = published
            if before_serving is None:
                self._keep()
            held = most_of(e.held_bytes for e in engines)
            return SyncReport(version, clock.seconds, self._nbytes, results, updates, stage_s, held)

    async def admit(self, engine: EngineControl, *, probe: bool = True) -> None:
        """Give a started or restarted engine the last published weights; it gets traffic only after that.

        Before the first publish, or after a failed one, it only joins the set and waits for the next. With `probe` it is
        compared with the trainer's log-probs if the last publish computed them. An engine that fails leaves the set.
        Waits for the copy that it is served from, and raises what making that copy raised.
        """
        async with self._lock:
            self._engines[engine.name] = engine
            self._forget([engine.name])
            try:
                await self._finish_keeping(Clock())
                if (published := self._published) is not None:
                    await self._bring([engine], published if probe else published.without_reference())
            except BaseException:
                self.remove(engine.name)
                raise

    async def close(self) -> None:
        """End waiting pauses and close the control connections; the engines stay as they are.

        Raises what keeping the last published weights raised, if nobody has heard of it yet.
        """
        for task in self._held.values():
            task.cancel()
        await asyncio.gather(*self._held.values(), return_exceptions=True)
        self._held.clear()
        await asyncio.gather(*(e.close() for e in self.engines))
        await self._finish_keeping(Clock())

    # ---- steps

    def _forget(self, names: Iterable[str]) -> None:
        for name in names:
            self._joined.discard(name)
            self._forget_sleep(name)
            if (task := self._held.pop(name, None)) is not None:
                task.cancel()

    def _forget_sleep(self, name: str) -> None:
        self._asleep.pop(name, None)
        self._waking.discard(name)

    async def _join_engines(self, clock: Clock) -> None:
        """Build halves where they are missing; a transport that streams has one group, so there all join anew."""
        missing = [e for name, e in self._engines.items() if name not in self._joined]
        if missing or self._joined - self._engines.keys():
            await self._join(list(self.engines) if self._link.streams else missing)
        clock.mark("init")

    async def _join(self, engines: Sequence[EngineControl]) -> None:
        self._nbytes = await join(self._link, engines, self._options)
        self._joined = {e.name for e in engines} | (set() if self._link.streams else self._joined)

    async def _stage_and_hold(self, version: str, fingerprint: bool, clock: Clock) -> tuple[Mapping[str, Any], float]:
        """Both at once where the engines take time to empty; where they only pause, they run until all is staged.

        Also gives the seconds that staging took.
        """
        stage = timed(self._link.stage(version, fingerprint))
        if self._pause == "keep":
            done = await stage
            clock.mark("stage")
            await self._hold()
        else:
            done, _ = await all_of([stage, self._hold()])
        clock.mark("hold")
        return done

    async def _hold(self) -> None:
        self.prepare()
        held, self._held = self._held, {}
        await all_of([ended(task) for task in held.values()])

    async def _empty(self, engine: EngineControl) -> None:
        """Shut, pause and, where engines leave, put to sleep.

        One that a failed publish left half awake is not put to sleep again: vLLM would call it asleep already, or give up
        twice what is gone. One that was asked for its caches and did not answer may be half awake or awake, and the trainer
        has left: it wakes for good first. Where `sleep` failed it is asked again, which changes nothing in one that sleeps;
        vLLM's `/is_sleeping` would not tell, because it says yes of one that is only paused.
        """
        await engine.shut(self._pause)
        if engine.name in self._waking:
            await engine.wake([CACHE])
            self._forget_sleep(engine.name)
            await engine.shut(self._pause)
        if self._sleep_level and engine.name not in self._asleep:
            await engine.sleep(self._sleep_level)
            self._asleep[engine.name] = (WEIGHTS, CACHE)

    async def _wake(self, engines: Sequence[EngineControl], tag: str, clock: Clock) -> None:
        """Wake what sleeps under a tag. Waking the last one lets the engine run; its gate is shut.

        An engine counts as asleep until it has answered: waking a tag that is awake changes nothing in it.
        """
        sleeping = [e for e in engines if tag in self._asleep.get(e.name, ())]
        if not sleeping:
            return
        if tag == CACHE:
            self._waking |= {e.name for e in sleeping}
        await all_of([e.wake([tag]) for e in sleeping])
        self._waking.clear()
        for engine in sleeping:
            left = tuple(t for t in self._asleep.pop(engine.name) if t != tag)
            self._asleep |= {engine.name: left} if left else {}
        clock.mark(f"wake_{tag}")

    async def _update_all(
        self, engines: Sequence[EngineControl], staged: Mapping[str, Any], version: PolicyVersion, *, kept: bool = False
    ) -> dict[str, Mapping[str, float]]:
        """Update engines while the trainer streams -> seconds by engine and phase. After a failure all must join anew."""
        work = [self._link.stream(kept=kept)] if self._link.streams else []
        try:
            updates = await all_of([*(e.update({"staged": dict(staged)}, version=str(version)) for e in engines), *work])
        except VimeError:
            if self._link.streams:
                self._joined.clear()
            raise
        return {e.name: seconds for e, seconds in zip(engines, updates, strict=False)}

    async def _bring(self, engines: Sequence[EngineControl], published: _Published) -> None:
        """Give engines what is kept and let them serve. A transport that streams has a group of these alone meanwhile."""
        try:
            await self._join(engines)
            await all_of([e.shut(self._pause) for e in engines])
            await self._update_all(engines, published.staged, published.version, kept=True)
            await self._serve(engines, published, Clock())
        finally:
            if self._link.streams:
                self._joined.clear()

    # ---- the copy for later engines

    def _keep(self) -> None:
        """Begin to copy what was published; `_finish_keeping` waits for it."""
        if self._link.streams:
            self._keeping = asyncio.ensure_future(self._link.keep())
            self._keeping.add_done_callback(mark_seen)

    async def _finish_keeping(self, clock: Clock) -> None:
        """Wait for the copy. Raises what making it raised, once; engines then wait for the next publish to be admitted."""
        if (keeping := self._keeping) is None:
            return
        if not keeping.done():
            await asyncio.wait([keeping])
            clock.mark("keep")
        self._keeping = None
        if keeping.cancelled() or keeping.exception() is not None:
            self._published = None
        keeping.result()

    async def _leave(self, before_serving: Callable[[], Awaitable[None]], clock: Clock) -> None:
        self._keep()
        await self._finish_keeping(clock)
        await before_serving()
        clock.mark("leave")

    async def _serve(self, engines: Sequence[EngineControl], published: _Published, clock: Clock) -> Mapping[str, ProbeResult]:
        """Resume, probe behind the gate if there is a reference, open. After a failure all of them are paused again.

        Where weights were on trial, whatever ran under them ends; else requests that are kept through updates stay.
        """
        reference, results = published.reference, {}
        try:
            if reference is not None:
                measured = await all_of([self._resume_and_probe(e) for e in engines])
                tolerance = tolerance_for(self._probe.dtype, self._probe.tolerance)
                for engine, log_probs in zip(engines, measured, strict=True):
                    results[engine.name] = compare(reference, log_probs, tolerance=tolerance, engine=engine.name)
                clock.mark("probe")
            await all_of([e.open(str(published.version), resume=reference is None) for e in engines])
            clock.mark("open")
        except BaseException:
            how: PauseMode = "keep" if self._pause == "keep" and reference is None else "abort"
            await try_for([e.shut(how) for e in engines], REPAUSE_TIMEOUT_S)
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
