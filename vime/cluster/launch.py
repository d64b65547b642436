"""Starts a plan's processes as Ray actors on the slots that the plan gave them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from vime.cluster.engine_process import EngineProcess
from vime.cluster.links import RolloutWorkerLink, TrainerLink
from vime.cluster.rollout_process import RolloutProcess
from vime.cluster.trainer_process import TrainerProcess
from vime.errors import PlacementError
from vime.facts.memory import Tag
from vime.facts.process import Factory, RolePlacement, Slot
from vime.planning.masks import bundle_order, by_host, scheduler_flags
from vime.planning.plan import Plan, TrainerPlan, pool_of
from vime.platforms.discovery import ResolvedPlugin
from vime.rollout.engine import EngineSpec
from vime.trainer.setup import TrainerSetup

Plugins = tuple[ResolvedPlugin, ...]
"""What the driver resolved; every process refuses to start with other ones."""

BUILT_IN = {"GPU": "num_gpus"}
"""Ray's own accelerator resource, which it takes by a keyword only."""

SHARE = 0.45
"""Part of a device's Ray resource that one of two roles takes when they share it by time."""


def demand(plan: Plan) -> dict[str, float]:
    """Ray resources that the whole plan needs, by resource name."""
    needed: dict[str, float] = {}
    for pool in plan.pools:
        needed[pool.binding.resource] = needed.get(pool.binding.resource, 0.0) + len(_slots(plan, pool.name))
    return needed


def _slots(plan: Plan, pool: str) -> list[Slot]:
    placements = [plan.actor.request.placement] if plan.actor.pool == pool else []
    placements += [e.request.placement for e in plan.engines if e.pool == pool]
    return sorted({slot for p in placements for slot in p.slots}, key=lambda s: (s.node, s.device))


def labels(plan: Plan) -> dict[str, str]:
    """Labels that the platforms want on the node that vime starts."""
    return {name: value for pool in plan.pools for name, value in pool.binding.labels.items()}


def masked_out(plan: Plan) -> tuple[str, ...]:
    """Variables that must not be set beside the masks, in any process of the run."""
    return tuple(dict.fromkeys(n for pool in plan.pools if not pool.binding.virtual for n in pool.binding.unset_env))


def claim(resource: str, amount: float) -> dict[str, Any]:
    """Actor options that take an amount of a resource; one that Ray knows by a name of its own has an option of its own."""
    return {BUILT_IN[resource]: amount} if resource in BUILT_IN else {"resources": {resource: amount}}


@dataclass(frozen=True)
class _Seat:
    """A bundle of a placement group and the resource that an actor takes from it."""

    group: PlacementGroup
    bundle: int
    resource: str


class Placement:
    """One placement group a pool, one bundle a slot."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._groups: list[PlacementGroup] = []
        self._seats: dict[tuple[str, Slot], _Seat] = {}

    async def reserve(self) -> None:
        """Wait until Ray holds every bundle. Raises PlacementError after the topology's start time-out."""
        for pool in self._plan.pools:
            slots, resource = _slots(self._plan, pool.name), pool_of(self._plan.pools, pool.name).binding.resource
            if not slots:
                continue
            group = placement_group([{resource: 1.0} for _ in slots], strategy="PACK")
            self._groups.append(group)
            try:
                await asyncio.wait_for(_ready(group), self._plan.start_timeout_s)
            except TimeoutError as error:
                raise PlacementError(
                    f"Ray did not reserve {len(slots)} devices within {self._plan.start_timeout_s:.0f} s; "
                    f"free: {ray.available_resources()}",
                    fix="end what else uses the cluster, or use a smaller topology",
                ) from error
            bundles = await asyncio.to_thread(_bundles, group, slots)
            self._seats |= {(pool.name, slot): _Seat(group, bundle, resource) for slot, bundle in bundles.items()}

    def options(self, pool: str, placement: RolePlacement, rank: int, env: Mapping[str, str]) -> dict[str, Any]:
        """Ray options of the actor on slot `rank` of a role. Ray is told to leave masks alone: `env` holds them."""
        seat = self._seats[pool, placement.slots[rank]]
        env = {**env, **scheduler_flags(pool_of(self._plan.pools, pool).binding)}
        return {
            "num_cpus": 0,
            **claim(seat.resource, SHARE if self._plan.shared else 1.0),
            "scheduling_strategy": PlacementGroupSchedulingStrategy(seat.group, placement_group_bundle_index=seat.bundle),
            "runtime_env": {"env_vars": dict(env)},
        }

    def close(self) -> None:
        for group in self._groups:
            remove_placement_group(group)


