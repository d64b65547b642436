"""A plan in words and as JSON: placement, memory, transports with every rejection, times with their sources, environment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from vime.facts.memory import MemoryBackend
from vime.facts.process import Parallel, Slot
from vime.planning.assume import NO_WORDS
from vime.planning.explain_roles import (
    binding_json,
    engine_text,
    leaving_text,
    lineage_text,
    roles_json,
    scheduling_text,
    table,
    trainer_text,
)
from vime.planning.explain_step import step_json, step_text
from vime.planning.plan import MemoryRow, Plan, PoolPlan, pool_of
from vime.planning.switching import switches
from vime.planning.time import Estimate
from vime.planning.units import in_units, in_words


def explain_text(plan: Plan, assume: Mapping[str, float] = NO_WORDS, *, verbose: bool = False) -> str:
    """The plan as plain text. `assume` are the user's values for assumptions about a step; `verbose` adds hooks and rates."""
    parts = (
        *(_head(plan), _placement(plan), scheduling_text(plan), _memory(plan), leaving_text(plan)),
        *(_transport(plan), _switch(plan), step_text(plan, assume), trainer_text(plan), engine_text(plan)),
        *(_environment(plan), _basis(plan, verbose=verbose)),
    )
    return "\n\n".join("\n".join(lines) for part in parts if (lines := list(part)))


def explain_json(plan: Plan, assume: Mapping[str, float] = NO_WORDS) -> dict[str, Any]:
    """The plan as JSON values; every term of every estimate is in it."""
    return {
        "topology": plan.topology,
        "dtype": plan.dtype,
        "parameters": plan.model.parameters,
        "shared": plan.shared,
        "residency": plan.residency,
        "pools": [_pool_json(pool) for pool in plan.pools],
        "roles": [_role_json(*role) for role in _roles(plan)],
        "memory": {
            "rows": [{name: getattr(row, name) for name in MemoryRow.__slots__} for row in plan.memory.rows],
            "capacity_bytes": dict(plan.memory.capacity_bytes),
            "reserve_bytes": plan.memory.reserve_bytes,
            "host_bytes_per_node": plan.memory.host_bytes_per_node,
            "copied_bytes_per_node": plan.memory.copied_bytes_per_node,
        },
        "recompute": {"value": plan.recompute, "why": plan.recompute_why},
        "transport": _transport_json(plan),
        **roles_json(plan),
        "switch": [{"role": role, **_estimate_json(estimate)} for role, estimate in switches(plan)],
        "step": step_json(plan, assume),
        "environment": [
            {"process": r.process, "name": r.name, "value": r.value, "mode": r.mode, "why": r.why} for r in plan.env_reasons
        ],
        "hooks_asked": list(plan.hooks_asked),
        "notes": list(plan.notes),
    }


# ---- text


def _head(plan: Plan) -> Iterator[str]:
    beside = [other.role for other in plan.others if plan.shares_actor(other)]
    beside += [plan.engines[0].request.role] if plan.shared else []
    who = f" by {', '.join((plan.actor.role, *beside))}" if len(plan.others) else ""
    sharing = f"shared{who} by time, {plan.residency}" if beside else "every role on its own devices"
    yield f"{plan.topology}: {plan.model.family}, {plan.model.parameters:,} parameters, {plan.dtype}; {sharing}"
    for pool in plan.pools:
        counts = [len(node.devices) for node in pool.inventories]
        each = str(counts[0]) if len(set(counts)) == 1 else ", ".join(map(str, counts))
        kind = pool.inventories[0].devices[0].name
        slots = "slots of a host" if pool.inventories[0].virtual else "devices"
        yield f"pool {pool.name}: {len(counts)} node(s) x {each} {slots} ({kind}), platform {lineage_text(plan, pool.name)}"


def _placement(plan: Plan) -> Iterator[str]:
    yield "placement"
    rows = [(label, slots_text(slots, pool_of(plan.pools, pool)), axes_text(p)) for label, pool, slots, p in _roles(plan)]
    yield from table(rows)


def _roles(plan: Plan) -> Iterator[tuple[str, str, Sequence[Slot], Parallel]]:
    for trainer in plan.trainers:
        yield trainer.role, trainer.pool, trainer.request.placement.slots, trainer.request.parallel
    for engine in plan.engines:
        request = engine.request
        yield f"{request.role}#{engine.index}", engine.pool, request.placement.slots, request.parallel


def slots_text(slots: Sequence[Slot], pool: PoolPlan) -> str:
    """`host-0[0-3] host-1[0]`."""
    by_node: dict[int, list[int]] = {}
    for slot in slots:
        by_node.setdefault(slot.node, []).append(slot.device)
    return " ".join(f"{pool.inventories[node].hostname}[{_ranges(devices)}]" for node, devices in by_node.items())


def _ranges(numbers: list[int]) -> str:
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def axes_text(parallel: Parallel) -> str:
    """Only the sizes that are larger than 1."""
    return " ".join(f"{name} {size}" for name, size in asdict(parallel).items() if size > 1) or "one device"


