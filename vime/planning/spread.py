"""Experts of a trained role whose topology does not say over how many devices they are spread."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from vime.facts.inventory import NodeInventory, in_one_domain
from vime.facts.model import ModelShape
from vime.facts.process import Parallel
from vime.planning.amounts import trainer_amounts
from vime.planning.memory import NEAR_LIMIT
from vime.planning.needs import PlanNeeds, model_of
from vime.planning.units import in_units
from vime.topology.load import LoadedTopology
from vime.topology.rules import PoolNodes, ResolvedRole


def spread_experts(
    loaded: LoadedTopology, nodes: Mapping[str, PoolNodes], model: ModelShape, needs: PlanNeeds
) -> tuple[LoadedTopology, tuple[str, ...]]:
    """The topology with `ep` filled in, and notes about it.

    One topology serves dense models, which have no experts to spread, and mixtures of experts. Where it leaves `ep` out and a
    rank that has all experts does not fit beside full recomputation, they are spread as far as scale-up links reach.
    """
    roles, notes = list(loaded.roles), list[str]()
    for at, role in enumerate(roles):
        own = model_of(role, model, needs)
        if role.kind != "train" or not own.experts or _written(loaded, role) or role.pool not in nodes:
            continue
        found = nodes[role.pool].nodes
        held, room = _held(role, own, needs), _room(loaded, found)
        ranks = math.gcd(min(_near(found), role.devices) // role.parallel.pp, own.experts)
        if room is None or held <= room or not _divides(role, ranks):
            continue
        roles[at] = replace(role, parallel=replace(role.parallel, ep=ranks))
        why = f"with all {own.experts} experts a device would hold {in_units(held)} of {in_units(room)}"
        notes.append(f"roles.{role.name}.parallel.ep {ranks}, chosen by the plan: {why}")
    return replace(loaded, roles=tuple(roles)), tuple(notes)


def _written(loaded: LoadedTopology, role: ResolvedRole) -> bool:
    source = loaded.topology.roles[role.name]
    while source.like is not None and "parallel" not in source.model_fields_set:
        source = loaded.topology.roles[source.like]
    return bool({"ep", "etp"} & source.parallel.model_fields_set)


def _held(role: ResolvedRole, model: ModelShape, needs: PlanNeeds) -> int:
    least: Parallel = role.parallel
    amounts = trainer_amounts(model, needs.dtype or "bfloat16", least, replace(needs, recompute="full"), task=role.task)
    return sum(amount.num_bytes for amount in amounts)


def _room(loaded: LoadedTopology, nodes: Sequence[NodeInventory]) -> int | None:
    """Bytes of a device that a plan fills; None for slots of a host, which share its memory."""
    sizes = [device.memory_bytes for node in nodes for device in node.devices]
    if not sizes or any(node.virtual for node in nodes):
        return None
    return int(min(sizes) * (1 - NEAR_LIMIT)) - loaded.topology.limits.device_reserve


def _near(nodes: Sequence[NodeInventory]) -> int:
    """Devices that reach each other at scale-up speed."""
    sizes = [len(node.devices) for node in nodes]
    return sum(sizes) if in_one_domain(nodes) else min(sizes)


def _divides(role: ResolvedRole, ranks: int) -> bool:
    return ranks > 1 and (role.devices // role.parallel.pp) % (ranks * role.parallel.etp) == 0
