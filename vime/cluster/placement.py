"""Reserves the slots of a plan on the nodes that the plan chose, and says where each process goes and listens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import ray
from ray._private.state import available_resources_per_node  # Ray has no public way to ask for this.
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from vime.cluster.joined import ClusterNode, living_nodes
from vime.errors import PlacementError
from vime.facts.process import RolePlacement, Slot
from vime.planning.masks import scheduler_flags
from vime.planning.plan import Plan, PoolPlan, pool_of
from vime.rollout.ports import LOOPBACK

BUILT_IN = {"GPU": "num_gpus"}
"""Ray's own accelerator resource, which it takes by a keyword only."""

SHARED = 0.9
"""Part of a device's Ray resource that roles which share it by time take together. Ray counts in ten-thousandths."""

RESERVE_S = 20.0
"""For Ray to give what it has: seconds in which another run's end frees devices, no waiting for a run that goes on."""

NODE_LABEL = "ray.io/node-id"
"""Ray's own label of a node."""

_LOOK_EVERY_S = 1.0

T = TypeVar("T")


def demand(plan: Plan) -> dict[str, float]:
    """Ray resources that the whole plan needs, by resource name."""
    needed: dict[str, float] = {}
    for pool in plan.pools:
        needed[pool.binding.resource] = needed.get(pool.binding.resource, 0.0) + len(_slots(plan, pool.name))
    return needed


def _slots(plan: Plan, pool: str) -> list[Slot]:
    return sorted({slot for p in _placements(plan, pool) for slot in p.slots}, key=lambda s: (s.node, s.device))


def _placements(plan: Plan, pool: str) -> list[RolePlacement]:
    """Of every training role and every engine in a pool."""
    return [role.request.placement for role in (*plan.trainers, *plan.engines) if role.pool == pool]


def share(plan: Plan, pool: str, slot: Slot) -> float:
    """The part of a slot's Ray resource that each of its roles takes: all of it, or equal parts of `SHARED`."""
    roles = sum(slot in placement.slots for placement in _placements(plan, pool))
    return 1.0 if roles == 1 else int(SHARED / roles * 10_000) / 10_000


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


@dataclass(frozen=True)
class _Need:
    """What the plan takes of one node: `amount` of a resource."""

    host: str
    node: ClusterNode
    resource: str
    amount: float


