"""Reads a topology by shipped name, path or inline mapping, with file and line for everything it may have to say."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from vime.errors import Errors, TopologyError, VimeError
from vime.topology.domains import check_segments, num_nodes
from vime.topology.findings import describe_validation
from vime.topology.model import EXTERNAL, SCHEMA, Topology
from vime.topology.resolve import resolve_roles
from vime.topology.rules import ResolvedRole, place_of, raise_all, rule_error, several
from vime.topology.sharing import check_shares
from vime.topology.structure import fields_at, homes_of
from vime.yamltree import (
    Entries,
    Items,
    Node,
    Scalar,
    Value,
    Where,
    did_you_mean,
    find,
    from_value,
    get,
    parse,
    plain,
    quoted,
    read,
    replace_at,
)

_TOPOLOGY_FILES = "topology_files"


@dataclass(frozen=True)
class LoadedTopology:
    """A checked topology, its nodes for messages, and its roles with every number filled in.

    `notes` are what the rules say and go on.
    """

    topology: Topology
    tree: Node
    roles: tuple[ResolvedRole, ...]
    source: str
    notes: tuple[str, ...] = ()

    def where(self, *path: str | int) -> str:
        """`file:line` of a key path, or of its nearest parent that is written."""
        return str(find(self.tree, path)[1])

    def platforms(self) -> tuple[str, ...]:
        """Platform names of the pools, each once, in file order; `auto` where none is chosen yet."""
        return tuple(dict.fromkeys(pool.platform for pool in self.topology.pools.values()))


def shipped_names() -> tuple[str, ...]:
    """Names of the topologies that come with vime."""
    folder = resources.files("vime").joinpath(_TOPOLOGY_FILES)
    return tuple(sorted(f.name.removesuffix(".yaml") for f in folder.iterdir() if f.name.endswith(".yaml")))


def shipped_text(name: str) -> str:
    """The file of a shipped topology. Raises TopologyError E104 for an unknown name."""
    if name not in shipped_names():
        what = f"E104 no topology is called {name!r}"
        raise TopologyError(
            what, fix=did_you_mean(name, shipped_names(), what="topologies") + " (a path contains a / or ends in .yaml)"
        )
    return resources.files("vime").joinpath(_TOPOLOGY_FILES, f"{name}.yaml").read_text(encoding="utf-8")


def load_topology(source: str | Path | Mapping[str, Any] | Node, *, platform: str = "auto") -> LoadedTopology:
    """Read and check a topology.

    Args:
        source: a shipped name, a path (it contains `/` or ends in .yaml), a mapping, or the node of an inline topology.
        platform: fills pools that say `platform: auto`; `auto` leaves them for discovery.

    Raises:
        TopologyError or Errors: everything that is wrong, each with rule id, file and line.
    """
    tree, name = _tree(source)
    if not isinstance(tree, Entries):
        raise TopologyError(
            "E103 a topology is a mapping", where=str(tree.where), fix="start with `schema:`, `pools:`, `roles:`"
        )
    topology = _validate(tree)
    roles, errors = resolve_roles(topology, tree)
    segments = check_segments(topology, tree)
    raise_all([*errors, *check_shares(topology, roles, tree), *_check_pools(topology, tree), *segments.errors])
    return fill_platform(LoadedTopology(topology, tree, roles, name, tuple(segments.notes)), platform)


def _check_pools(topology: Topology, tree: Node) -> list[VimeError]:
    """Pool names that mean something else, and lists of hosts that are too short or name one twice."""
    errors: list[VimeError] = []
    for name, pool in topology.pools.items():
        where = place_of(tree, "pools", name)
        if name == EXTERNAL:
            text = "this name is for engines that run already (`endpoints`)"
            errors.append(rule_error("E103", f"pools.{name}", text, where=where, fix="give the pool another name"))
        hosts, path = pool.select.hosts, f"pools.{name}.select.hosts"
        where = place_of(tree, "pools", name, "select", "hosts")
        twice = next((host for host in hosts if hosts.count(host) > 1), None)
        if twice is not None:
            errors.append(rule_error("E103", path, f"{twice} is named twice", where=where, fix="name each host once"))
        elif hosts and len(hosts) < num_nodes(pool):
            text = f"{several(num_nodes(pool), 'node')} asked for, {several(len(hosts), 'host')} named"
            errors.append(rule_error("E201", path, text, where=where, fix=f"name more hosts, or write nodes {len(hosts)}"))
    return errors


def fill_platform(loaded: LoadedTopology, platform: str) -> LoadedTopology:
    """Give `platform` to pools that say auto. Raises TopologyError E105 where a pool pins another platform."""
    if platform == "auto":
        return loaded
    pools, errors = {}, []
    for name, pool in loaded.topology.pools.items():
        if pool.platform not in ("auto", platform):
            what = f"E105 pools.{name}.platform: {pool.platform} is pinned here, but {platform} was asked for"
            where = loaded.where("pools", name, "platform")
            fix = "leave --platform out, or choose a topology for any platform (--topology colocate or disaggregated)"
            errors.append(TopologyError(what, where=where, fix=fix))
        pools[name] = pool.model_copy(update={"platform": platform})
    raise_all(errors)
    return replace(loaded, topology=loaded.topology.model_copy(update={"pools": pools}))


def fill_device(loaded: LoadedTopology, device: str | None, known: Mapping[str, Collection[str]]) -> LoadedTopology:
    """Give `device` to pools that name none and whose platform knows it; `known` are nominal devices by pool.

    Raises TopologyError E104 where no pool can take it.
    """
    if device is None:
        return loaded
    free = [name for name, pool in loaded.topology.pools.items() if pool.device is None]
    takers = [name for name in free if device in known[name]]
    if not takers:
        names = sorted({kind for name in free for kind in known[name]})
        pinned = "every pool names its own" if not free else did_you_mean(device, names, what="devices")
        raise TopologyError(f"E104 no pool can take the device {device!r}", where=loaded.where("pools"), fix=pinned)
    pools = {
        name: pool.model_copy(update={"device": device}) if name in takers else pool
        for name, pool in loaded.topology.pools.items()
    }
    return replace(loaded, topology=loaded.topology.model_copy(update={"pools": pools}))


def fill_parts(loaded: LoadedTopology, supply: Mapping[str, int]) -> LoadedTopology:
    """Fill in roles that take a part of their pool. `supply` are devices by pool.

    Raises TopologyError or Errors: E201 for half of an odd number, E206 for engines that do not divide their devices, and
    whatever the numbers then break.
    """
    if not any(role.part for role in loaded.roles):
        return loaded
    roles = dict(loaded.topology.roles)
    errors: list[VimeError] = []
    for role in loaded.roles:
        if role.part is None:
            continue
        devices, left = divmod(supply[role.pool], 1 if role.part == "all" else 2)
        update: dict[str, int] = {"devices": devices}
        where, path = loaded.where("roles", role.name, "devices"), f"roles.{role.name}.devices"
        if left or devices == 0:
            text = f"{role.part} of {supply[role.pool]} devices of pool {role.pool} is no whole number of them"
            errors.append(rule_error("E201", path, text, where=where, fix="write numbers of devices"))
            continue
        if role.kind == "rollout" and not role.groups:
            each = role.devices_per_engine
            if devices % each:
                text = f"{devices} devices ({role.part} of pool {role.pool}) are not a multiple of an engine's {each}"
                errors.append(rule_error("E206", path, text, where=where, fix="write another tp, or numbers of devices"))
                continue
            if "engines" not in roles[role.name].model_fields_set:
                update["engines"] = devices // each
        roles[role.name] = roles[role.name].model_copy(update=update)
    topology = loaded.topology.model_copy(update={"roles": roles})
    filled, more = resolve_roles(topology, loaded.tree)
    raise_all([*errors, *(more or check_shares(topology, filled, loaded.tree))])
    return replace(loaded, topology=topology, roles=filled)


def _tree(source: str | Path | Mapping[str, Any] | Node) -> tuple[Node, str]:
    if isinstance(source, Scalar | Value | Items | Entries):
        return source, "inline"
    if isinstance(source, Mapping):
        return from_value(source, Where("inline topology")), "inline"
    if isinstance(source, Path) or "/" in source or source.endswith((".yaml", ".yml")):
        return _read(Path(source)), str(source)
    return parse(shipped_text(source), f"{source}.yaml", error=TopologyError), source


def _read(path: Path) -> Node:
    """The file's nodes. Raises TopologyError or Errors, E106."""
    try:
        return read(path, error=TopologyError)
    except VimeError as cause:
        found = cause.errors if isinstance(cause, Errors) else (cause,)
    raise_all([TopologyError(f"E106 {error.what}", where=error.where, fix=error.fix) for error in found])
    raise AssertionError("an error without errors")


