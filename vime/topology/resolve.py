"""Fills in every number of a role: pool, task, devices, axes, engines. Roles that break a rule are left out and reported."""

from __future__ import annotations

import math
from dataclasses import replace
from urllib.parse import urlsplit

from vime.errors import TopologyError, VimeError
from vime.facts.process import Parallel
from vime.topology.model import EXTERNAL, MAX_DEVICES, Axes, Role, Topology
from vime.topology.rules import ResolvedRole, near_divisors, nearest_multiples, place_of, rule_error, several
from vime.yamltree import Node, did_you_mean

TASKS = {"actor": "actor", "critic": "critic", "reference": "reference", "ref": "reference", "teacher": "teacher"}
"""What a training role does where only its name says it."""

TRAINED = ("actor", "critic")


def resolve_roles(topology: Topology, tree: Node) -> tuple[tuple[ResolvedRole, ...], list[VimeError]]:
    """Every role with its numbers, and what is wrong with the others."""
    roles: list[ResolvedRole] = []
    errors: list[VimeError] = []
    for name in topology.roles:
        try:
            roles.append(_resolve(name, topology, tree))
        except TopologyError as error:
            errors.append(error)
    return tuple(roles), errors + _check_stages(topology, tree)


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
    keys = {"pool", "devices", "parallel", "engines"} - given
    if role.kind == "rollout" and given & {"engines", "parallel"}:
        keys.discard("devices")
    return role.model_copy(update={key: getattr(model, key) for key in keys})


def _pool_name(name: str, role: Role, topology: Topology, tree: Node) -> str:
    if role.endpoints and role.pool in (None, EXTERNAL):
        return EXTERNAL
    if role.pool is None:
        if len(topology.pools) == 1:
            return next(iter(topology.pools))
        text = f"{len(topology.pools)} pools are there and none is named"
        fix = f"write `pool:` with one of {', '.join(topology.pools)}"
        raise rule_error("E104", f"roles.{name}.pool", text, where=place_of(tree, "roles", name), fix=fix)
    if role.pool not in topology.pools:
        where, fix = place_of(tree, "roles", name, "pool"), did_you_mean(role.pool, topology.pools, what="pools")
        if role.pool == EXTERNAL and role.kind == "rollout":
            fix = "write `endpoints:` with the URLs of the engines, or a pool of your own"
        raise rule_error("E104", f"roles.{name}.pool", f"no pool is called {role.pool!r}", where=where, fix=fix)
    return role.pool


def _refuse(name: str, tree: Node, broken: bool, key: str, text: str) -> None:
    if broken:
        where = place_of(tree, "roles", name, key)
        raise rule_error("E103", f"roles.{name}.{key}", text, where=where, fix="remove it")


# ---- training