async def _ready(group: PlacementGroup) -> None:
    await group.ready()


def _bundles(group: PlacementGroup, slots: Sequence[Slot]) -> dict[Slot, int]:
    """The bundle of every slot: Ray promises no order, so bundles are sorted by host and slots of a node get one host's.

    Raises PlacementError where the hosts do not hold the numbers of devices that the plan's nodes have.
    """
    hosts = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    where: Mapping[int, str] = placement_group_table(group)["bundles_to_node_id"]
    addresses = [hosts[where[bundle]] for bundle in range(len(slots))]
    order = bundle_order(addresses)
    given = {slot: addresses[bundle] for slot, bundle in zip(slots, order, strict=True)}
    if len({(slot.node, host) for slot, host in given.items()}) != len({slot.node for slot in slots}):
        placed = ", ".join(f"{addresses.count(host)} on {host}" for host in sorted(set(addresses), key=by_host))
        raise PlacementError(
            f"the plan's nodes have {_counts(slots)} devices, Ray reserved {placed}",
            fix="free whole nodes, or use a topology with their sizes",
        )
    return dict(zip(slots, order, strict=True))


def _counts(slots: Sequence[Slot]) -> str:
    nodes = [slot.node for slot in slots]
    return ", ".join(str(nodes.count(node)) for node in dict.fromkeys(nodes))


async def start_trainer(
    plan: Plan,
    placement: Placement,
    setups: Sequence[TrainerSetup],
    *,
    plugins: Plugins,
    restore: Path | None = None,
    away: Sequence[Tag] = (),
) -> TrainerLink:
    """Start every rank and wait until the model is built, `restore` a checkpoint, take the tags `away` off the devices.

    Raises TrainerError or DeadlineError naming the rank.
    """
    actor_class = ray.remote(TrainerProcess)
    role, timeout_s = plan.actor, plan.start_timeout_s
    actors = [
        actor_class.options(
            **placement.options(role.pool, role.request.placement, rank, {**role.env, **_mask(role, rank)})
        ).remote(setup, plugins, masked_out(plan))
        for rank, setup in enumerate(setups)
    ]
    link = TrainerLink(actors)
    address, port = (await link.all("rendezvous", timeout_s=timeout_s))[0]
    await link.all("start", address, port, timeout_s=timeout_s)
    if restore is not None:
        await link.all("load", restore, timeout_s=timeout_s)
    if away:
        await link.all("park", tuple(away), timeout_s=timeout_s)
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
            spec, plugins, start_timeout_s=plan.start_timeout_s, segments=segments
        )
        for e, spec in zip(plan.engines, specs, strict=True)
    ]


def rollout_workers(factory: Factory, setups: Sequence[Any]) -> list[RolloutWorkerLink]:
    """Rollout workers use host processors only."""
    actor_class = ray.remote(RolloutProcess)
    env = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    # Long polls, submissions and pauses of one worker are in flight together.
    options = {"num_cpus": 0, "max_concurrency": 100, "runtime_env": {"env_vars": env}}
    return [
        RolloutWorkerLink(actor_class.options(**options).remote(factory, setup), name=f"rollout worker {i}")
        for i, setup in enumerate(setups)
    ]