def _validate(tree: Entries) -> Topology:
    schema = get(tree, ("schema",))
    if schema is not None and plain(schema) != SCHEMA:
        what = f"E101 schema: {plain(schema)!r} is not known; this vime reads {SCHEMA}"
        raise TopologyError(what, where=str(tree.keys.get("schema", tree.where)), fix=f"write `schema: {SCHEMA}`")
    try:
        return Topology.model_validate(plain(with_text_environment(tree, ("env",))))
    except ValidationError as invalid:
        found = describe_validation(invalid, tree, _suggest)
    errors: list[VimeError] = []
    for finding in found:
        rule = "E102" if finding.what.startswith("unknown key") else "E103"
        errors.append(TopologyError(f"{rule} {finding.what}", where=finding.where, fix=finding.fix))
    raise errors[0] if len(errors) == 1 else Errors(errors)


def with_text_environment(tree: Node, path: tuple[str, ...]) -> Node:
    """Environment variables are text, whatever they look like: `A: 010` and `A: on` need no quotes."""
    environment = get(tree, path)
    return tree if environment is None else replace_at(tree, path, quoted(environment))


def _suggest(parents: tuple[str | int, ...], key: str) -> tuple[list[str], list[str]]:
    return fields_at(Topology, parents), homes_of(Topology, key)
