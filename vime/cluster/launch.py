"""Starts a plan's processes as Ray actors on the slots that the plan gave them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray

from vime.cluster.engine_process import EngineProcess
from vime.cluster.links import RolloutWorkerLink, TrainerLink
from vime.cluster.placement import Placement, masked_out
from vime.cluster.rollout_process import RolloutProcess
from vime.cluster.trainer_process import TrainerProcess
from vime.facts.memory import Tag
from vime.facts.process import Factory
from vime.planning.plan import Plan, TrainerPlan
from vime.platforms.discovery import ResolvedPlugin
from vime.rollout.engine import EngineSpec
from vime.trainer.setup import TrainerSetup

Plugins = tuple[ResolvedPlugin, ...]
"""What the driver resolved; every process refuses to start with other ones."""


@dataclass(frozen=True)
class TrainerStart:
    """A training role to start: its ranks' set-ups, a checkpoint to restore, the tags that leave the devices at once."""

    role: TrainerPlan
    setups: Sequence[TrainerSetup]
    restore: Path | None = None
    away: Sequence[Tag] = ()


async def start_trainer(plan: Plan, placement: Placement, start: TrainerStart, *, plugins: Plugins) -> TrainerLink:
    """Start every rank of a training role and wait until its model is built, restored and where it should be.

    Raises TrainerError or DeadlineError naming the rank.
    """
    actor_class = ray.remote(TrainerProcess)
    role, timeout_s = start.role, plan.start_timeout_s
    actors = [
        actor_class.options(
            **placement.options(role.pool, role.request.placement, rank, {**role.env, **_mask(role, rank)})
        ).remote(setup, plugins, masked_out(plan))
        for rank, setup in enumerate(start.setups)
    ]
    link = TrainerLink(actors, name=role.role)
    listens = placement.host(role.pool, role.request.placement.slots[0])
    address, port = (await link.all("rendezvous", listens, timeout_s=timeout_s))[0]
    await link.all("start", address, port, timeout_s=timeout_s)
    if start.restore is not None:
        await link.all("load", start.restore, timeout_s=timeout_s)
    if start.away:
        await link.all("park", tuple(start.away), timeout_s=timeout_s)
    return link


def _mask(role: TrainerPlan, rank: int) -> Mapping[str, str]:
    return role.masks[rank] if role.masks else {}


def engine_actors(
    plan: Plan, placement: Placement, specs: Sequence[EngineSpec], *, plugins: Plugins, segments: str
) -> list[Any]:
    """One engine host a planned engine; the servers are started by the fleet."""
    actor_class = ray.remote(EngineProcess)
    return [
        actor_class.options(**placement.options(e.pool, e.request.placement, 0, {})).remote(
            replace(spec, host=placement.host(e.pool, e.request.placement.slots[0])),
            plugins,
            start_timeout_s=plan.start_timeout_s,
            segments=segments,
        )
        for e, spec in zip(plan.engines, specs, strict=True)
    ]


def rollout_workers(placement: Placement, factory: Factory, setups: Sequence[Any]) -> list[RolloutWorkerLink]:
    """Rollout workers use host processors only. They sit beside the driver, so that the router need not leave loopback."""
    actor_class = ray.remote(RolloutProcess)
    env = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    # Long polls, submissions and pauses of one worker are in flight together.
    options = {
        "num_cpus": 0,
        "max_concurrency": 100,
        "scheduling_strategy": placement.beside_driver(),
        "runtime_env": {"env_vars": env},
    }
    return [
        RolloutWorkerLink(actor_class.options(**options).remote(factory, setup), name=f"rollout worker {i}")
        for i, setup in enumerate(setups)
    ]
