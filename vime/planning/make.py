"""Makes the plan of a run from a topology, a model and what the platforms answer. Pure: the same answers, the same plan.

Hooks are asked in this order: inventory (or a nominal device) -> binding, capabilities -> rates -> placement -> transports,
memory and sleep once for every residency that comes into question -> decision -> collective, environment, defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from vime.errors import PlanError, TopologyError
from vime.facts.bindings import RayBinding
from vime.facts.inventory import NodeInventory
from vime.facts.model import ModelShape
from vime.facts.process import Slot
from vime.planning.ask import Asker
from vime.planning.decide import decide
from vime.planning.finish import Rest, finish
from vime.planning.masks import mask_entries, visible_node
from vime.planning.needs import PlanNeeds, model_of
from vime.planning.place import demand_for, place
from vime.planning.plan import Plan, PlatformAnswers, PoolPlan
from vime.planning.rates import check_yours, with_yours
from vime.planning.seats import Run, residencies, seat_all
from vime.planning.spread import spread_experts
from vime.planning.workers import check_workers
from vime.topology.devices import check_devices
from vime.topology.domains import Told, check_crossing
from vime.topology.load import LoadedTopology, fill_parts
from vime.topology.machines import check_machines
from vime.topology.profiles import choose_profile, nominal_nodes, real_nodes
from vime.topology.rules import PoolNodes, check_hardware, check_model, raise_all, rule_error
from vime.topology.runnable import Asked, check_pools, runnable_roles
from vime.topology.sharing import check_supply, demand_of, share_groups

Inventories = Mapping[str, tuple[NodeInventory, ...]]


@dataclass(frozen=True, slots=True)
class Here:
    """The environment that processes inherit, and the pools whose nodes were looked at: this machine, or those of a cluster.

    `hosts` are the environments of a cluster's nodes, by host name.
    """

    env: Mapping[str, str] = field(default_factory=dict)
    pools: frozenset[str] = frozenset()
    hosts: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def env_on(self, node: NodeInventory) -> Mapping[str, str]:
        """What processes on a node inherit."""
        return self.hosts.get(node.hostname, self.env)


_NOWHERE = Here()


def make_plan(
    loaded: LoadedTopology,
    *,
    model: ModelShape,
    needs: PlanNeeds,
    platforms: Mapping[str, PlatformAnswers],
    inventories: Inventories | None = None,
    here: Here = _NOWHERE,
) -> Plan:
    """Plan a run.

    Args:
        platforms: by name; every pool's platform must be there.
        inventories: nodes by pool name, where they are known; other pools use their nominal device.
        here: what the processes inherit. Masks of its environment bound the devices of its own pools.

    Raises:
        TopologyError, PlanError, PlacementError or Errors: what does not fit, each with rule, place and arithmetic.
        ConfigError: an engine argument that vime sets itself.
        PluginError: a platform answered wrongly.
    """
    asker = Asker()
    asked = Asked(needs.samples, needs.uses)
    runnable_roles(loaded, asked)
    raise_all(check_pools(loaded))
    nodes = _nodes(loaded, platforms, inventories or {})
    nodes, bindings, notes = _visible(loaded, nodes, platforms, asker, here)
    loaded = fill_parts(loaded, {name: sum(len(node.devices) for node in at.nodes) for name, at in nodes.items()})
    loaded, spread = spread_experts(loaded, nodes, model, needs)
    roles = runnable_roles(loaded, asked)
    told = _checks(loaded, nodes, {role.name: model_of(role, model, needs) for role in loaded.roles})
    raise_all(told.errors)
    pools = _pools(nodes, platforms, asker, (bindings, here))
    dtype = _dtype(loaded, needs, [pools[name] for name in dict.fromkeys(role.pool for role in roles.all)])
    told_by = {name: asker.ask(platforms[pool.platform], "perf_model", pool.inventories[0]) for name, pool in pools.items()}
    perf = {name: with_yours(table, loaded.topology.pools[name].rates) for name, table in told_by.items()}
    slots, crossing = _placement(loaded, pools)
    situation = seat_all(loaded, roles, pools, platforms, Run(model, dtype, needs, slots, perf))
    candidate = decide(situation, asker, residencies(loaded, roles))
    plan = finish(loaded, situation, candidate, asker, Rest(pools, here.env))
    check_yours(loaded, plan.transport)
    notes = (*plan.notes, *notes, *spread, *loaded.notes, *told.notes, *crossing, *check_workers(plan), *_basis(nodes))
    return replace(plan, pools=tuple(pools.values()), perf=perf, hooks_asked=tuple(asker.asked), notes=notes)


def _basis(nodes: Mapping[str, PoolNodes]) -> tuple[str, ...]:
    """W281 for pools that were planned without a look at any machine."""
    nominal = [name for name, at in nodes.items() if at.profile is not None]
    if not nominal:
        return ()
    which = "" if len(nominal) == len(nodes) else f" for pool {' and '.join(nominal)}"
    return (f"W281 made from nominal devices{which}: no machine was looked at",)


# ---- roles and pools


def _nodes(loaded: LoadedTopology, platforms: Mapping[str, PlatformAnswers], inventories: Inventories) -> dict[str, PoolNodes]:
    found: dict[str, PoolNodes] = {}
    for name, pool in loaded.topology.pools.items():
        if pool.platform not in platforms:
            raise _inactive(loaded, name, pool.platform, platforms)
        demand = demand_of(loaded.topology, loaded.roles, name)
        if name in inventories:
            nodes = real_nodes(name, pool, inventories[name], demand=demand, tree=loaded.tree)
            found[name] = PoolNodes(name, pool, nodes)
        else:
            profile = choose_profile(name, pool, platforms[pool.platform].profiles(), loaded.tree)
            nodes = nominal_nodes(name, pool, profile, demand=demand, tree=loaded.tree)
            found[name] = PoolNodes(name, pool, nodes, profile)
    return found


def _inactive(loaded: LoadedTopology, name: str, platform: str, platforms: Mapping[str, PlatformAnswers]) -> TopologyError:
    where = loaded.where("pools", name, "platform")
    if platform == "auto":
        fix = "give --platform NAME, or write the name into the pool"
        return rule_error("E271", f"pools.{name}", "no platform is chosen", where=where, fix=fix)
    active = ", ".join(sorted(platforms)) or "none"
    fix = f"see `vime plugins show {platform}`"
    return rule_error("E271", f"pools.{name}", f"platform {platform} is not active (active: {active})", where=where, fix=fix)


def _visible(
    loaded: LoadedTopology, nodes: dict[str, PoolNodes], platforms: Mapping[str, PlatformAnswers], asker: Asker, here: Here
) -> tuple[dict[str, PoolNodes], dict[str, RayBinding], tuple[str, ...]]:
    """The nodes with the devices that this machine's masks leave, every pool's binding, and what was left out."""
    found, bindings, notes = dict(nodes), dict[str, RayBinding](), []
    for name, at in nodes.items():
        _check_devices_there(loaded, at, ())
        binding: RayBinding = asker.ask(platforms[at.pool.platform], "ray_binding", at.nodes[0])
        bindings[name] = binding
        if name in here.pools:
            left = tuple(visible_node(binding, node, here.env_on(node)) for node in at.nodes)
            for before, after in zip(at.nodes, left, strict=True):
                if len(after.devices) < len(before.devices):
                    counts = f"{len(after.devices)} of {len(before.devices)} devices of {before.hostname}"
                    notes.append(f"{binding.visible_env[0]} leaves {counts}")
            found[name] = replace(at, nodes=left)
            _check_devices_there(loaded, found[name], binding.visible_env)
    return found, bindings, tuple(notes)


def _check_devices_there(loaded: LoadedTopology, at: PoolNodes, masks: tuple[str, ...]) -> None:
    empty = [node.hostname for node in at.nodes if not node.devices]
    if empty:
        whose = "its nodes have" if len(empty) == len(at.nodes) else f"{', '.join(empty)} of its nodes have"
        fix = "look at `vime doctor`" + (f", and at {' and '.join(masks)} in the environment" if masks else "")
        where = loaded.where("pools", at.name)
        raise rule_error("E201", f"pools.{at.name}", f"{whose} no devices", where=where, fix=fix)


def _checks(loaded: LoadedTopology, nodes: Mapping[str, PoolNodes], models: Mapping[str, ModelShape]) -> Told:
    """Every rule that needs hardware or model, and no placement."""
    supply = {name: sum(len(node.devices) for node in at.nodes) for name, at in nodes.items()}
    errors = check_supply(loaded.topology, loaded.roles, supply, loaded.tree)
    for at in nodes.values():
        errors += check_hardware(at, loaded.roles, loaded.tree)
    for role in loaded.roles:
        errors += check_model((role,), models[role.name], loaded.tree)
    return Told(errors) + check_machines(nodes.values(), loaded.tree)


def _pools(
    nodes: Mapping[str, PoolNodes],
    platforms: Mapping[str, PlatformAnswers],
    asker: Asker,
    known: tuple[Mapping[str, RayBinding], Here],
) -> dict[str, PoolPlan]:
    bindings, here = known
    pools: dict[str, PoolPlan] = {}
    for name, at in nodes.items():
        platform = platforms[at.pool.platform]
        capabilities = asker.ask(platform, "capabilities", at.nodes[0])
        pools[name] = PoolPlan(
            name=name,
            platform=at.pool.platform,
            inventories=at.nodes,
            capabilities=capabilities,
            binding=bindings[name],
            lineage=platform.lineage,
            entries=tuple(
                mask_entries(bindings[name], node, here.env_on(node) if name in here.pools else {}) for node in at.nodes
            ),
            segment_nodes=_segment_nodes(at),
        )
    return pools


def _segment_nodes(at: PoolNodes) -> int:
    domain = at.pool.domain
    return len(at.nodes) if domain is None else domain.segment_nodes


def _dtype(loaded: LoadedTopology, needs: PlanNeeds, pools: list[PoolPlan]) -> str:
    """The type of all roles. Raises PlanError E214 where a pool lacks it."""
    dtype = needs.dtype or pools[0].capabilities.default_dtype
    for pool in pools:
        if dtype not in pool.capabilities.dtypes:
            able = ", ".join(d for d in pool.capabilities.dtypes if all(d in other.capabilities.dtypes for other in pools))
            reason = pool.capabilities.absent.get(dtype)
            whose = "model.dtype" if needs.dtype else f"the default of pool {pools[0].name}"
            text = f"E214 pools.{pool.name}: {pool.platform} has no {dtype} ({whose})" + (f": {reason}" if reason else "")
            fix = f"set model.dtype to one of {able}" if able else "use pools whose platforms have a type in common"
            raise PlanError(text, where=loaded.where("pools", pool.name), fix=fix)
    return dtype


# ---- placement


def _placement(loaded: LoadedTopology, pools: Mapping[str, PoolPlan]) -> tuple[dict[str, tuple[Slot, ...]], tuple[str, ...]]:
    """Slots by role name, on devices that each role may use, and notes about groups that cross domains."""
    slots: dict[str, tuple[Slot, ...]] = {}
    groups = share_groups(loaded.topology, loaded.roles)
    for name, pool in pools.items():
        mine = [group for group in groups if group[0].pool == name]
        demands = [demand_for(group) for group in mine]
        placed = place([len(node.devices) for node in pool.inventories], demands, pool=name, where=loaded.where("pools", name))
        for group, demand in zip(mine, demands, strict=True):
            slots |= {role.name: placed[demand.name] for role in group}
    told = Told()
    for role in loaded.roles:
        if role.name in slots:
            nodes, where, pool = (
                pools[role.pool].inventories,
                loaded.where("roles", role.name),
                loaded.topology.pools[role.pool],
            )
            told.errors.extend(check_devices(role, slots[role.name], nodes, where=where))
            told += check_crossing(role, slots[role.name], pool, nodes, loaded.tree)
    raise_all(told.errors)
    return slots, tuple(told.notes)