def _memory(plan: Plan) -> Iterator[str]:
    yield "memory per device"
    rows = []
    for name, phase in ((p.name, phase) for p in plan.pools for phase in _phases(plan)):
        mine = [r for r in plan.memory.rows if (r.pool, r.phase) == (name, phase)]
        for role in dict.fromkeys(r.role for r in mine):
            tags = _by_tag(r for r in mine if r.role == role)
            listed = ", ".join(f"{tag} {in_units(size)}" for tag, size in tags)
            rows.append((phase, role, in_units(sum(size for _, size in tags)), listed))
    yield from table(rows)
    for pool in (pool for pool in plan.pools if pool.name in plan.memory.capacity_bytes):
        capacity = in_units(plan.memory.capacity_bytes[pool.name])
        peak = max(plan.memory.phases, key=lambda phase: plan.memory.phase_bytes(pool.name, phase))
        used = in_units(plan.memory.phase_bytes(pool.name, peak))
        kept = f", reserve {in_units(plan.memory.reserve_bytes)}" if plan.memory.reserve_bytes else ""
        yield f"  pool {pool.name}: at most {used} of {capacity} ({peak}){kept}"
    yield f"  host memory per node for parked state and published weights: {in_units(plan.memory.host_bytes_per_node)}"
    if plan.memory.copied_bytes_per_node:
        yield f"  host memory per node while a checkpoint is written: {in_units(plan.memory.copied_bytes_per_node)} more"
    yield f"  recompute {plan.recompute}, {plan.recompute_why}"
    yield "how the memory was found"
    found = {(row.role, row.tag, row.how): row.num_bytes for row in plan.memory.rows}
    yield from table([(role, tag, in_units(size), how) for (role, tag, how), size in found.items()])


def _phases(plan: Plan) -> tuple[str, ...]:
    return plan.memory.phases if plan.engines else tuple(p for p in plan.memory.phases if p != "updating")


def _by_tag(rows: Iterable[MemoryRow]) -> list[tuple[str, int]]:
    sizes: dict[str, int] = {}
    for row in rows:
        sizes[row.tag] = sizes.get(row.tag, 0) + row.num_bytes
    return list(sizes.items())


def _transport(plan: Plan) -> Iterator[str]:
    if plan.transport is None:
        return
    edge = plan.transport.edge
    yield f"weights {edge.trainer.role} -> {edge.engine.role}: {in_units(edge.num_bytes)}, {edge.relation}"
    how = f" = {plan.transport.how}" if plan.transport.how else ""
    yield f"  chosen    {plan.transport.protocol}: {_seconds(plan.transport.seconds, plan.transport.provenance)}{how}"
    for rejection in plan.transport.rejected:
        yield f"  rejected  {rejection.protocol}: {rejection.reason}"


def _switch(plan: Plan) -> Iterator[str]:
    moves = switches(plan)
    if plan.residency is not None:
        yield "switch between serving and training" if plan.shared else "switch between training roles"
        if not moves:
            yield "  nothing moves: every role stays on the device"
    pinned = isinstance(plan.actor.memory, MemoryBackend) and plan.actor.memory.pinned_host
    if moves and pinned:
        yield "  the first parking takes longer than the others: it page-locks host memory"
    for role, estimate in moves:
        yield f"  {role}: {_seconds(estimate.seconds, estimate.provenance)} each way ({estimate.how})"


def _seconds(seconds: float | None, provenance: str) -> str:
    return "time unknown" if seconds is None else f"about {seconds:.3g} s ({provenance})"


def _environment(plan: Plan) -> Iterator[str]:
    if not plan.env_reasons:
        return
    yield "environment"
    signs = {"forbid": "must not be", "require": "must be", "user": "is (yours)"}
    who: dict[tuple[str, str, str], list[str]] = {}
    for r in plan.env_reasons:
        who.setdefault((r.name, f"{signs.get(r.mode, 'is')} {r.value or '(empty)'}", r.why), []).append(r.process)
    yield from table([(", ".join(processes), *rest) for rest, processes in who.items()])


def _basis(plan: Plan, *, verbose: bool) -> Iterator[str]:
    rates = [(pool, name, known) for pool, table in plan.perf.items() for name, known in sorted(table.quantities.items())]
    if verbose:
        yield "hooks asked"
        for asked, times in Counter(plan.hooks_asked).items():
            yield f"  {asked}" + (f" x {times}" if times > 1 else "")
        yield "rates"
        for pool, name, quantity in rates:
            source = f" ({quantity.source})" if quantity.source else ""
            yield f"  {pool}.{name}: {in_words(quantity)}, {quantity.provenance}{source}"
    else:
        yield f"{len(plan.hooks_asked)} answers of platforms and {len(rates)} rates: `vime plan CONFIG --verbose` prints them"
    for note in plan.notes:
        yield f"note: {note}"


# ---- JSON


def _pool_json(pool: PoolPlan) -> dict[str, Any]:
    nodes = [{"hostname": n.hostname, "devices": len(n.devices), "memory_bytes": n.memory_bytes} for n in pool.inventories]
    return {"name": pool.name, "platform": pool.platform, "lineage": list(pool.lineage), "nodes": nodes, **binding_json(pool)}


def _role_json(label: str, pool: str, slots: Sequence[Slot], parallel: Parallel) -> dict[str, Any]:
    placed = [[slot.node, slot.device] for slot in slots]
    return {"name": label, "pool": pool, "slots": placed, "parallel": asdict(parallel)}


def _estimate_json(estimate: Estimate) -> dict[str, Any]:
    return {"seconds": estimate.seconds, "provenance": estimate.provenance, "how": estimate.how}


def _transport_json(plan: Plan) -> dict[str, Any] | None:
    if plan.transport is None:
        return None
    edge = plan.transport.edge
    return {
        "from": edge.trainer.role,
        "to": edge.engine.role,
        "relation": str(edge.relation),
        "num_bytes": edge.num_bytes,
        "protocol": plan.transport.protocol,
        "seconds": plan.transport.seconds,
        "provenance": plan.transport.provenance,
        "how": plan.transport.how,
        "buffer_bytes": plan.transport.buffer_bytes,
        "rejected": [{"protocol": r.protocol, "reason": r.reason} for r in plan.transport.rejected],
    }
