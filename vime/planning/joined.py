"""Which nodes of a joined cluster belong to a pool. Pure: what every node offers in, nodes in physical order out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from vime.errors import PlanError
from vime.facts.bindings import RayBinding
from vime.facts.inventory import NodeInventory
from vime.planning.masks import visible_node
from vime.planning.place import nodes_of, physical_order
from vime.planning.plan import Plan, pool_of
from vime.topology.domains import num_nodes
from vime.topology.load import LoadedTopology
from vime.topology.model import NodeGroup, Pool
from vime.topology.rules import rule_error, several


@dataclass(frozen=True, slots=True)
class Offer:
    """What a node has for one platform: its inventory and binding, or the `problem` that stands against it.

    `resources` and `labels` are the node's in Ray, `env` is what processes on it inherit.
    """

    host: str
    inventory: NodeInventory | None = None
    binding: RayBinding | None = None
    resources: Mapping[str, float] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class _Usable:
    """A node that a pool may take, and how many of its devices Ray gives."""

    node: NodeInventory
    count: int


def choose_nodes(
    loaded: LoadedTopology, offers: Mapping[str, Sequence[Offer]], *, address: str
) -> tuple[LoadedTopology, dict[str, tuple[NodeInventory, ...]]]:
    """Give every pool its nodes, pools in file order, nodes in physical order; no node is in two pools.

    Args:
        offers: of every node of the cluster, by platform.
        address: of the cluster, for the command that starts a node.

    Returns:
        The topology, in which pools of hosts that name no sizes have those that the nodes offer, and nodes by pool.

    Raises TopologyError E201 with what is asked, there and missing, what stands against each node, and the next step.
    """
    taken: set[str] = set()
    found: dict[str, tuple[NodeInventory, ...]] = {}
    pools = dict(loaded.topology.pools)
    for name, pool in pools.items():
        usable, against = _usable(pool, offers[pool.platform], taken)
        chosen = _fitting(pool, usable)
        if len(chosen) < num_nodes(pool):
            raise _too_few(loaded, name, (chosen, usable), against, address=address)
        taken |= {at.node.hostname for at in chosen}
        found[name] = tuple(at.node for at in chosen)
        if all(at.node.virtual for at in chosen) and not isinstance(pool.nodes, tuple) and pool.devices_per_node is None:
            pools[name] = pool.model_copy(update={"nodes": tuple(NodeGroup(devices=at.count) for at in chosen)})
    return replace(loaded, topology=loaded.topology.model_copy(update={"pools": pools})), found


def _usable(pool: Pool, offers: Iterable[Offer], taken: set[str]) -> tuple[list[_Usable], dict[str, str]]:
    """Nodes in physical order, or in that of `select.hosts`; and by host what stands against the others."""
    against: dict[str, str] = {}
    nodes: list[_Usable] = []
    for offer in offers:
        problem = _problem(pool, offer, taken)
        if problem is not None:
            against[offer.host] = problem
        elif offer.inventory is not None and offer.binding is not None:
            nodes.append(_Usable(offer.inventory, int(offer.resources[offer.binding.resource])))
    if pool.select.hosts:
        against |= {host: "is not in the cluster" for host in pool.select.hosts if host not in {o.host for o in offers}}
        return sorted(nodes, key=lambda at: pool.select.hosts.index(at.node.hostname)), against
    segment = pool.domain.segment_nodes if pool.domain is not None else 1
    return [nodes[i] for i in physical_order([at.node for at in nodes], segment)], against


def _problem(pool: Pool, offer: Offer, taken: set[str]) -> str | None:
    """Why a pool cannot take a node."""
    if pool.select.hosts and offer.host not in pool.select.hosts:
        return "is not one of select.hosts"
    if offer.host in taken:
        return "is in another pool"
    if offer.problem is not None or offer.inventory is None or offer.binding is None:
        return offer.problem or "has no inventory"
    binding, count = offer.binding, offer.resources.get(offer.binding.resource, 0.0)
    if count < 1:
        others = ", ".join(f"{name} {amount:g}" for name, amount in sorted(offer.resources.items())) or "nothing"
        return f"offers no {binding.resource} (it offers {others})"
    for name, value in binding.labels.items():
        if offer.labels.get(name) != value:
            return f"label {name} is {offer.labels.get(name)!r}, not {value!r}"
    try:
        devices = len(visible_node(binding, offer.inventory, offer.env).devices)
    except PlanError as error:
        return error.what
    if not offer.inventory.virtual and count != devices:
        return f"has {several(devices, 'device')}, but Ray counts {count:g} x {binding.resource}"
    return None


def _fitting(pool: Pool, usable: Sequence[_Usable]) -> list[_Usable]:
    """For every size that the pool writes the first node that offers it; the first nodes where it writes none."""
    wanted, left = _sizes(pool), list(usable)
    chosen: list[_Usable] = []
    for size in wanted:
        exact = [at for at in left if at.count == size]
        fits = next(iter(exact or [at for at in left if size is None or (at.count > size and at.node.virtual)]), None)
        if fits is None:
            continue
        left.remove(fits)
        chosen.append(fits)
    return chosen


def _sizes(pool: Pool) -> list[int | None]:
    if isinstance(pool.nodes, tuple):
        return [group.devices for group in pool.nodes for _ in range(group.count)]
    return [pool.devices_per_node] * pool.nodes


def _too_few(
    loaded: LoadedTopology,
    name: str,
    found: tuple[Sequence[_Usable], Sequence[_Usable]],
    against: Mapping[str, str],
    *,
    address: str,
) -> Exception:
    """`found`: the nodes that fit, and all that the pool may use."""
    chosen, usable = found
    pool, asked = loaded.topology.pools[name], _sizes(loaded.topology.pools[name])
    sizes = f" of {', '.join(map(str, asked))} devices" if None not in asked else ""
    text = (
        f"{several(len(asked), 'node')}{sizes} asked for, {len(chosen)} there, {len(asked) - len(chosen)} missing; "
        + ("; ".join(f"{at.node.hostname}: offers {at.count}" for at in usable) or "no node is usable")
        + "".join(f"; {host}: {why}" for host, why in against.items())
    )
    fix = f"on each node that is missing run `vime node start --platform {pool.platform} --address {address}`"
    return rule_error("E201", f"pools.{name}.nodes", text, where=loaded.where("pools", name, "nodes"), fix=fix)


def check_engines(loaded: LoadedTopology, plan: Plan) -> None:
    """Raise PlanError E301 for an engine that would span nodes: its server is started on one."""
    for engine in plan.engines:
        hosts = nodes_of(engine.request.placement.slots)
        if len(hosts) > 1:
            nodes = pool_of(plan.pools, engine.pool).inventories
            role, names = engine.request.role, ", ".join(nodes[node].hostname for node in hosts)
            text = f"E301 roles.{role}.parallel: engine {engine.index} would span {names}; an engine runs on one node"
            where = loaded.where("roles", role, "parallel")
            raise PlanError(text, where=where, fix="use a smaller tp x pp x dp and more engines")
