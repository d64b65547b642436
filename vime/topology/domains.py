"""Rules about scale-up domains: a pool's nodes make whole segments, and the groups that talk most stay inside one.

A segment is one node, or `segment_nodes` nodes of a fabric, in the pool's order. Under `require: strict` a broken rule is
E221, under `prefer` the note W222, under `off` nothing is looked at.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from vime.errors import VimeError
from vime.facts.inventory import NodeInventory
from vime.facts.process import Parallel, Slot
from vime.topology.model import Domain, Pool, Topology
from vime.topology.rules import ResolvedRole, place_of, rule_error, several
from vime.yamltree import Node


@dataclass(frozen=True, slots=True)
class Told:
    """What rules found: errors, and notes that stop nothing."""

    errors: list[VimeError] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, rules: tuple[str, str], path: str, text: str, *, where: str, fix: str, strict: bool) -> None:
        """Under the first id as an error where `strict`, else under the second as a note."""
        if strict:
            self.errors.append(rule_error(rules[0], path, text, where=where, fix=fix))
        else:
            self.notes.append(f"{rules[1]} {path}: {text}; {fix}")

    def __add__(self, other: Told) -> Told:
        return Told([*self.errors, *other.errors], [*self.notes, *other.notes])


_CROSSES = ("E221", "W222")


def check_segments(topology: Topology, tree: Node) -> Told:
    """Segments of one node where no fabric joins nodes (E103), and pools of whole segments."""
    told = Told()
    for name, pool in topology.pools.items():
        domain = pool.domain
        if domain is None:
            continue
        where, size = place_of(tree, "pools", name, "domain", "segment_nodes"), domain.segment_nodes
        if domain.kind == "node" and size != 1:
            text = f"a domain of kind node is one node, not {size}"
            fix = "write 1, or `kind: fabric`"
            told.errors.append(rule_error("E103", f"pools.{name}.domain.segment_nodes", text, where=where, fix=fix))
        count = num_nodes(pool)
        if domain.kind == "fabric" and domain.require != "off" and count % size:
            below = count // size * size
            near = f"{below} or {below + size}" if below else str(size)
            text = f"{count} nodes are not a multiple of segment_nodes {size}: the last segment has {count % size}"
            place = place_of(tree, "pools", name, "nodes")
            strict = domain.require == "strict"
            told.add(_CROSSES, f"pools.{name}.nodes", text, where=place, fix=f"use {near} nodes", strict=strict)
    return told


def num_nodes(pool: Pool) -> int:
    """How many nodes a pool has, as it is written."""
    return sum(group.count for group in pool.nodes) if isinstance(pool.nodes, tuple) else pool.nodes


# ---- groups


@dataclass(frozen=True, slots=True)
class _Groups:
    """The groups of one axis: positions in the role's slots, group by group. `told` says the group's size."""

    axis: str
    told: str
    members: Sequence[Sequence[int]]
    unit: int = 1
    """The size is a multiple of this (the devices of one expert's tensor-parallel group)."""
    engine: bool = False
    """Of an engine, whose ep is its tp x dp."""


def check_crossing(role: ResolvedRole, slots: Sequence[Slot], pool: Pool, nodes: Sequence[NodeInventory], tree: Node) -> Told:
    """E221 or W222 for tensor-parallel and expert groups that cross segments; one finding an axis."""
    told, domain = Told(), pool.domain
    if domain is None or domain.require == "off" or nodes[0].virtual:
        return told
    segments = [index // domain.segment_nodes if domain.kind == "fabric" else index for index in range(len(nodes))]
    for groups in (*_tensor_groups(role), *_expert_groups(role)):
        crossing = [g for g in groups.members if len({segments[slots[i].node] for i in g}) > 1]
        if not crossing:
            continue
        first = crossing[0]
        touched = sorted({segments[slots[i].node] for i in first})
        devices = min(sum(len(n.devices) for n, s in zip(nodes, segments, strict=True) if s == t) for t in touched)
        hosts = [nodes[slots[rank].node].hostname for rank in (first[0], first[-1])]
        text = (
            f"{groups.told} crosses segments: ranks {first[0]} to {first[-1]} sit on {hosts[0]} to {hosts[1]}, "
            f"segments {touched[0]} to {touched[-1]} of "
            f"{_size(domain)} = {devices} devices ({len(crossing)} of {several(len(groups.members), 'group')})"
        )
        where, path = place_of(tree, "roles", role.name, "parallel", groups.axis), f"roles.{role.name}.parallel.{groups.axis}"
        fix = _nearest(groups, len(first), devices)
        told.add(_CROSSES, path, text, where=where, fix=fix, strict=domain.require == "strict")
    return told


def _size(domain: Domain) -> str:
    return "1 node" if domain.segment_nodes == 1 else f"{domain.segment_nodes} nodes"


def _nearest(groups: _Groups, size: int, devices: int) -> str:
    """The largest axis that divides the one written and a segment; where the axis would fit, the role stands badly."""
    written = size // groups.unit
    able = [d for d in range(1, written + 1) if written % d == 0 and devices % (d * groups.unit) == 0]
    if not able:
        return f"make groups of {devices} devices at most, or write `require: prefer`"
    if able[-1] == written:
        return f"let the role begin at a segment: give the roles before it a multiple of {devices} devices"
    axis = "tp x dp of" if groups.engine else groups.axis
    return f"use {axis} {able[-1]}, larger segments, or `require: prefer`"


def _tensor_groups(role: ResolvedRole) -> Iterator[_Groups]:
    """Runs of tp ranks: the innermost axis, in Megatron's order and in vLLM's."""
    if role.parallel.tp > 1:
        tp = role.parallel.tp
        yield _Groups("tp", f"tp {tp}", _runs(role.devices, tp))


def _expert_groups(role: ResolvedRole) -> Iterator[_Groups]:
    """Training: runs of ep x etp ranks, since pp is the outermost axis. An engine: the ranks of one pp stage (dp x pp x tp)."""
    axes = role.parallel
    if axes.ep * axes.etp == 1:
        return
    if role.kind == "train":
        size = axes.ep * axes.etp
        told = f"ep {axes.ep}" + (f" x etp {axes.etp} = {size}" if axes.etp > 1 else "")
        yield _Groups("ep", told, _runs(role.devices, size), axes.etp)
        return
    starts = range(0, role.devices, axes.devices)
    yield _Groups("ep", f"ep {axes.ep}", [_stage(axes, start, p) for start in starts for p in range(axes.pp)], engine=True)


def _runs(total: int, size: int) -> list[range]:
    return [range(start, start + size) for start in range(0, total, size)]


def _stage(axes: Parallel, start: int, stage: int) -> list[int]:
    replica = axes.pp * axes.tp
    return [start + d * replica + stage * axes.tp + t for d in range(axes.dp) for t in range(axes.tp)]
