"""The arithmetic rules of a topology. Every message has the rule's id, the line, the numbers and the nearest valid values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from vime.errors import TopologyError, VimeError
from vime.facts.inventory import DeviceProfile, NodeInventory
from vime.facts.model import ModelShape
from vime.facts.process import Parallel
from vime.topology.model import MAX_DEVICES, Pool, Role, Topology
from vime.yamltree import Node, did_you_mean, find

RULES: Mapping[str, str] = {
    "E101": "the schema version is not known",
    "E102": "unknown key",
    "E103": "a value has the wrong type or unit, or is missing",
    "E104": "a name refers to nothing",
    "E105": "a pool pins another platform than the one asked for",
    "E201": "roles need more devices than a pool has",
    "E202": "devices are not a multiple of tp x pp x cp",
    "E203": "ep x etp does not divide what is left beside pp",
    "E204": "a tensor-parallel group is larger than a scale-up domain",
    "E205": "a parallel size does not divide the model",
    "E206": "engines x devices of an engine is not the role's number of devices",
    "E211": "devices_per_node is not what the hardware has",
    "E212": "a training role would sit on a part of a device",
    "E213": "a role would sit on a device that is not healthy",
    "E231": "roles share devices, cannot leave them, and do not fit together",
    "E232": "roles of different platforms share devices",
    "E233": "roles that take turns use different sets of devices",
    "E241": "no transport is left for an edge",
    "E242": "a required transport cannot be used",
    "E251": "device memory does not suffice",
    "E252": "host memory does not suffice",
    "E261": "environment variables contradict each other",
    "E262": "trainer and engine need the same value of a variable",
    "E271": "a pool's platform is not active",
}


@dataclass(frozen=True, slots=True)
class ResolvedRole:
    """A role with every number filled in. `parallel.dp` of a rollout role is inside one engine.

    With `part` the role takes that much of its pool; until the pool is known, its numbers are the smallest possible.
    """

    name: str
    kind: str
    pool: str
    parallel: Parallel
    engines: int
    devices: int
    optimizer: bool = True
    stage: str | None = None
    endpoints: tuple[str, ...] = ()
    part: str | None = None

    @property
    def devices_per_engine(self) -> int:
        """Devices of one engine; of the whole role for a training role."""
        return self.devices // self.engines if self.engines else 0


def rule_error(rule: str, path: str, text: str, *, where: str | None, fix: str) -> TopologyError:
    """`E2xx path: text`, at its line, with the next step."""
    return TopologyError(f"{rule} {path}: {text}", where=where, fix=fix)


def place_of(tree: Node, *path: str | int) -> str:
    """Where a key path stands."""
    return str(find(tree, path)[1])


def nearest_multiples(number: int, unit: int) -> str:
    """`4 or 8`: the multiples of `unit` around `number`, none below one unit."""
    below = number // unit * unit
    return f"{below} or {below + unit}" if below else str(unit)


# ---- roles


def resolve_roles(topology: Topology, tree: Node) -> tuple[tuple[ResolvedRole, ...], list[VimeError]]:
    """Fill in pools, devices and axes of every role. Roles that break a rule are left out and reported."""
    roles: list[ResolvedRole] = []
    errors: list[VimeError] = []
    for name in topology.roles:
        try:
            roles.append(_resolve(name, topology, tree))
        except TopologyError as error:
            errors.append(error)
    return tuple(roles), errors


def _resolve(name: str, topology: Topology, tree: Node) -> ResolvedRole:
    role = _with_like(name, topology, tree, ())
    pool = _pool_name(name, role, topology, tree)
    resolve = _resolve_train if role.kind == "train" else _resolve_rollout
    resolved = resolve(name, role, tree)
    if resolved.devices > MAX_DEVICES:
        text = f"{resolved.devices} devices are more than {MAX_DEVICES}"
        raise rule_error("E103", f"roles.{name}", text, where=place_of(tree, "roles", name), fix="write the number you have")
    return replace(resolved, pool=pool, part=role.devices if isinstance(role.devices, str) else None)


def _with_like(name: str, topology: Topology, tree: Node, above: tuple[str, ...]) -> Role:
    role = topology.roles[name]
    if role.like is None:
        return role
    where = place_of(tree, "roles", name, "like")
    if role.like not in topology.roles:
        fix = did_you_mean(role.like, topology.roles, what="roles")
        raise rule_error("E104", f"roles.{name}.like", f"no role is called {role.like!r}", where=where, fix=fix)
    if role.like in (*above, name):
        chain = " -> ".join((*above, name, role.like))
        raise rule_error("E104", f"roles.{name}.like", f"a circle: {chain}", where=where, fix="write the numbers out")
    model = _with_like(role.like, topology, tree, (*above, name))
    if model.kind != role.kind:
        text = f"{role.like} is a {model.kind} role, {name} a {role.kind} role"
        raise rule_error("E104", f"roles.{name}.like", text, where=where, fix="name a role of the same kind")
    given = role.model_fields_set
    taken = {key: getattr(model, key) for key in ("pool", "devices", "parallel", "engines") if key not in given}
    return role.model_copy(update=taken)


def _pool_name(name: str, role: Role, topology: Topology, tree: Node) -> str:
    if role.pool is None:
        if len(topology.pools) == 1:
            return next(iter(topology.pools))
        text = f"{len(topology.pools)} pools are there and none is named"
        fix = f"write `pool:` with one of {', '.join(topology.pools)}"
        raise rule_error("E104", f"roles.{name}.pool", text, where=place_of(tree, "roles", name), fix=fix)
    if role.pool not in topology.pools:
        where, fix = place_of(tree, "roles", name, "pool"), did_you_mean(role.pool, topology.pools, what="pools")
        raise rule_error("E104", f"roles.{name}.pool", f"no pool is called {role.pool!r}", where=where, fix=fix)
    return role.pool


def _resolve_train(name: str, role: Role, tree: Node) -> ResolvedRole:
    axes, path = role.parallel, f"roles.{name}"
    replica = axes.tp * axes.pp * axes.cp
    least = axes.pp * math.lcm(axes.tp * axes.cp, axes.ep * axes.etp) if axes.dp is None else replica * axes.dp
    devices = role.devices if isinstance(role.devices, int) else (least if role.devices else replica * (axes.dp or 1))
    where = place_of(tree, "roles", name, "devices")
    product = f"tp {axes.tp} x pp {axes.pp} x cp {axes.cp} = {replica}"
    if devices > MAX_DEVICES:
        return ResolvedRole(name, "train", "", Parallel(), 1, devices)
    if devices % replica:
        text = f"{devices} devices are not a multiple of {product}"
        raise rule_error("E202", f"{path}.devices", text, where=where, fix=f"use {nearest_multiples(devices, replica)} devices")
    if axes.dp is not None and axes.dp != devices // replica:
        text = f"{devices} devices / ({product}) leave dp {devices // replica}, but dp {axes.dp} is written"
        fix = f"remove dp, or use {replica * axes.dp} devices"
        raise rule_error("E202", f"{path}.parallel.dp", text, where=place_of(tree, "roles", name, "parallel", "dp"), fix=fix)
    beside, experts = devices // axes.pp, axes.ep * axes.etp
    if beside % experts:
        text = f"ep {axes.ep} x etp {axes.etp} = {experts} does not divide {devices} devices / pp {axes.pp} = {beside}"
        fix = f"use ep x etp of {' or '.join(str(d) for d in _near_divisors(beside, experts))}"
        raise rule_error("E203", f"{path}.parallel", text, where=place_of(tree, "roles", name, "parallel", "ep"), fix=fix)
    _refuse(name, tree, role.engines != 1, "engines", "a training role has no engines")
    _refuse(name, tree, bool(role.endpoints or role.stage), "kind", "endpoints and stage belong to rollout roles")
    parallel = Parallel(axes.tp, axes.pp, axes.cp, axes.ep, axes.etp, devices // replica)
    return ResolvedRole(name, "train", "", parallel, 1, devices, role.optimizer)


def _resolve_rollout(name: str, role: Role, tree: Node) -> ResolvedRole:
    axes, path, dp = role.parallel, f"roles.{name}", role.parallel.dp or 1
    _refuse(name, tree, axes.cp != 1, "parallel", "an engine has no cp axis")
    _refuse(name, tree, axes.etp != 1, "parallel", "an engine has no etp axis")
    each = axes.tp * axes.pp * dp
    product = f"tp {axes.tp} x pp {axes.pp} x dp {dp} = {each}"
    if axes.ep not in (1, axes.tp * dp):
        text = f"an engine spreads experts over tp {axes.tp} x dp {dp} = {axes.tp * dp} devices or none, not over {axes.ep}"
        where = place_of(tree, "roles", name, "parallel", "ep")
        raise rule_error("E203", f"{path}.parallel.ep", text, where=where, fix=f"use ep 1 or ep {axes.tp * dp}")
    parallel = Parallel(axes.tp, axes.pp, 1, axes.ep, 1, dp)
    if role.endpoints:
        return ResolvedRole(name, "rollout", "", parallel, len(role.endpoints), 0, False, role.stage, role.endpoints)
    devices = role.devices if isinstance(role.devices, int) else role.engines * each
    if devices != role.engines * each:
        text = f"{role.engines} engines x ({product}) = {role.engines * each}, but devices says {devices}"
        near = f"use devices {role.engines * each}"
        fix = near + (f", or engines {devices // each}" if devices % each == 0 else "")
        raise rule_error("E206", f"{path}.devices", text, where=place_of(tree, "roles", name, "devices"), fix=fix)
    return ResolvedRole(name, "rollout", "", parallel, role.engines, devices, False, role.stage)


def _refuse(name: str, tree: Node, broken: bool, key: str, text: str) -> None:
    if broken:
        where = place_of(tree, "roles", name, key)
        raise rule_error("E103", f"roles.{name}.{key}", text, where=where, fix="remove it")


def _near_divisors(total: int, wanted: int) -> tuple[int, ...]:
    divisors = [d for d in range(1, total + 1) if total % d == 0]
    return (*[d for d in divisors if d < wanted][-1:], *[d for d in divisors if d > wanted][:1])


# ---- shares, edges and supply


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
    return errors


def _no_role(path: str, name: str, topology: Topology, where: str) -> TopologyError:
    fix = did_you_mean(name, topology.roles, what="roles")
    return rule_error("E104", path, f"no role is called {name!r}", where=where, fix=fix)


def _same_devices(index: int, members: list[ResolvedRole], topology: Topology, where: str) -> Iterator[VimeError]:
    path = f"share.{index}"
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
    engines = [m for m in members if m.kind == "rollout" and m.devices != most and most % max(m.devices_per_engine, 1) == 0]
    fixes = [f"roles.{m.name}.engines {most // m.devices_per_engine}" for m in engines if m.devices_per_engine]
    return rule_error("E233", path, text, where=where, fix=f"use {' and '.join(fixes) or f'{most} devices in each role'}")


def _uses(role: ResolvedRole) -> str:
    each = f" ({role.engines} engines x {role.devices_per_engine})" if role.kind == "rollout" else ""
    return f"{role.name} uses {role.devices}{each}"


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
    both = sorted(set(edge.forbid) & set(edge.require))
    if both:
        where, text = place_of(tree, "sync", index, "require"), f"{', '.join(both)} is required and forbidden"
        yield rule_error("E242", f"sync.{index}", text, where=where, fix="remove one of the two")


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
            fix = f"add {need - has} devices, use fewer, or share devices"
            errors.append(rule_error("E201", f"pools.{pool}", text, where=place_of(tree, "pools", pool), fix=fix))
    return errors


# ---- hardware and model


@dataclass(frozen=True, slots=True)
class PoolNodes:
    """A pool with its nodes; `profile` is set where they are nominal."""

    name: str
    pool: Pool
    nodes: tuple[NodeInventory, ...]
    profile: DeviceProfile | None = None


def check_hardware(at: PoolNodes, roles: Iterable[ResolvedRole], tree: Node) -> list[VimeError]:
    """E211 and E204 of one pool against its nodes."""
    name, pool, nodes, profile = at.name, at.pool, at.nodes, at.profile
    errors: list[VimeError] = []
    expected = None if profile is None else profile.devices_per_node
    written = pool.devices_per_node
    actual = expected if expected is not None else (len(nodes[0].devices) if nodes and not nodes[0].virtual else None)
    if written is not None and actual is not None and written != actual:
        kind = profile.name if profile else nodes[0].platform
        text = f"expected {actual}, you wrote {written}: one {kind} node has {actual} devices"
        where = place_of(tree, "pools", name, "devices_per_node")
        errors.append(rule_error("E211", f"pools.{name}.devices_per_node", text, where=where, fix=f"write {actual}"))
    domain = _domain_devices(pool, nodes, profile)
    for role in roles:
        if role.pool == name and domain is not None and role.parallel.tp > domain:
            text = f"tp {role.parallel.tp} is larger than a scale-up domain of {domain} devices"
            where = place_of(tree, "roles", role.name, "parallel", "tp")
            fix = f"use tp {domain} at most, and pp for the rest"
            errors.append(rule_error("E204", f"roles.{role.name}.parallel.tp", text, where=where, fix=fix))
    return errors


def _domain_devices(pool: Pool, nodes: tuple[NodeInventory, ...], profile: DeviceProfile | None) -> int | None:
    if not nodes or nodes[0].virtual:
        return None
    largest = max(len(node.devices) for node in nodes)
    if pool.domain is not None and pool.domain.kind == "fabric":
        return largest * pool.domain.segment_nodes
    known = None if profile is None else profile.domain_devices
    return max(known or 0, largest)


def check_model(roles: Iterable[ResolvedRole], model: ModelShape, tree: Node) -> list[VimeError]:
    """E205: every axis must divide what it splits."""
    return [error for role in roles if not role.endpoints for error in _check_role_model(role, model, tree)]


def _check_role_model(role: ResolvedRole, model: ModelShape, tree: Node) -> Iterator[VimeError]:
    axes = role.parallel
    splits = [("tp", axes.tp, "attention heads", model.heads)]
    if axes.tp <= model.kv_heads:
        splits.append(("tp", axes.tp, "key-value heads", model.kv_heads))
    elif axes.tp % model.kv_heads and model.heads % axes.tp == 0:
        yield _not_split(role, "tp", f"tp {axes.tp} is not a multiple of {model.kv_heads} key-value heads", model.heads, tree)
    if model.ffn and not model.experts:
        splits.append(("tp", axes.tp, "feed-forward width", model.ffn))
    if role.kind == "train":
        splits.append(("pp", axes.pp, "layers", model.layers))
    elif axes.pp > model.layers:
        yield _not_split(role, "pp", f"pp {axes.pp} is more than {model.layers} layers", model.layers, tree)
    if axes.ep > 1 and not model.experts:
        yield _not_split(role, "ep", f"ep {axes.ep}, but the model has no experts", 1, tree)
    elif model.experts:
        splits.append(("ep", axes.ep, "experts", model.experts))
    for axis, size, what, total in splits:
        if total % size:
            yield _not_split(role, axis, f"{axis} {size} does not divide {total} {what}", total, tree)


def _not_split(role: ResolvedRole, axis: str, text: str, total: int, tree: Node) -> TopologyError:
    size = getattr(role.parallel, axis)
    near = " or ".join(str(d) for d in _near_divisors(total, size)) or "1"
    where = place_of(tree, "roles", role.name, "parallel", axis)
    return rule_error("E205", f"roles.{role.name}.parallel.{axis}", text, where=where, fix=f"use {axis} {near}")
