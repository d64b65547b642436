"""Puts every role on its devices: what its processes ask a platform with, and who shares with whom."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from vime.facts.model import ModelShape
from vime.facts.perf import PerfTable
from vime.facts.process import RoleKind, RolePlacement, RoleRequest, Slot
from vime.planning.memory import PoolSpace
from vime.planning.needs import PlanNeeds, model_of
from vime.planning.place import engine_slots
from vime.planning.plan import PlatformAnswers, PoolPlan
from vime.planning.situation import Seat, Situation
from vime.planning.transports import End, Wishes
from vime.topology.load import LoadedTopology
from vime.topology.rules import ResolvedRole
from vime.topology.runnable import RunRoles


@dataclass(frozen=True, slots=True)
class Run:
    """The actor's model, the type of all roles, what the run needs, slots by role and rates by pool."""

    model: ModelShape
    dtype: str
    needs: PlanNeeds
    slots: Mapping[str, tuple[Slot, ...]]
    perf: Mapping[str, PerfTable]


def seat_all(
    loaded: LoadedTopology,
    roles: RunRoles,
    pools: Mapping[str, PoolPlan],
    platforms: Mapping[str, PlatformAnswers],
    run: Run,
) -> Situation:
    """The situation that a plan is decided for."""
    seats = {role.name: _seat(loaded, role, pools[role.pool], platforms, run) for role in roles.all}
    actor, rollout = seats[roles.actor.name], None if roles.rollout is None else seats[roles.rollout.name]
    edges = [(e.source, e.target) for e in loaded.topology.sync]
    here = None if roles.rollout is None else (roles.actor.name, roles.rollout.name)
    index = edges.index(here) if here in edges else None
    edge = None if index is None else loaded.topology.sync[index]
    shared = share_of(loaded, roles.actor)
    return Situation(
        model=run.model,
        dtype=run.dtype,
        needs=run.needs,
        actor=actor,
        rollout=rollout,
        wishes=Wishes() if edge is None else Wishes(edge.prefer, edge.forbid, edge.require, edge.buffer),
        edge_where=loaded.where("roles") if index is None else loaded.where("sync", index),
        share_where=None if shared is None else loaded.where("share", shared),
        perf=run.perf,
        others=tuple(seats[role.name] for role in roles.others),
    )


def share_of(loaded: LoadedTopology, role: ResolvedRole) -> int | None:
    """The position of the share group that holds a role."""
    return next((i for i, share in enumerate(loaded.topology.share) if role.name in share.roles), None)


def residencies(loaded: LoadedTopology, roles: RunRoles) -> tuple[str | None, ...]:
    """`auto` stays on the device when everything fits with a cache of use, since then nothing has to move."""
    index = share_of(loaded, roles.actor)
    if index is None:
        return (None,)
    wanted = loaded.topology.share[index].residency
    return ("resident", "park") if wanted == "auto" else (wanted,)


def _seat(
    loaded: LoadedTopology, role: ResolvedRole, pool: PoolPlan, platforms: Mapping[str, PlatformAnswers], run: Run
) -> Seat:
    limits, shared = loaded.topology.limits, share_of(loaded, role)
    space = PoolSpace(
        pool.name, pool.inventories, limits.device_reserve, limits.host_pinned_per_node, loaded.where("pools", pool.name)
    )
    mine = run.slots[role.name]
    with_whom = loaded.topology.share[shared].roles if shared is not None else (role.name,)
    cut = engine_slots(mine, role) if role.kind == "rollout" else (mine,)
    requests = tuple(_request(role, part, pool, run, tuple(n for n in with_whom if n != role.name)) for part in cut)
    model = model_of(role, run.model, run.needs)
    end = End(pool.name, pool.inventories, mine)
    return Seat(role, platforms[pool.platform], space, end, "/".join(with_whom), requests, model)


def _request(
    role: ResolvedRole, slots: tuple[Slot, ...], pool: PoolPlan, run: Run, shared_with: tuple[str, ...]
) -> RoleRequest:
    kind = RoleKind.TRAINER if role.kind == "train" else RoleKind.ENGINE
    return RoleRequest(
        role=role.name,
        kind=kind,
        placement=RolePlacement(role.name, slots),
        inventories=pool.inventories,
        capabilities=pool.capabilities,
        parallel=role.parallel,
        dtype=run.dtype,
        shared_with=shared_with,
        deterministic=run.needs.deterministic,
        software=pool.inventories[0].software.get(str(kind), {}),
        threads=run.needs.threads if kind is RoleKind.TRAINER else 1,
    )
