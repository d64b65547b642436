"""Who sits on which device. Pure: device counts of nodes and demands in, slots out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vime.errors import PlacementError
from vime.facts.inventory import NodeInventory
from vime.facts.process import Slot
from vime.planning.masks import by_host
from vime.topology.rules import ResolvedRole


@dataclass(frozen=True, slots=True)
class Demand:
    """Devices asked for together. Each run of `unit` devices (an engine, a tensor-parallel group) is kept on one node."""

    name: str
    devices: int
    unit: int


def demand_for(members: Sequence[ResolvedRole]) -> Demand:
    """One demand for roles that use the same devices."""
    devices = max(member.devices for member in members)
    units = [m.devices_per_engine if m.kind == "rollout" else m.parallel.tp for m in members]
    unit = math.lcm(*units)
    return Demand("/".join(m.name for m in members), devices, unit if unit <= devices else max(units))


def place(
    node_sizes: Sequence[int], demands: Sequence[Demand], *, pool: str, where: str | None = None
) -> Mapping[str, tuple[Slot, ...]]:
    """Give every demand its slots, in order: nodes in turn, devices of a node in turn.

    A unit that fits on a node is never cut by a node's end; the devices it leaves are not used. A unit that is larger than a
    node starts on a node of its own.

    Raises:
        PlacementError: the nodes are too small, with offset, units, devices of a unit and slots.
    """
    slots = [Slot(node, device) for node, size in enumerate(node_sizes) for device in range(size)]
    at = 0
    placed: dict[str, tuple[Slot, ...]] = {}
    for demand in demands:
        taken: list[Slot] = []
        first = at
        for _ in range(demand.devices // demand.unit):
            at = _start_of_unit(slots, at, demand.unit, node_sizes)
            taken += slots[at : at + demand.unit]
            at += demand.unit
        if len(taken) < demand.devices:
            raise _too_small(demand, (first, len(taken) // demand.unit), node_sizes, pool=pool, where=where)
        placed[demand.name] = tuple(taken)
    return placed


def _start_of_unit(slots: Sequence[Slot], at: int, unit: int, node_sizes: Sequence[int]) -> int:
    """The first position from `at` on where a unit may begin."""
    while at < len(slots):
        slot = slots[at]
        left = node_sizes[slot.node] - slot.device
        if unit <= left or (unit > max(node_sizes) and slot.device == 0):
            return at
        at += left
    return at


def _too_small(
    demand: Demand, placed: tuple[int, int], node_sizes: Sequence[int], *, pool: str, where: str | None
) -> PlacementError:
    """`placed`: where the demand begins, and how many of its units found room."""
    offset, fitting = placed
    units, total = demand.devices // demand.unit, sum(node_sizes)
    nodes = ", ".join(str(size) for size in node_sizes[:8]) + (", ..." if len(node_sizes) > 8 else "")
    text = (
        f"E207 pool {pool} cannot hold {demand.name}: offset {offset} + {units} x {demand.unit} devices = "
        f"{offset + demand.devices} of {total} slots (nodes of {nodes})"
    )
    if offset + demand.devices <= total:
        text += f"; {demand.unit} devices that belong together must not be cut by a node's end"
    fix = f"use at most {fitting} x {demand.unit} devices here, or add nodes"
    return PlacementError(text, where=where, fix=fix)


def engine_slots(slots: Sequence[Slot], role: ResolvedRole) -> tuple[tuple[Slot, ...], ...]:
    """The slots of each engine of a rollout role."""
    each = role.devices_per_engine
    return tuple(tuple(slots[index * each : (index + 1) * each]) for index in range(role.engines))


def nodes_of(slots: Sequence[Slot]) -> tuple[int, ...]:
    """The nodes that slots touch, each once, in order."""
    return tuple(dict.fromkeys(slot.node for slot in slots))


def physical_order(nodes: Sequence[NodeInventory], segment_nodes: int = 1) -> tuple[int, ...]:
    """Positions of nodes such that those of a scale-up domain are adjacent: domains by name, in a domain by host name.

    Whole segments of `segment_nodes` nodes come first, so that what a domain has left over cuts none.
    """
    domains: dict[tuple[str, str], list[int]] = {}
    for index in sorted(range(len(nodes)), key=lambda i: (_domain(nodes[i]), by_host(nodes[i].hostname))):
        domains.setdefault(_domain(nodes[index]), []).append(index)
    whole: list[int] = []
    rest: list[int] = []
    for members in domains.values():
        cut = len(members) // segment_nodes * segment_nodes
        whole += members[:cut]
        rest += members[cut:]
    return (*whole, *rest)


def _domain(node: NodeInventory) -> tuple[str, str]:
    return ("", "") if node.fabric is None else (node.fabric.id, node.fabric.clique)
