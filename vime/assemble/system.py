"""The roles of a run, made of its processes and supervised while the loop runs."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vime.assemble import setups
from vime.assemble.processes import Order, System, launch
from vime.assemble.trainers import memory_of, team_of
from vime.cluster.checkpoints import RunCheckpoints, Writers, save_team
from vime.cluster.fleet import EngineFleet
from vime.cluster.sync_role import NoSync, Publishing, SyncRules, no_turn
from vime.cluster.trainer_role import MegatronTrainer
from vime.cluster.turns import SharedTurns
from vime.data.buffer import Buffer
from vime.data.schedule import StepSchedule
from vime.data.source import PromptSource
from vime.loop import train
from vime.memory.residency import TRAINER_TAGS
from vime.observe.jsonl import RowKind
from vime.observe.recorder import Recorder
from vime.observe.wrap import timed_run
from vime.roles import Run
from vime.rollout.evaluate import PeriodicEvaluation
from vime.rollout.turns import FreeTurns
from vime.rollout.vllm_rollout import VllmRollout
from vime.types import PolicyVersion
from vime.weights.probe import probe_ids
from vime.weights.protocol import ProbeSettings, Publisher
from vime.weights.report import SyncReport

MODEL = "model"
"""Folder in the run directory with the trained model in Hugging Face format."""


async def run(order: Order, recorder: Recorder) -> None:
    """Start every process, train, save, end every process. The error of any part surfaces unchanged."""
    async with AsyncExitStack() as stack:
        system = await launch(order, recorder, stack)
        roles = Roles(system)
        stack.push_async_callback(roles.checkpoints.close)
        async with supervision(roles):
            await train(timed_run(roles.run(), recorder))
        await roles.finish()


@asynccontextmanager
async def supervision(roles: Roles) -> AsyncIterator[None]:
    """Watch the engines beside the block; a watcher that fails ends the block and its error surfaces."""
    fleet, publisher = roles.system.fleet, roles.publisher
    if fleet is None or publisher is None:
        yield
        return
    block = asyncio.current_task()
    watcher = asyncio.create_task(fleet.watch(publisher, roles.engine_turn))
    failed: list[BaseException] = []

    def stop_block(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None and block is not None:
            failed.append(error)
            block.cancel()

    watcher.add_done_callback(stop_block)
    try:
        yield
    except asyncio.CancelledError:
        if failed:
            raise failed[0] from None
        raise
    finally:
        watcher.cancel()
        await asyncio.gather(watcher, return_exceptions=True)
        await publisher.close()


@dataclass(frozen=True)
class _Repair:
    """The fleet as publishing sees it."""

    fleet: EngineFleet
    publisher: Publisher

    @property
    def replaced(self) -> int:
        return self.fleet.replaced

    async def mend(self) -> int:
        return await self.fleet.mend(self.publisher)


@dataclass
class Roles:
    """Builds the roles of one run over its processes."""

    system: System
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        system, config, start = self.system, self.system.config, self.system.start
        seed, shuffle = config.run.seed, config.data.shuffle
        source = PromptSource(system.data.num_rows, identity=system.data.identity, seed=seed, shuffle=shuffle)
        self.buffer = Buffer(
            source,
            batch_size=config.rollout.batch_size,
            max_staleness=config.schedule.max_staleness,
            order=config.rollout.order,
            start=start.version.step,
        )
        self.buffer.watch_stale(lambda groups: self._count("rollout/returned_stale", groups))
        if start.state is not None:
            self.counts.update(start.state.get("counts", {}))
            for warning in self.buffer.restore(start.state["buffer"]):
                system.recorder.event("data_changed", warning)
        self.schedule = StepSchedule(config.schedule.num_steps, start=start.version.step, stop_when=config.schedule.stop_when)
        self.publisher = self._publisher() if system.fleet else None
        self.memory = memory_of(system.plan, system.trainers, system.recorder.memory)
        self.team = team_of(system.plan, system.trainers, self.memory)
        self.rollout = VllmRollout(system.workers, source, gate=self, on_count=self._count, chunk=config.rollout.batch_size)
        self.shared = SharedTurns(system.workers, load=self.rollout, on_train=self._on_train) if self._shares else None
        self.evaluation = self._evaluation()
        self.checkpoints = self._checkpoints()
        self.last = start.version

    @property
    def _shares(self) -> bool:
        return self.system.fleet is not None and self.system.plan.shared

    def run(self) -> Run:
        """The roles as the loop takes them."""
        trainer = MegatronTrainer(
            self.team,
            setups.step_rules(self.system.config, self.system.plan.model),
            incarnation=self.system.start.incarnation,
            on_event=self.system.recorder.event,
        )
        return Run(
            rollout=self.rollout,
            buffer=self.buffer,
            trainer=trainer,
            sync=self._sync(),
            turns=self.shared or FreeTurns(),
            checkpoints=self.checkpoints,
            evaluation=self.evaluation,
            schedule=self.schedule,
            observer=self.system.recorder,
        )

    async def finish(self) -> None:
        """Save what the schedule's end did not: the last checkpoint of a run that stopped early, and the model."""
        await self.checkpoints.settle()
        if not self.system.config.checkpoint.last:
            return
        if self.system.fleet is not None and setups.sleep_level(self.system.plan):
            await self.system.fleet.stop()  # They hold the devices.
        await self.checkpoints.save(self.last)
        await self._export(self.system.config.run.dir / MODEL)
        await self.checkpoints.settle()

    async def _export(self, folder: Path) -> None:
        """Write the actor as a Hugging Face folder."""
        await self.team.work([self.team.actor], lambda actor: actor.link.all("save_hf", folder), needs=TRAINER_TAGS)

    async def wait_open(self) -> None:
        """See `vime.rollout.vllm_rollout.SubmitGate`."""
        if self.shared is not None:
            await self.shared.wait_open()
        if self.system.fleet is not None:
            await self.system.fleet.wait_serving()

    @asynccontextmanager
    async def engine_turn(self) -> AsyncIterator[None]:
        """The turn under which an engine restarts: not while the trainer has the devices."""
        async with self.shared.local.rollout() if self.shared is not None else no_turn():
            yield

    # ---- weights

    def _publisher(self) -> Publisher:
        system, config, plan = self.system, self.system.config, self.system.plan
        assert system.fleet is not None
        assert plan.transport is not None
        publisher = Publisher(
            system.trainer,
            probe=ProbeSettings(probe_ids(plan.model.vocab), plan.dtype, config.weights.probe.tolerance),
            pause="keep" if config.weights.update == "in_flight" else "drain",
            engine_options=plan.transport.engine.options,
            sleep_level=setups.sleep_level(plan),
        )
        publisher.set_engines(system.fleet.controls)
        return publisher

    async def _on_train(self) -> None:
        if self.publisher is not None:
            self.publisher.prepare()
            await self.publisher.vacate()

    def _sync(self) -> Publishing | NoSync:
        start = self.system.start.version
        if self.publisher is None:
            return NoSync(start, published=self._published)
        fleet, publisher = self.system.fleet, self.publisher
        assert fleet is not None
        return Publishing(
            publisher,
            SyncRules(start, self.system.config.weights),
            settle=self.evaluation.settle,
            memory=self.memory,
            repair=_Repair(fleet, publisher),
            report=self._synced,
        )

    def _published(self, version: PolicyVersion) -> None:
        """A trainer that dies ends the run, which goes on from its checkpoint: no earlier batch is needed again."""
        self.last = version
        self.buffer.release_until(version.step)

    def _synced(self, report: SyncReport) -> None:
        self._published(report.version)
        metrics: dict[str, float] = {"perf/update_weights_wire_bytes": float(report.nbytes)}
        if report.probe_mean is not None and report.probe_max is not None:
            metrics |= {"sync/probe_abs_diff": report.probe_mean, "sync/probe_abs_diff_max": report.probe_max}
        metrics |= {f"sync/engine_{phase}": seconds for phase, seconds in report.slowest_engine.items()}
        metrics |= {"sync/staging": report.stage_s, **{f"sync/held_{tag}": float(n) for tag, n in report.engine_bytes.items()}}
        self.system.recorder.note(RowKind.SYNC, metrics=metrics, seconds=report.seconds)

    # ---- evaluation and checkpoints

    def _evaluation(self) -> PeriodicEvaluation:
        config, start = self.system.config, self.system.start
        return PeriodicEvaluation(
            config.evaluation,
            num_steps=config.schedule.num_steps,
            measure=self._measure_sampled if self.system.fleet else self._measure_supervised,
            report=self._evaluated,
            beside=config.schedule.max_staleness > 0 and not self._shares,
            done=frozenset(start.state["evaluated"]) if start.state else frozenset(),
        )

    async def _measure_sampled(self) -> dict[str, float]:
        metrics: dict[str, float] = {}
        for held_out in self.system.config.evaluation.sets:
            for mode in held_out.modes:
                result = await self.system.workers[0].evaluate(held_out.name, mode)
                name = f"eval/{held_out.name}/{mode}"
                metrics[name] = result.mean_reward
                metrics[f"{name}/truncated_ratio"] = result.truncated_ratio
                metrics[f"{name}/response_len/mean"] = result.mean_response_tokens
                if result.num_errors:
                    self.system.recorder.event("rows_not_graded", f"{result.num_errors} rows of {name} could not be graded")
        return metrics

    async def _measure_supervised(self) -> dict[str, float]:
        metrics: dict[str, float] = {}
        for held_out in self.system.config.evaluation.sets:
            rows = await self.system.workers[0].encoded_set(held_out.name)
            result = (await self.system.trainer.all("evaluate_rows", rows))[0]
            metrics |= {f"eval/{held_out.name}/{name}": value for name, value in result.items()}
        return metrics

    def _evaluated(self, version: PolicyVersion, metrics: Mapping[str, float]) -> None:
        self.system.recorder.evaluation(version, metrics)
        self.schedule.observe(metrics)

    def _checkpoints(self) -> RunCheckpoints:
        config, section = self.system.config, self.system.config.checkpoint
        writers = Writers(
            save=lambda folder: save_team(self.team, folder, background=section.asynchronous),
            export=self._export,
            state=self._state,
        )
        return RunCheckpoints(config.run.dir, writers, section, is_last=self.schedule.is_last, saved=self._saved)

    def _saved(self, version: PolicyVersion, waited_s: float, whole_s: float) -> None:
        metrics = {"perf/save_write_time": whole_s} if self.system.config.checkpoint.asynchronous else {}
        self.system.recorder.saved(version, waited_s, metrics=metrics)

    def _state(self, step: int) -> dict[str, Any]:
        """The driver's part of a checkpoint."""
        return {
            "buffer": self.buffer.state(step),
            "evaluated": sorted(self.evaluation.done),
            "metrics_position": self.system.recorder.position(),
            "counts": dict(self.counts),
        }

    def _count(self, name: str, amount: float) -> None:
        self.counts[name] += int(amount)
        self.system.recorder.note(RowKind.STEP, metrics={name: self.counts[name]})
