"""The topology of a run with its platforms, its nodes from wherever they are known, and the plan: one way for all commands."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from vime.cli.prepare import Hardware
from vime.config.load import LoadedConfig
from vime.errors import ConfigError, PlanError
from vime.facts.diagnosis import ProbeContext, Severity
from vime.facts.inventory import NodeInventory
from vime.facts.model import ModelShape
from vime.planning.joined import check_engines
from vime.planning.make import Here, make_plan
from vime.planning.needs import needs_from
from vime.planning.plan import Plan
from vime.planning.routing import check_routing
from vime.planning.updates import check_update
from vime.platforms.discovery import Discovery, discover
from vime.platforms.lineage import Platform
from vime.platforms.policy import AUTO, PluginPolicy
from vime.topology.load import LoadedTopology, fill_device, fill_platform, load_topology
from vime.topology.model import Pool
from vime.topology.profiles import choose_profile, looks_like

if TYPE_CHECKING:
    from vime.cluster.joined import JoinedCluster


@dataclass(frozen=True)
class Layout:
    """A topology with every platform filled in. `notes` are what the search for platforms met.

    `nodes` are those of a joined cluster, by pool.
    """

    topology: LoadedTopology
    platforms: Mapping[str, Platform]
    plugins: Discovery
    notes: tuple[str, ...] = ()
    nodes: Mapping[str, tuple[NodeInventory, ...]] = field(default_factory=dict)


def lay_out(loaded: LoadedConfig, hardware: Hardware) -> Layout:
    """The run's topology and platforms. Raises TopologyError, PluginError."""
    config = loaded.config
    topology = load_topology(loaded.topology_source, platform=config.platform)
    plugins = discover(PluginPolicy.read(platform=config.platform, allow=config.plugins.allow, deny=config.plugins.deny))
    notes: tuple[str, ...] = ()
    if AUTO in topology.platforms():
        if hardware.live and config.cluster.address is not None:
            what = "`platform: auto` looks at one machine, and the run joins a cluster of several"
            raise ConfigError(what, where=loaded.where("platform"), fix="give --platform NAME, that of the cluster's nodes")
        recorded = {recording.platform for recording in hardware.recordings}
        topology = fill_platform(topology, recorded.pop() if len(recorded) == 1 else plugins.detect())
        notes = tuple(check.finding for check in plugins.findings() if check.severity is Severity.WARNING)
    platforms = {name: plugins.platform(name) for name in topology.platforms()}
    pools = topology.topology.pools
    kinds = {name: [p.name for p in platforms[pool.platform].profiles()] for name, pool in pools.items()}
    return Layout(fill_device(topology, hardware.device, kinds), platforms, plugins, notes)


def join(layout: Layout, address: str) -> tuple[Layout, JoinedCluster]:
    """The layout on the nodes of a running cluster, whose hardware is read there.

    Raises PlacementError where no cluster answers, TopologyError where its nodes do not suffice.
    """
    from vime.cluster.joined import look_around
    from vime.planning.joined import choose_nodes

    cluster = look_around(address, layout.platforms, layout.plugins.resolved())
    topology, nodes = choose_nodes(layout.topology, cluster.offers, address=address)
    return replace(layout, topology=topology, nodes=nodes), cluster


def plan_layout(
    loaded: LoadedConfig,
    layout: Layout,
    model: ModelShape,
    hardware: Hardware,
    cluster: JoinedCluster | None = None,
) -> Plan:
    """Plan a laid-out run. Raises what `make_plan`, `check_update` and `check_routing` raise; of a run also the platform's own
    error where hardware is missing.
    """
    env = dict(os.environ)
    if cluster is not None:
        nodes, here = _Nodes(layout.nodes), _there(layout, cluster)
    else:
        nodes = _live_nodes(layout, env) if hardware.live else _paper_nodes(layout, hardware, env)
        here = Here(env, nodes.live)
    plan = make_plan(
        layout.topology,
        model=model,
        needs=needs_from(loaded.config),
        platforms=layout.platforms,
        inventories=nodes.found,
        here=here,
    )
    if cluster is not None:
        check_engines(layout.topology, plan)
    check_update(plan, loaded.config.weights.update, where=loaded.where("weights.update"))
    check_routing(plan, loaded.config.trainer.routing_replay, where=loaded.where)
    return replace(plan, notes=(*plan.notes, *nodes.notes, *layout.notes))


def _there(layout: Layout, cluster: JoinedCluster) -> Here:
    """What processes inherit on the cluster's nodes; of what a whole run has once, the first node is asked."""
    first = next(node for nodes in layout.nodes.values() for node in nodes)
    return Here(cluster.env[first.hostname], frozenset(layout.nodes), cluster.env)


@dataclass(frozen=True)
class _Nodes:
    """Nodes by pool; `live` are the pools whose node is this machine."""

    found: Mapping[str, tuple[NodeInventory, ...]]
    live: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()


def _live_nodes(layout: Layout, env: Mapping[str, str]) -> _Nodes:
    here = {name: platform.inventory(ProbeContext(env)) for name, platform in layout.platforms.items()}
    pools = layout.topology.topology.pools
    for name, node in here.items():
        users = [pool for pool in pools if pools[pool].platform == name]
        if len(users) > 1 and not node.virtual:
            where, fix = layout.topology.where("pools", users[1]), "put the roles into one pool"
            raise PlanError(f"pools {' and '.join(users)} would both use the devices of this machine", where=where, fix=fix)
    return _Nodes({name: (here[pool.platform],) for name, pool in pools.items()}, frozenset(pools))


def _paper_nodes(layout: Layout, hardware: Hardware, env: Mapping[str, str]) -> _Nodes:
    """Recordings first, then this machine, else nothing: the pool's nominal device is taken."""
    found: dict[str, tuple[NodeInventory, ...]] = {}
    live: set[str] = set()
    notes: list[str] = []
    used: set[str] = set()
    for name, pool in layout.topology.topology.pools.items():
        platform = layout.platforms[pool.platform]
        mine = [r for r in hardware.recordings if r.platform in platform.lineage]
        if mine:
            found[name] = tuple(platform.inventory(ProbeContext({}, recording=r.fixture.data)) for r in mine)
            notes += [f"pool {name} is planned from {recording}" for recording in mine]
            used |= {str(recording.path) for recording in mine}
        elif (node := _machine(layout, name, pool, env)) is not None:
            found[name] = (node,)
            live.add(name)
    idle = [recording for recording in hardware.recordings if str(recording.path) not in used]
    if idle:
        what = f"no pool of {layout.topology.topology.name} is of the platform of {' and '.join(map(str, idle))}"
        raise PlanError(what, fix=f"give --platform {idle[0].platform}, or a topology with such a pool")
    return _Nodes(found, frozenset(live), tuple(notes))


def _machine(layout: Layout, name: str, pool: Pool, env: Mapping[str, str]) -> NodeInventory | None:
    """This machine, where it is what a pool of one node asks for."""
    platform, tree = layout.platforms[pool.platform], layout.topology.tree
    profiles = platform.profiles()
    if pool.nodes != 1:
        return None
    if profiles and all(profile.virtual for profile in profiles):
        return platform.inventory(ProbeContext(env)) if pool.device is None else None
    if not any(match.platform == platform.name for match in layout.plugins.probe(platform.name)):
        return None
    node = platform.inventory(ProbeContext(env))
    wanted = pool.device is None or looks_like(node, choose_profile(name, pool, profiles, tree))
    return node if wanted else None
