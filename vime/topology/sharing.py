"""Rules between roles: who shares devices, which weights travel, and whether a pool has devices for all of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from vime.errors import TopologyError, VimeError
from vime.topology.model import Sync, Topology
from vime.topology.rules import ResolvedRole, place_of, rule_error, several
from vime.yamltree import Node, did_you_mean


def check_shares(topology: Topology, roles: tuple[ResolvedRole, ...], tree: Node) -> list[VimeError]:
    """Share groups and edges must name roles that exist; a group's roles must use one and the same set of devices."""
    by_name = {role.name: role for role in roles}
    errors: list[VimeError] = []
    seen: dict[str, int] = {}
    for index, share in enumerate(topology.share):
        where = place_of(tree, "share", index)
        errors += [
            _no_role(f"share.{index}.roles", name, topology, where) for name in share.roles if name not in topology.roles
        ]
        for name in share.roles:
            if name in seen:
                text = f"{name} takes turns in two groups" if seen[name] != index else f"{name} is named twice"
                errors.append(rule_error("E233", f"share.{index}.roles", text, where=where, fix="name each role once"))
            seen[name] = index
        members = [by_name[name] for name in dict.fromkeys(share.roles) if name in by_name]
        errors += _same_devices(index, members, topology, where)
    for index in range(len(topology.sync)):
        errors += _check_edge(index, topology, tree)
        errors += _check_wishes(index, topology, tree)
        errors += _check_source(index, by_name, topology.sync[index], tree)
    return errors


def _no_role(path: str, name: str, topology: Topology, where: str) -> TopologyError:
    fix = did_you_mean(name, topology.roles, what="roles")
    return rule_error("E104", path, f"no role is called {name!r}", where=where, fix=fix)


def _same_devices(index: int, members: list[ResolvedRole], topology: Topology, where: str) -> Iterator[VimeError]:
    path = f"share.{index}"
    for member in (m for m in members if m.endpoints):
        text = f"{member.name} runs already, on devices of its own"
        yield rule_error("E233", path, text, where=where, fix=f"remove {member.name} from the group")
    members = [m for m in members if not m.endpoints]
    platforms = {m.name: topology.pools[m.pool].platform for m in members}
    if len(set(platforms.values())) > 1:
        listed = ", ".join(f"{name} on {platform}" for name, platform in platforms.items())
        yield rule_error(
            "E232", path, f"devices are shared across platforms: {listed}", where=where, fix="share inside one pool"
        )
    elif len({m.pool for m in members}) > 1:
        listed = ", ".join(f"{m.name} in {m.pool}" for m in members)
        yield rule_error("E233", path, f"the roles sit in different pools: {listed}", where=where, fix="put them in one pool")
    elif len({m.devices for m in members}) > 1 and not any(m.part for m in members):
        yield _unequal(path, members, where)


def _unequal(path: str, members: list[ResolvedRole], where: str) -> TopologyError:
    text = "time sharing needs one set of devices, but " + ", ".join(_uses(m) for m in members)
    most = max(m.devices for m in members)
    equal = [m for m in members if m.kind == "rollout" and not m.groups]
    engines = [m for m in equal if m.devices != most and most % max(m.devices_per_engine, 1) == 0]
    fixes = [f"roles.{m.name}.engines {most // m.devices_per_engine}" for m in engines if m.devices_per_engine]
    return rule_error("E233", path, text, where=where, fix=f"use {' and '.join(fixes) or f'{most} devices in each role'}")


def _uses(role: ResolvedRole) -> str:
    return f"{role.name} uses {role.devices}" + (f" ({role.told})" if role.kind == "rollout" else "")


def _check_edge(index: int, topology: Topology, tree: Node) -> Iterator[VimeError]:
    edge = topology.sync[index]
    for key, name, kind in (("from", edge.source, "train"), ("to", edge.target, "rollout")):
        where, path = place_of(tree, "sync", index, key), f"sync.{index}.{key}"
        if name not in topology.roles:
            yield _no_role(path, name, topology, where)
        elif topology.roles[name].kind != kind:
            text = f"{name} is a {topology.roles[name].kind} role; weights go from a train role to a rollout role"
            yield rule_error("E104", path, text, where=where, fix=f"name a {kind} role")
    if any((e.source, e.target) == (edge.source, edge.target) for e in topology.sync[:index]):
        text = f"{edge.source} -> {edge.target} is written twice"
        yield rule_error("E103", f"sync.{index}", text, where=place_of(tree, "sync", index), fix="remove one of the two")


def _check_wishes(index: int, topology: Topology, tree: Node) -> Iterator[TopologyError]:
    edge = topology.sync[index]
    both = sorted(set(edge.forbid) & set(edge.require))
    if both:
        where, text = place_of(tree, "sync", index, "require"), f"{', '.join(both)} is required and forbidden"
        yield rule_error("E242", f"sync.{index}", text, where=where, fix="remove one of the two")
    both = sorted(set(edge.forbid) & set(edge.prefer))
    if both:
        where, text = place_of(tree, "sync", index, "prefer"), f"{', '.join(both)} is preferred and forbidden"
        yield rule_error("E103", f"sync.{index}", text, where=where, fix="remove one of the two")


def _check_source(index: int, by_name: Mapping[str, ResolvedRole], edge: Sync, tree: Node) -> Iterator[TopologyError]:
    source = by_name.get(edge.source)
    if source is not None and source.kind == "train" and source.task != "actor":
        actors = [role.name for role in by_name.values() if role.kind == "train" and role.task == "actor"]
        text = f"{edge.source} is a {source.task}; engines sample with the weights of an actor"
        fix = f"name {' or '.join(actors)}" if actors else "add `actor: {kind: train}`"
        yield rule_error("E104", f"sync.{index}.from", text, where=place_of(tree, "sync", index, "from"), fix=fix)


def share_groups(topology: Topology, roles: Iterable[ResolvedRole]) -> list[tuple[ResolvedRole, ...]]:
    """Roles that sit on the same devices, together; every other role alone. In file order, external engines left out."""
    resident = [role for role in roles if not role.endpoints]
    group_of = {name: index for index, share in enumerate(topology.share) for name in share.roles}
    groups: dict[object, list[ResolvedRole]] = {}
    for role in resident:
        groups.setdefault(group_of.get(role.name, role.name), []).append(role)
    return [tuple(members) for members in groups.values()]


def demand_of(topology: Topology, roles: Iterable[ResolvedRole], pool: str) -> int:
    """Devices that a pool must have, counting each share group once."""
    return sum(max(r.devices for r in g) for g in share_groups(topology, roles) if g[0].pool == pool)


def check_supply(topology: Topology, roles: tuple[ResolvedRole, ...], supply: Mapping[str, int], tree: Node) -> list[VimeError]:
    """E201 for every pool that is too small."""
    errors: list[VimeError] = []
    for pool, has in supply.items():
        need = demand_of(topology, roles, pool)
        if need > has:
            groups = [g for g in share_groups(topology, roles) if g[0].pool == pool]
            parts = " + ".join(f"{'/'.join(r.name for r in g)} {max(r.devices for r in g)}" for g in groups)
            text = f"roles need {parts} = {need} devices, the pool has {has}"
            fix = f"add {several(need - has, 'device')}, use fewer, or share devices"
            errors.append(rule_error("E201", f"pools.{pool}", text, where=place_of(tree, "pools", pool), fix=fix))
    return errors