def _resolve_train(name: str, role: Role, tree: Node) -> ResolvedRole:
    _refuse(name, tree, role.engines != 1, "engines", "a training role has no engines")
    _refuse(name, tree, bool(role.endpoints), "endpoints", "endpoints belong to rollout roles")
    _refuse(name, tree, role.stage is not None, "stage", "stages belong to rollout roles")
    task, trained = _task(name, role, tree)
    axes = role.parallel
    replica = axes.tp * axes.pp * axes.cp
    least = axes.pp * math.lcm(axes.tp * axes.cp, axes.ep * axes.etp) if axes.dp is None else replica * axes.dp
    devices = role.devices if isinstance(role.devices, int) else (least if role.devices else replica * (axes.dp or 1))
    if devices <= MAX_DEVICES:
        _check_train(name, axes, devices, tree)
    parallel = Parallel(axes.tp, axes.pp, axes.cp, axes.ep, axes.etp, devices // replica, axes.vpp)
    return ResolvedRole(name, "train", "", parallel, 1, devices, trained, task=task)


def _check_train(name: str, axes: Axes, devices: int, tree: Node) -> None:
    """E202 and E203."""
    path, replica = f"roles.{name}", axes.tp * axes.pp * axes.cp
    product = f"tp {axes.tp} x pp {axes.pp} x cp {axes.cp} = {replica}"
    if devices % replica:
        text = f"{devices} devices are not a multiple of {product}"
        where, fix = place_of(tree, "roles", name, "devices"), f"use {nearest_multiples(devices, replica)} devices"
        raise rule_error("E202", f"{path}.devices", text, where=where, fix=fix)
    if axes.dp is not None and axes.dp != devices // replica:
        text = f"{devices} devices / ({product}) leave dp {devices // replica}, but dp {axes.dp} is written"
        fix = f"remove dp, or use {replica * axes.dp} devices"
        raise rule_error("E202", f"{path}.parallel.dp", text, where=place_of(tree, "roles", name, "parallel", "dp"), fix=fix)
    if axes.vpp > 1 and axes.pp == 1:
        text, where = f"vpp {axes.vpp} cuts pipeline stages, but pp is 1", place_of(tree, "roles", name, "parallel", "vpp")
        raise rule_error("E103", f"{path}.parallel.vpp", text, where=where, fix="remove vpp, or use pp 2 or more")
    beside, experts = devices // axes.pp, axes.ep * axes.etp
    if beside % experts:
        text = f"ep {axes.ep} x etp {axes.etp} = {experts} does not divide {devices} devices / pp {axes.pp} = {beside}"
        fix = f"use ep x etp of {' or '.join(str(d) for d in near_divisors(beside, experts))}"
        raise rule_error("E203", f"{path}.parallel", text, where=place_of(tree, "roles", name, "parallel", "ep"), fix=fix)


def _task(name: str, role: Role, tree: Node) -> tuple[str, bool]:
    """What a training role does, and whether it is trained. An unknown name is an actor, or a reference where it is frozen."""
    task = role.task or TASKS.get(name) or ("reference" if role.optimizer is False else "actor")
    trained = task in TRAINED if role.optimizer is None else role.optimizer
    if trained != (task in TRAINED):
        text = f"a {task} is trained, so it has an optimizer" if task in TRAINED else f"a {task} is frozen"
        where, fix = place_of(tree, "roles", name, "optimizer"), "remove `optimizer`, or write another `task`"
        raise rule_error("E103", f"roles.{name}.optimizer", text, where=where, fix=fix)
    return task, trained


# ---- engines


def _resolve_rollout(name: str, role: Role, tree: Node) -> ResolvedRole:
    _refuse(name, tree, role.task is not None, "task", "tasks belong to training roles")
    _refuse(name, tree, role.optimizer is not None, "optimizer", "an engine has no optimizer")
    kinds = _kinds(name, role, tree)
    engines, axes = sum(count for count, _ in kinds), kinds[0][1]
    if role.endpoints:
        _check_endpoints(name, role, tree)
        return ResolvedRole(name, "rollout", "", axes, len(role.endpoints), 0, False, role.stage, role.endpoints)
    needed = sum(count * parallel.devices for count, parallel in kinds)
    devices = role.devices if isinstance(role.devices, int) else needed
    if devices != needed:
        raise _unequal(name, kinds, devices, tree)
    groups = kinds if len({parallel for _, parallel in kinds}) > 1 else ()
    return ResolvedRole(name, "rollout", "", axes, engines, devices, False, role.stage, groups=groups)


def _kinds(name: str, role: Role, tree: Node) -> tuple[tuple[int, Parallel], ...]:
    """(how many engines, axes of each), in file order."""
    if not isinstance(role.engines, tuple):
        return ((role.engines, _engine_axes(name, ("parallel",), role.parallel, tree)),)
    found: list[tuple[int, Parallel]] = []
    for index, group in enumerate(role.engines):
        given = group.parallel is not None
        path: tuple[str | int, ...] = ("engines", index, "parallel") if given else ("parallel",)
        found.append((group.count, _engine_axes(name, path, group.parallel or role.parallel, tree)))
    return tuple(found)


def _engine_axes(name: str, at: tuple[str | int, ...], axes: Axes, tree: Node) -> Parallel:
    """The axes of one engine. Raises E103 for an axis that engines lack, E203 for experts over a part of it."""
    path, dp = f"roles.{name}.{'.'.join(map(str, at))}", axes.dp or 1
    for axis in ("cp", "etp", "vpp"):
        if getattr(axes, axis) != 1:
            where = place_of(tree, "roles", name, *at, axis)
            raise rule_error("E103", f"{path}.{axis}", f"an engine has no {axis} axis", where=where, fix="remove it")
    if axes.ep not in (1, axes.tp * dp):
        text = f"an engine spreads experts over tp {axes.tp} x dp {dp} = {axes.tp * dp} devices or none, not over {axes.ep}"
        where = place_of(tree, "roles", name, *at, "ep")
        raise rule_error("E203", f"{path}.ep", text, where=where, fix=f"use ep 1 or ep {axes.tp * dp}")
    return Parallel(axes.tp, axes.pp, 1, axes.ep, 1, dp)


def _unequal(name: str, kinds: tuple[tuple[int, Parallel], ...], devices: int, tree: Node) -> TopologyError:
    """E206: what the engines need is not what the role says."""
    needed = sum(count * axes.devices for count, axes in kinds)
    terms = [f"{several(n, 'engine')} x (tp {a.tp} x pp {a.pp} x dp {a.dp} = {a.devices})" for n, a in kinds]
    text = f"{' + '.join(terms)} = {needed}, but devices says {devices}"
    fix, each = f"use devices {needed}", kinds[0][1].devices
    if len(kinds) == 1 and devices % each == 0:
        fix += f", or engines {devices // each}"
    return rule_error("E206", f"roles.{name}.devices", text, where=place_of(tree, "roles", name, "devices"), fix=fix)


def _check_endpoints(name: str, role: Role, tree: Node) -> None:
    """E103 for what is no URL, is named twice, or goes with engines that vime would start."""
    for index, text in enumerate(role.endpoints):
        where, path = place_of(tree, "roles", name, "endpoints", index), f"roles.{name}.endpoints.{index}"
        if not _is_url(text):
            what = f"expected a URL such as http://10.0.0.5:8000, got {text!r}"
            raise rule_error("E103", path, what, where=where, fix="write http://HOST:PORT")
        if text in role.endpoints[:index]:
            raise rule_error("E103", path, f"{text} is named twice", where=where, fix="name each engine once")
    counted = isinstance(role.engines, tuple) or role.engines not in (1, len(role.endpoints))
    _refuse(name, tree, counted, "engines", f"the endpoints name {several(len(role.endpoints), 'engine')}")
    _refuse(name, tree, role.devices is not None, "devices", "engines that run already take no devices")


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def _check_stages(topology: Topology, tree: Node) -> list[VimeError]:
    """E104 for half of a split engine whose other half no role is."""
    stages = {role.stage for role in topology.roles.values() if role.stage is not None}
    if len(stages) != 1:
        return []
    (stage,) = stages
    other = "decode" if stage == "prefill" else "prefill"
    names = [name for name, role in topology.roles.items() if role.stage == stage]
    where, fix = place_of(tree, "roles", names[0], "stage"), f"add a role with `stage: {other}`, or remove `stage`"
    return [rule_error("E104", f"roles.{names[0]}.stage", f"no role has stage {other}", where=where, fix=fix)]
