"""The processes of a run: started together from its plan, ended with the stack that holds them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from vime.assemble import setups
from vime.assemble.trainers import start_trainers, trainer_starts
from vime.cluster.fleet import EngineFleet, FleetRules
from vime.cluster.joined import JoinedCluster, check_shared
from vime.cluster.launch import Plugins, engine_actors, rollout_workers
from vime.cluster.links import RolloutWorkerLink, TrainerLink
from vime.cluster.placement import Placement, demand, labels, masked_out
from vime.cluster.session import RaySession, restore_signals
from vime.config.schema import Config
from vime.data.snapshot import Snapshot
from vime.facts.process import Factory
from vime.observe import layout
from vime.observe.recorder import Recorder
from vime.planning.plan import Plan
from vime.rollout.worker import WorkerInfo
from vime.types import PolicyVersion
from vime.weights.transports.host_shm import sweep_segments

SAMPLER = Factory("vime.rollout.worker:RolloutWorker")
SUPERVISED = Factory("vime.rollout.sft_rollout:SupervisedWorker")


@dataclass(frozen=True)
class Start:
    """Where a run begins: afresh (`snapshot` None) or at a checkpoint, under its incarnation."""

    incarnation: int
    snapshot: Snapshot | None = None

    @property
    def version(self) -> PolicyVersion:
        return PolicyVersion(self.incarnation, self.snapshot.step if self.snapshot else 0)

    @property
    def state(self) -> Mapping[str, Any] | None:
        return self.snapshot.state if self.snapshot else None


@dataclass(frozen=True)
class Order:
    """A run to be made: checked configuration, its plan, the plugins that the driver resolved, where to begin.

    `cluster` is the one that the plan was made for, None where vime starts one on this machine.
    """

    config: Config
    plan: Plan
    plugins: Plugins
    start: Start
    cluster: JoinedCluster | None = None


@dataclass(frozen=True)
class System:
    """The started processes of a run. `trainers` are all training roles, the actor first; `fleet` is None where nothing is
    sampled.
    """

    config: Config
    plan: Plan
    recorder: Recorder
    start: Start
    trainers: Mapping[str, TrainerLink]
    workers: Sequence[RolloutWorkerLink]
    data: WorkerInfo
    fleet: EngineFleet | None

    @property
    def trainer(self) -> TrainerLink:
        """The actor."""
        return self.trainers[self.plan.actor.role]


async def launch(order: Order, recorder: Recorder, stack: AsyncExitStack) -> System:
    """Start Ray, then training roles, engines and rollout workers, side by side except on real devices that are shared.

    What was started ends with the stack.
    """
    config, plan, start = order.config, order.plan, order.start
    keys = setups.Keys.draw()
    for path in sweep_segments("vime-").removed:
        recorder.event("segment_removed", f"{path} was left by a process that is gone")
    session = RaySession(
        address=order.cluster.address if order.cluster else None,
        resources=demand(plan),
        log_dir=config.run.dir / layout.LOGS,
        run_id=keys.run_id,
        labels=labels(plan),
        unset=masked_out(plan),
        store_bytes=setups.experts_bytes(config, plan),
    )
    stack.callback(session.close)
    await asyncio.to_thread(session.start)
    restore_signals()
    placement = Placement(plan, order.cluster.nodes if order.cluster else None)
    if order.cluster:
        stack.callback(placement.close)
    await placement.reserve()
    if order.cluster:
        await asyncio.to_thread(check_shared, config.run.dir, placement.hosts, run_id=keys.run_id)
    fleet = _fleet(order, placement, recorder, keys) if plan.engines else None
    if fleet is not None:
        stack.push_async_callback(fleet.stop)
    worker_setups = setups.worker_setups(config, keys, sampled=fleet is not None)
    workers = rollout_workers(placement, SAMPLER if fleet else SUPERVISED, worker_setups)
    in_turn = setups.takes_turns_at_start(plan)
    starts = trainer_starts(config, plan, start.snapshot)
    starting: list[Any] = [start_trainers(plan, placement, starts, plugins=order.plugins)]
    starting.append(asyncio.gather(*(w.start() for w in workers)))
    starting += [fleet.start()] if fleet and not in_turn else []
    trainers, infos, *_ = await placement.watched(asyncio.gather(*starting))
    stack.push_async_callback(_close, trainers, workers)
    if fleet is not None:
        if in_turn:
            await placement.watched(fleet.start())
        host = placement.host(plan.actor.pool, plan.actor.request.placement.slots[0])
        transfer = setups.transfer_setup(config, plan, run_id=keys.run_id, host=host, guarded=order.cluster is not None)
        await trainers[plan.actor.role].open_transfer(transfer)
        await asyncio.gather(*(w.connect(fleet.router_url) for w in workers))
    for reason in infos[0].skipped:
        recorder.event("row_skipped", reason)
    return System(config, plan, recorder, start, trainers, workers, infos[0], fleet)


def _fleet(order: Order, placement: Placement, recorder: Recorder, keys: setups.Keys) -> EngineFleet:
    config, plan = order.config, order.plan
    specs = setups.engine_specs(config, plan, keys)
    actors = engine_actors(plan, placement, specs, plugins=order.plugins, segments=keys.segments)
    rules = FleetRules(
        run_token=keys.run_token,
        api_key=keys.api_key,
        start_timeout_s=plan.start_timeout_s,
        call_timeout_s=config.weights.timeout_s,
    )
    return EngineFleet(actors, setups.router_spec(config, plan, keys), rules, on_event=recorder.event)


async def _close(trainers: Mapping[str, TrainerLink], workers: Sequence[RolloutWorkerLink]) -> None:
    """Let processes end by themselves for a moment; Ray's end takes what is left."""
    closing = [*(link.all("close") for link in trainers.values()), *(w.close() for w in workers)]
    await asyncio.gather(*(asyncio.wait_for(call, 10.0) for call in closing), return_exceptions=True)
