"""Seconds to park each role of a time-shared set of devices, or to bring it back."""

from __future__ import annotations

from collections.abc import Iterator

from vime.facts.memory import EngineSleep, MemoryBackend, NullMemory
from vime.planning.memory import can_leave, kept_on_host
from vime.planning.plan import Plan, pool_of
from vime.planning.time import Estimate, switch


def switches(plan: Plan) -> list[tuple[str, Estimate]]:
    """Role and seconds one way; empty where nothing moves."""
    if plan.residency != "park":
        return []
    found: list[tuple[str, Estimate]] = []
    for name, pool_name, leaves in _leavers(plan):
        if isinstance(leaves, NullMemory) or not can_leave(leaves):
            continue
        rows = {(r.tag, r.how): r for r in plan.memory.rows if r.role == name}
        moved = sum(
            r.num_bytes for r in rows.values() if any(str(tag) == r.tag and kept_on_host(leaves, tag) for tag in leaves.tags)
        )
        pool = pool_of(plan.pools, pool_name)
        found.append((name, switch(moved, plan.perf[pool_name], pool.inventories[0])))
    return found


def _leavers(plan: Plan) -> Iterator[tuple[str, str, MemoryBackend | NullMemory | EngineSleep]]:
    """The roles on the actor's devices: each leaves them once a step, and comes back once.

    A critic has two turns, values and training. By the order of `vime.planning.amounts.TURNS` one follows the other, so that
    between them nothing of it moves.
    """
    yield plan.actor.role, plan.actor.pool, plan.actor.memory
    for other in plan.others:
        if plan.shares_actor(other):
            yield other.role, other.pool, other.memory
    if plan.engines and plan.shared:
        yield plan.engines[0].request.role, plan.engines[0].pool, plan.engines[0].sleep
