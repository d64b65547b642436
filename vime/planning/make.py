"""Makes the plan of a run from a topology, a model and what the platforms answer. Pure: the same answers, the same plan.

Hooks are asked in this order: inventory (or a nominal device) -> binding, capabilities -> rates -> placement -> transports,
memory and sleep once for every residency that comes into question -> decision -> collective, environment, defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from vime.errors import PlanError, TopologyError
from vime.facts.bindings import RayBinding
from vime.facts.capabilities import Capabilities
from vime.facts.inventory import NodeInventory
from vime.facts.model import ModelShape
from vime.facts.process import RoleKind, RolePlacement, RoleRequest, Slot
from vime.planning.ask import Asker
from vime.planning.decide import Seat, Situation, decide
from vime.planning.finish import Rest, finish
from vime.planning.masks import mask_entries, visible_node
from vime.planning.memory import PoolSpace
from vime.planning.needs import PlanNeeds
from vime.planning.place import demand_for, engine_slots, place
from vime.planning.plan import Plan, PlatformAnswers, PoolPlan
from vime.planning.spread import spread_experts
from vime.planning.transports import End, Wishes
from vime.topology.devices import check_devices
from vime.topology.domains import Told, check_crossing
from vime.topology.load import LoadedTopology, fill_parts
from vime.topology.machines import check_machines
from vime.topology.profiles import choose_profile, nominal_nodes, real_nodes
from vime.topology.rules import PoolNodes, ResolvedRole, check_hardware, check_model, raise_all, rule_error
from vime.topology.runnable import check_pools, runnable_roles
from vime.topology.sharing import check_supply, demand_of, share_groups

Inventories = Mapping[str, tuple[NodeInventory, ...]]


@dataclass(frozen=True, slots=True)
class Here:
    """The machine that plans: the environment that processes inherit, and the pools whose node it is itself."""

    env: Mapping[str, str] = field(default_factory=dict)
    pools: frozenset[str] = frozenset()


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
    runnable_roles(loaded, samples=needs.samples)
    raise_all(check_pools(loaded))
    nodes = _nodes(loaded, platforms, inventories or {})
    nodes, bindings, notes = _visible(loaded, nodes, platforms, asker, here)
    loaded = fill_parts(loaded, {name: sum(len(node.devices) for node in at.nodes) for name, at in nodes.items()})
    loaded, spread = spread_experts(loaded, nodes, model, needs)
    actor, rollout = runnable_roles(loaded, samples=needs.samples)
    told = _checks(loaded, nodes, model)
    raise_all(told.errors)
    pools = _pools(nodes, platforms, asker, (bindings, here))
    dtype = _dtype(needs, [pools[role.pool] for role in (actor, rollout) if role is not None])
    perf = {name: asker.ask(platforms[pool.platform], "perf_model", pool.inventories[0]) for name, pool in pools.items()}
    slots, crossing = _placement(loaded, pools)
    run = _Run(model, dtype, needs, slots)
    situation = replace(_situation(loaded, (actor, rollout), pools, platforms, run), perf=perf)
    candidate = decide(situation, asker, _residencies(loaded, actor, rollout))
    plan = finish(loaded, situation, candidate, asker, Rest(pools, here.env))
    notes = (*plan.notes, *notes, *spread, *loaded.notes, *told.notes, *crossing, *_basis(nodes))
    return replace(plan, pools=tuple(pools.values()), perf=perf, hooks_asked=tuple(asker.asked), notes=notes)


def _basis(nodes: Mapping[str, PoolNodes]) -> tuple[str, ...]:
    """W281 for pools that were planned without a look at any machine."""
    nominal = [name for name, at in nodes.items() if at.profile is not None]
    if not nominal:
        return ()
    which = "" if len(nominal) == len(nodes) else f" for pool {' and '.join(nominal)}"
    return (f"W281 made from nominal devices{which}: no machine was looked at",)


@dataclass(frozen=True, slots=True)
class _Run:
    model: ModelShape
    dtype: str
    needs: PlanNeeds
    slots: Mapping[str, tuple[Slot, ...]]


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
            left = tuple(visible_node(binding, node, here.env) for node in at.nodes)
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


def _checks(loaded: LoadedTopology, nodes: Mapping[str, PoolNodes], model: ModelShape) -> Told:
    """Every rule that needs hardware or model, and no placement."""
    supply = {name: sum(len(node.devices) for node in at.nodes) for name, at in nodes.items()}
    errors = check_supply(loaded.topology, loaded.roles, supply, loaded.tree)
    for at in nodes.values():
        errors += check_hardware(at, loaded.roles, loaded.tree)
    errors += check_model(loaded.roles, model, loaded.tree)
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
        env = here.env if name in here.pools else {}
        pools[name] = PoolPlan(
            name=name,
            platform=at.pool.platform,
            inventories=at.nodes,
            capabilities=capabilities,
            binding=bindings[name],
            lineage=platform.lineage,
            entries=tuple(mask_entries(bindings[name], node, env) for node in at.nodes),
        )
    return pools


def _dtype(needs: PlanNeeds, pools: list[PoolPlan]) -> str:
    dtype = needs.dtype or pools[0].capabilities.default_dtype
    for pool in pools:
        if dtype not in pool.capabilities.dtypes:
            able = ", ".join(pool.capabilities.dtypes)
            reason = pool.capabilities.absent.get(dtype)
            text = f"pool {pool.name} ({pool.platform}) has no {dtype}" + (f": {reason}" if reason else "")
            raise PlanError(text, fix=f"set model.dtype to one of {able}")
    return dtype


# ---- placement and requests


def _situation(
    loaded: LoadedTopology,
    roles: tuple[ResolvedRole, ResolvedRole | None],
    pools: Mapping[str, PoolPlan],
    platforms: Mapping[str, PlatformAnswers],
    run: _Run,
) -> Situation:
    shared = _share_of(loaded, roles)
    actor, rollout = (
        None if role is None else _seat(loaded, role, pools[role.pool], platforms, (shared, run)) for role in roles
    )
    assert actor is not None
    index = next(
        (
            i
            for i, e in enumerate(loaded.topology.sync)
            if rollout and (e.source, e.target) == (actor.role.name, rollout.role.name)
        ),
        None,
    )
    edge = None if index is None else loaded.topology.sync[index]
    wishes = Wishes() if edge is None else Wishes(edge.prefer, edge.forbid, edge.require, edge.buffer)
    return Situation(
        model=run.model,
        dtype=run.dtype,
        needs=run.needs,
        actor=actor,
        rollout=rollout,
        wishes=wishes,
        edge_where=loaded.where("roles") if index is None else loaded.where("sync", index),
        share_where=loaded.where("share", shared) if shared is not None else None,
    )


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


def _share_of(loaded: LoadedTopology, roles: tuple[ResolvedRole, ResolvedRole | None]) -> int | None:
    """The position of the share group that holds both roles."""
    names = {role.name for role in roles if role is not None}
    groups = (i for i, share in enumerate(loaded.topology.share) if len(names) == 2 and names <= set(share.roles))
    return next(groups, None)


def _residencies(loaded: LoadedTopology, actor: ResolvedRole, rollout: ResolvedRole | None) -> tuple[str | None, ...]:
    """`auto` stays on the device when everything fits with a cache of use, since then nothing has to move."""
    index = _share_of(loaded, (actor, rollout))
    if index is None:
        return (None,)
    wanted = loaded.topology.share[index].residency
    return ("resident", "park") if wanted == "auto" else (wanted,)


def _seat(
    loaded: LoadedTopology,
    role: ResolvedRole,
    pool: PoolPlan,
    platforms: Mapping[str, PlatformAnswers],
    given: tuple[int | None, _Run],
) -> Seat:
    shared, run = given
    limits = loaded.topology.limits
    space = PoolSpace(
        pool.name, pool.inventories, limits.device_reserve, limits.host_pinned_per_node, loaded.where("pools", pool.name)
    )
    mine = run.slots[role.name]
    with_whom = loaded.topology.share[shared].roles if shared is not None else ()
    cut = engine_slots(mine, role) if role.kind == "rollout" else (mine,)
    requests = tuple(_request(role, part, pool, run, tuple(n for n in with_whom if n != role.name)) for part in cut)
    group = "/".join(with_whom) if shared is not None else role.name
    return Seat(role, platforms[pool.platform], space, End(pool.name, pool.inventories, mine), group, requests)


def _request(
    role: ResolvedRole, slots: tuple[Slot, ...], pool: PoolPlan, run: _Run, shared_with: tuple[str, ...]
) -> RoleRequest:
    kind = RoleKind.TRAINER if role.kind == "train" else RoleKind.ENGINE
    capabilities: Capabilities = pool.capabilities
    return RoleRequest(
        role=role.name,
        kind=kind,
        placement=RolePlacement(role.name, slots),
        inventories=pool.inventories,
        capabilities=capabilities,
        parallel=role.parallel,
        dtype=run.dtype,
        shared_with=shared_with,
        deterministic=run.needs.deterministic,
        software=pool.inventories[0].software.get(str(kind), {}),
        threads=run.needs.threads if kind is RoleKind.TRAINER else 1,
    )