class Placement:
    """One placement group a segment of a pool, one bundle a slot, each bundle pinned to the node that the plan names.

    `nodes` are those of a joined cluster by the plan's host names; None is a local cluster, whose only node is meant.
    """

    def __init__(self, plan: Plan, nodes: Mapping[str, ClusterNode] | None = None) -> None:
        self._plan = plan
        self._nodes = nodes
        self._groups: list[PlacementGroup] = []
        self._seats: dict[tuple[str, Slot], _Seat] = {}
        self._driver = ClusterNode("", "", LOOPBACK)
        self._spans = False

    async def reserve(self, timeout_s: float = RESERVE_S) -> None:
        """Hold every bundle.

        Raises PlacementError with what is asked, there and missing on each node: at once where a node is too small or has
        left the cluster, after `timeout_s` where others use it.
        """
        living = {node.id: node for node in living_nodes()}
        self._driver = living[ray.get_runtime_context().get_node_id()]
        if self._nodes is None:
            self._nodes = {n.hostname: self._driver for pool in self._plan.pools for n in pool.inventories}
        needs = self._needs()
        self._spans = len({self._driver.address, *(need.node.address for need in needs)}) > 1
        _check_living(needs, living)
        _check_room(needs, living)
        for pool in self._plan.pools:
            for slots in _segments(pool, _slots(self._plan, pool.name)):
                self._hold(pool, slots)
        await self._wait(needs, min(timeout_s, self._plan.start_timeout_s))

    def _hold(self, pool: PoolPlan, slots: Sequence[Slot]) -> None:
        resource = pool.binding.resource
        where = [{NODE_LABEL: self._node(pool.name, slot).id} for slot in slots]
        group = placement_group([{resource: 1.0} for _ in slots], strategy="PACK", bundle_label_selector=where)
        self._groups.append(group)
        self._seats |= {(pool.name, slot): _Seat(group, bundle, resource) for bundle, slot in enumerate(slots)}

    async def _wait(self, needs: Sequence[_Need], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        pending = list(self._groups)
        while pending:
            left = min(_LOOK_EVERY_S, max(0.0, deadline - time.monotonic()))
            if await asyncio.to_thread(pending[0].wait, left):
                del pending[0]
                continue
            _check_living(needs, {node.id: node for node in living_nodes()})
            if time.monotonic() >= deadline:
                raise _not_reserved(needs, timeout_s)

    async def watched(self, starting: Awaitable[T]) -> T:
        """Await the start of processes, and stop where a node that the plan uses leaves the cluster: Ray would look for
        another one that fits the plan, for ever. Raises PlacementError naming the node, or what `starting` raises.
        """
        needs, task = self._needs(), asyncio.ensure_future(starting)
        try:
            while not task.done():
                await asyncio.wait([task], timeout=_LOOK_EVERY_S)
                if not task.done():
                    _check_living(needs, {node.id: node for node in await asyncio.to_thread(living_nodes)})
            return await task
        finally:
            task.cancel()

    def _needs(self) -> list[_Need]:
        """What the plan takes, by node and resource, in the plan's order."""
        found: dict[tuple[str, str], _Need] = {}
        for pool in self._plan.pools:
            for slot in _slots(self._plan, pool.name):
                node, host = self._node(pool.name, slot), pool.inventories[slot.node].hostname
                key = node.id, pool.binding.resource
                amount = found[key].amount + 1 if key in found else 1.0
                found[key] = _Need(host, node, pool.binding.resource, amount)
        return list(found.values())

    def _node(self, pool: str, slot: Slot) -> ClusterNode:
        assert self._nodes is not None
        return self._nodes[pool_of(self._plan.pools, pool).inventories[slot.node].hostname]

    def options(self, pool: str, placement: RolePlacement, rank: int, env: Mapping[str, str]) -> dict[str, Any]:
        """Ray options of the actor on slot `rank` of a role. Ray is told to leave masks alone: `env` holds them."""
        seat = self._seats[pool, placement.slots[rank]]
        env = {**env, **scheduler_flags(pool_of(self._plan.pools, pool).binding)}
        return {
            "num_cpus": 0,
            **claim(seat.resource, share(self._plan, pool, placement.slots[rank])),
            "scheduling_strategy": PlacementGroupSchedulingStrategy(seat.group, placement_group_bundle_index=seat.bundle),
            "runtime_env": {"env_vars": dict(env)},
        }

    @property
    def hosts(self) -> Mapping[str, ClusterNode]:
        """The nodes that the plan uses, by its host names."""
        return {need.host: need.node for need in self._needs()}

    def beside_driver(self) -> NodeAffinitySchedulingStrategy:
        """Where processes go that read what the driver reads: prompts, graders, the run's folder."""
        return NodeAffinitySchedulingStrategy(self._driver.id, soft=False)

    def host(self, pool: str, slot: Slot) -> str:
        """Where a process on a slot listens: the node's own address where the run spans nodes of several, else loopback."""
        return self._node(pool, slot).address if self._spans else LOOPBACK

    def close(self) -> None:
        """Give everything back; what still runs in it ends."""
        for group in self._groups:
            with suppress(RayError):
                remove_placement_group(group)
        self._groups.clear()


def _segments(pool: PoolPlan, slots: Sequence[Slot]) -> Iterator[list[Slot]]:
    """Slots by scale-up segment of their pool."""
    size = pool.segment_nodes or len(pool.inventories)
    for segment in dict.fromkeys(slot.node // size for slot in slots):
        yield [slot for slot in slots if slot.node // size == segment]


def _check_living(needs: Sequence[_Need], living: Mapping[str, ClusterNode]) -> None:
    gone = [need for need in needs if need.node.id not in living]
    if gone:
        raise PlacementError(
            "the plan uses nodes that have left the cluster: "
            + "; ".join(f"{n.host} ({n.node.address}): asked {n.amount:g} x {n.resource}, there 0" for n in gone)
            + f"; {len(living)} nodes are there",
            fix="start them again with `vime node start`, then the run: it is planned for the nodes that are there",
        )


def _check_room(needs: Sequence[_Need], living: Mapping[str, ClusterNode]) -> None:
    """Refuse at once what a node can never hold."""
    lines, short = _arithmetic(needs, {id: node.resources for id, node in living.items()})
    if short:
        raise PlacementError(
            f"{short:g} devices are missing: {lines}",
            fix="use a smaller topology, add nodes, or start the nodes with these resources (`vime node start`)",
        )


def _not_reserved(needs: Sequence[_Need], timeout_s: float) -> PlacementError:
    free: Mapping[str, Mapping[str, float]] = {}
    with suppress(RayError):
        free = available_resources_per_node()
    lines, short = _arithmetic(needs, free, word="free")
    return PlacementError(
        f"Ray did not give the {sum(n.amount for n in needs):g} devices of the plan within {timeout_s:.0f} s, "
        f"{short:g} are missing: {lines}",
        fix="end what else uses these nodes (`ray list placement-groups`), or use a smaller topology",
    )


def _arithmetic(needs: Sequence[_Need], has: Mapping[str, Mapping[str, float]], *, word: str = "there") -> tuple[str, float]:
    """What is asked of each node, what is there and what is missing; and how much is missing in all."""
    lines: list[str] = []
    total = 0.0
    for need in needs:
        there = has.get(need.node.id, {}).get(need.resource, 0.0)
        missing = max(0.0, need.amount - there)
        total += missing
        told = f", {missing:g} missing" if missing else ""
        lines.append(f"{need.host} ({need.node.address}): asked {need.amount:g} x {need.resource}, {there:g} {word}{told}")
    return "; ".join(lines), total
