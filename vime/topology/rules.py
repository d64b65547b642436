"""The rules of a topology by id, and those about hardware and model.

Every message has the rule's id, the line, the numbers and the nearest valid values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from vime.errors import Errors, TopologyError, VimeError
from vime.facts.inventory import DeviceProfile, NodeInventory
from vime.facts.model import ModelShape
from vime.facts.process import Parallel
from vime.topology.model import Pool
from vime.yamltree import Node, find

RULES: Mapping[str, str] = {
    "E101": "the schema version is not known",
    "E102": "unknown key",
    "E103": "a value has the wrong type or unit, or is missing",
    "E104": "a name refers to nothing",
    "E105": "a pool pins another platform than the one asked for",
    "E106": "the file cannot be read as YAML",
    "E201": "roles need more devices than a pool has",
    "E202": "devices are not a multiple of tp x pp x cp",
    "E203": "ep x etp does not divide what is left beside pp",
    "E204": "a tensor-parallel group is larger than a scale-up domain",
    "E205": "a parallel size does not divide the model",
    "E206": "engines x devices of an engine is not the role's number of devices",
    "E207": "devices that belong together do not fit between the ends of nodes",
    "E211": "a written size is not what the hardware has",
    "E212": "a training role would sit on a part of a device",
    "E213": "a role would sit on a device that is not healthy",
    "E214": "a pool's platform lacks the type of the run",
    "E221": "a group crosses segments, or segments are not whole, where the pool is strict",
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
    "E273": "nodes of a pool have different processor architectures",
    "E291": "the machines are not joined as the pool says",
    "E301": "a run cannot start what the topology asks for",
}
"""Ids of errors."""

NOTES: Mapping[str, str] = {
    "W222": "a group crosses segments, or segments are not whole, where the pool only prefers them",
    "W223": "a communicator holds more ranks of a fabric domain than its platform knows to work",
    "W253": "device memory is nearly full",
    "W281": "the plan was made from nominal devices",
    "W291": "the machines may not be joined as the pool says, or have different drivers",
    "W302": "rollout workers are too few or too many for what they drive",
}
"""Ids of notes: what a plan says and goes on."""


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
    task: str = "actor"
    groups: tuple[tuple[int, Parallel], ...] = ()
    """(how many engines, axes of each) where the engines of a role differ; empty where all are like `parallel`."""

    @property
    def devices_per_engine(self) -> int:
        """Devices of one engine; of the whole role for a training role."""
        return self.devices // self.engines if self.engines else 0

    @property
    def sizes(self) -> tuple[Parallel, ...]:
        """The axes of every kind of engine, each once; of the role where there is one kind."""
        return tuple(dict.fromkeys(axes for _, axes in self.groups)) or (self.parallel,)

    @property
    def told(self) -> str:
        """How the devices come about: `2 engines x 4`, or `1 x 8 + 2 x 4 engines`."""
        if self.groups:
            return " + ".join(f"{count} x {axes.devices}" for count, axes in self.groups) + " engines"
        return f"{several(self.engines, 'engine')} x {self.devices_per_engine}"


def rule_error(rule: str, path: str, text: str, *, where: str | None, fix: str) -> TopologyError:
    """`E2xx path: text`, at its line, with the next step."""
    return TopologyError(f"{rule} {path}: {text}", where=where, fix=fix)


def raise_all(errors: Sequence[VimeError]) -> None:
    """Raise one error as it is, several as `Errors`, none not at all."""
    if errors:
        raise errors[0] if len(errors) == 1 else Errors(errors)


def place_of(tree: Node, *path: str | int) -> str:
    """Where a key path stands."""
    return str(find(tree, path)[1])


def several(count: int, word: str) -> str:
    """`1 node`, `2 nodes`."""
    return f"{count} {word}" + ("" if count == 1 else "s")


def nearest_multiples(number: int, unit: int) -> str:
    """`4 or 8`: the multiples of `unit` around `number`, none below one unit."""
    below = number // unit * unit
    return f"{below} or {below + unit}" if below else str(unit)


def near_divisors(total: int, wanted: int) -> tuple[int, ...]:
    """The divisors of `total` next below and next above `wanted`."""
    divisors = [d for d in range(1, total + 1) if total % d == 0]
    return (*[d for d in divisors if d < wanted][-1:], *[d for d in divisors if d > wanted][:1])


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
    errors: list[VimeError] = [*_check_sizes(at, tree), *_check_segment(at, tree)]
    domain = _domain_devices(at.pool, at.nodes, at.profile)
    for role in roles:
        largest = max(axes.tp for axes in role.sizes)
        if role.pool == at.name and not role.endpoints and domain is not None and largest > domain:
            text = f"tp {largest} is larger than a scale-up domain of {domain} devices"
            where = place_of(tree, "roles", role.name, "parallel", "tp")
            fix = f"use tp {domain} at most, and pp for the rest"
            errors.append(rule_error("E204", f"roles.{role.name}.parallel.tp", text, where=where, fix=fix))
    return errors


def _check_sizes(at: PoolNodes, tree: Node) -> Iterator[TopologyError]:
    """E211 for the first node that has other devices than the file says: one number for all, or a list for uneven nodes."""
    if not at.nodes or at.nodes[0].virtual:
        return
    expected = None if at.profile is None else at.profile.devices_per_node
    written, key = at.pool.devices_per_node, "devices_per_node"
    listed = [written] * len(at.nodes) if written is not None else []
    if isinstance(at.pool.nodes, tuple):
        listed, key = [group.devices for group in at.pool.nodes for _ in range(group.count)], "nodes"
        if expected is not None:
            listed = [wrote if wrote > expected else expected for wrote in listed]
    for wrote, node in zip(listed, at.nodes, strict=False):
        has = expected if expected is not None else len(node.devices)
        if wrote != has:
            kind = f"one {at.profile.name} node" if at.profile else f"{node.hostname} ({node.platform})"
            text = f"expected {has}, you wrote {wrote}: {kind} has {has} devices"
            where = place_of(tree, "pools", at.name, key)
            yield rule_error("E211", f"pools.{at.name}.{key}", text, where=where, fix=f"write {has}")
            return


def _check_segment(at: PoolNodes, tree: Node) -> Iterator[TopologyError]:
    """E211 for segments of more nodes than a nominal device's domain has."""
    domain, profile = at.pool.domain, at.profile
    if domain is None or domain.kind != "fabric" or profile is None:
        return
    if profile.domain_devices is None or profile.devices_per_node is None:
        return
    nodes = max(profile.domain_devices // profile.devices_per_node, 1)
    if domain.segment_nodes > nodes:
        text = (
            f"expected {nodes} at most, you wrote {domain.segment_nodes}: a scale-up domain of {profile.name} has "
            f"{profile.domain_devices} devices, {profile.devices_per_node} a node"
        )
        where = place_of(tree, "pools", at.name, "domain", "segment_nodes")
        yield rule_error("E211", f"pools.{at.name}.domain.segment_nodes", text, where=where, fix=f"write {nodes}, or less")


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
    running = [role for role in roles if not role.endpoints]
    kinds = [replace(role, parallel=axes) for role in running for axes in role.sizes]
    return [error for kind in kinds for error in _check_role_model(kind, model, tree)]


def _check_role_model(role: ResolvedRole, model: ModelShape, tree: Node) -> Iterator[VimeError]:
    axes = role.parallel
    splits = [("tp", axes.tp, "attention heads", model.heads)]
    if axes.tp <= model.kv_heads:
        splits.append(("tp", axes.tp, "key-value heads", model.kv_heads))
    elif axes.tp % model.kv_heads and model.heads % axes.tp == 0:
        yield _not_split(role, "tp", f"tp {axes.tp} is not a multiple of {model.kv_heads} key-value heads", model.heads, tree)
    if model.ffn:
        splits.append(("tp", axes.tp, "feed-forward width", model.ffn))
    if role.kind == "train":
        if (latent := model.latent) is not None:
            splits.append(("tp", axes.tp, "entries of the compressed key", latent.kv_rank + latent.rotary))
            splits.append(("tp", axes.tp, "entries of the compressed query", latent.q_rank))
        splits.append(("pp", axes.pp, "layers", model.layers))
        if axes.vpp > 1 and model.layers % axes.pp == 0:
            splits.append(("vpp", axes.vpp, "layers of a pipeline stage", model.layers // axes.pp))
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
    near = " or ".join(str(d) for d in near_divisors(total, size)) or "1"
    where = place_of(tree, "roles", role.name, "parallel", axis)
    return rule_error("E205", f"roles.{role.name}.parallel.{axis}", text, where=where, fix=f"use {axis} {near}")
