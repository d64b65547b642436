"""Bytes per device by role, tag and phase, and whether they fit. Pure arithmetic; an estimate says so.

What a role holds is in `vime.planning.amounts`; here it is put into phases, added up and compared with what is there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from vime.errors import PlanError
from vime.facts.inventory import NodeInventory
from vime.facts.memory import EngineSleep, MemoryBackend, NullMemory, Tag
from vime.planning.amounts import FROZEN, SCORES, TURNS, Amount, Beside
from vime.planning.plan import MemoryPlan, MemoryRow
from vime.planning.units import in_units
from vime.topology.rules import ResolvedRole

SERVING, SCORING, TRAINING, UPDATING = "serving", "scoring", "training", "updating"
NEAR_LIMIT = 0.08
"""A plan that leaves less than this share free is worth a warning: allocators keep more than they hand out, and activations
are an estimate.
"""


@dataclass(frozen=True, slots=True)
class Occupant:
    """A role on a set of devices: what it holds on each, and what can leave.

    Roles of one `group` are on the same devices. `parks` is true where the role leaves between turns. `nodes` holds the node
    of every device. `turns` says for every phase in which the role has its turn what it does then: serving, scoring, training
    or updating.
    """

    role: ResolvedRole
    group: str
    amounts: tuple[Amount, ...]
    leaves: MemoryBackend | NullMemory | EngineSleep
    parks: bool
    nodes: tuple[int, ...]
    turns: Mapping[str, str] = field(default_factory=dict)


# ---- phases


def turns_of(roles: Iterable[tuple[ResolvedRole, str]]) -> dict[str, dict[str, str]]:
    """By role: phase -> what the role does in it, for (role, set of devices).

    Training roles on the same devices have phases of their own, such as `scoring ref` and `training critic`; the actor's is
    `training`. A role that has its devices alone works beside them.
    """
    listed = list(roles)
    trains = [(role, group) for role, group in listed if role.kind == "train"]
    turns: dict[str, dict[str, str]] = {role.name: {SERVING: SERVING, UPDATING: UPDATING} for role, _ in listed}
    alone = {role.name: sum(other == group for _, other in trains) == 1 for role, group in trains}
    scoring = [f"{SCORING} {role.name}" for role, _ in trains if role.task in SCORES and not alone[role.name]] or [SCORING]
    for role, _ in trains:
        mine = turns[role.name] = {UPDATING: UPDATING} if role.task == "actor" else {}
        own = role.task != "actor" and not alone[role.name]
        if role.task in SCORES:
            mine |= dict.fromkeys([f"{SCORING} {role.name}"] if own else scoring, SCORING)
        if role.task not in FROZEN:
            mine[f"{TRAINING} {role.name}" if own else TRAINING] = TRAINING
    return turns


def phases_of(occupants: Iterable[Occupant]) -> tuple[str, ...]:
    """The phases of a step in their order, those of one kind in the order of their tasks' turns."""
    listed = sorted(occupants, key=lambda occupant: TURNS.index(occupant.role.task))
    found = {phase: doing for occupant in listed for phase, doing in occupant.turns.items()}
    order = (SERVING, SCORING, TRAINING, UPDATING)
    return tuple(sorted(found, key=lambda phase: order.index(found[phase])))


def rows_of(occupants: Sequence[Occupant], phases: Sequence[str] = ()) -> tuple[MemoryRow, ...]:
    """One row for every tag, role and phase in which the tag is on the device. `phases`: those of the occupants, if empty."""
    rows: list[MemoryRow] = []
    phases = phases or phases_of(occupants)
    for occupant in occupants:
        role = occupant.role
        for amount in occupant.amounts:
            for phase in phases:
                if amount.num_bytes and is_there(occupant, amount.tag, phase, scoring=amount.scoring):
                    rows.append(MemoryRow(role.pool, role.name, str(amount.tag), phase, amount.num_bytes, amount.how))
    return tuple(rows)


_AT_HOME: Mapping[str, frozenset[Tag]] = {
    SERVING: frozenset({Tag.ENGINE_WEIGHTS, Tag.KV}),
    SCORING: frozenset({Tag.PARAMS}),
    TRAINING: frozenset({Tag.PARAMS, Tag.GRADS, Tag.OPTIMIZER}),
    UPDATING: frozenset({Tag.PARAMS, Tag.ENGINE_WEIGHTS}),
}

DROPPED = frozenset({Tag.GRADS})
"""What a trainer that parks gives up although its platform could keep it: gradients come back as zeros."""


def is_there(occupant: Occupant, tag: Tag | Beside, phase: str, *, scoring: bool = False) -> bool:
    """Activations live in a role's own phase; everything else stays unless its role parks and its tag can be freed.

    `scoring` are activations of a pass without gradients. An engine that does not park keeps its work space in torch's cache.
    """
    doing = occupant.turns.get(phase, "")
    if tag is Tag.ACTIVATIONS:
        if occupant.role.kind == "rollout":
            return doing == SERVING or not occupant.parks
        return doing == (SCORING if scoring else TRAINING)
    return tag in _AT_HOME.get(doing, ()) or not (occupant.parks and frees(occupant.leaves, tag))


def frees(leaves: MemoryBackend | NullMemory | EngineSleep, tag: Tag | Beside) -> bool:
    """Whether pausing a tag gives its device memory back."""
    return isinstance(tag, Tag) and not isinstance(leaves, NullMemory) and tag in leaves.tags and leaves.tags[tag].frees


def kept_on_host(leaves: MemoryBackend | NullMemory | EngineSleep, tag: Tag | Beside) -> bool:
    """Whether pausing a tag moves its content to the host: what is lost or dropped does not travel."""
    if not isinstance(tag, Tag) or isinstance(leaves, NullMemory) or tag in DROPPED:
        return False
    return frees(leaves, tag) and leaves.tags[tag].preserves


def can_leave(leaves: MemoryBackend | NullMemory | EngineSleep) -> bool:
    """Whether anything at all can leave the device."""
    return not isinstance(leaves, NullMemory) and any(semantics.frees for semantics in leaves.tags.values())


def parked_bytes(occupant: Occupant) -> int:
    """Host bytes for what one device parks with its content kept."""
    if not occupant.parks:
        return 0
    return sum(a.num_bytes for a in occupant.amounts if a.tag is not Tag.ACTIVATIONS and kept_on_host(occupant.leaves, a.tag))


# ---- the whole


@dataclass(frozen=True, slots=True)
class PoolSpace:
    """The memory of a pool's nodes, and the bounds that the topology sets. `where` is the pool's place in the file."""

    name: str
    nodes: tuple[NodeInventory, ...]
    reserve_bytes: int
    host_limit_bytes: int | None
    where: str

    @property
    def virtual(self) -> bool:
        """The devices are slots of a host: they share its memory, and what is parked stays in it."""
        return all(node.virtual for node in self.nodes)

    @property
    def device_bytes(self) -> int:
        """Memory of the smallest device."""
        return min(device.memory_bytes for node in self.nodes for device in node.devices)

    @property
    def node_bytes(self) -> int:
        """Memory of the smallest node."""
        return min(node.memory_bytes for node in self.nodes)


def copied_bytes(occupant: Occupant) -> int:
    """Host bytes of a role's device for the copy from which a checkpoint is written: its optimizer's part, and its share of
    the parameters, of which one of all data-parallel copies is written. 0 for a role without an optimizer.
    """
    held = {amount.tag: amount.num_bytes for amount in occupant.amounts}
    if Tag.OPTIMIZER not in held:
        return 0
    parallel = occupant.role.parallel
    return held[Tag.OPTIMIZER] + -(-held[Tag.PARAMS] // (parallel.dp * parallel.cp))


def plan_memory(
    spaces: Sequence[PoolSpace], occupants: Sequence[Occupant], *, published_bytes: int, copies: bool = False
) -> MemoryPlan:
    """Rows and host bytes. `published_bytes` is the kept copy of the last published weights, once on every node; with `copies`
    checkpoints are written from copies.
    """
    together: dict[str, tuple[str, ...]] = {}
    for occupant in occupants:
        together[occupant.group] = (*together.get(occupant.group, ()), occupant.role.name)
    return MemoryPlan(
        rows=rows_of(occupants),
        capacity_bytes={space.name: space.device_bytes for space in spaces},
        reserve_bytes=max((space.reserve_bytes for space in spaces), default=0),
        host_bytes_per_node=max((_host_bytes(s, occupants, published_bytes) for s in spaces), default=0),
        copied_bytes_per_node=max((_on_fullest_node(s, occupants, copied_bytes) for s in spaces if copies), default=0),
        together=tuple(together.values()),
        phases=phases_of(occupants),
    )


def _host_bytes(space: PoolSpace, occupants: Sequence[Occupant], published_bytes: int) -> int:
    is_used = any(o.role.pool == space.name for o in occupants)
    return _on_fullest_node(space, occupants, parked_bytes) + (published_bytes if is_used else 0)


def _on_fullest_node(space: PoolSpace, occupants: Sequence[Occupant], of_device: Callable[[Occupant], int]) -> int:
    mine = [o for o in occupants if o.role.pool == space.name]
    return max((sum(of_device(o) * o.nodes.count(node) for o in mine) for node in range(len(space.nodes))), default=0)


def check_memory(space: PoolSpace, plan: MemoryPlan, occupants: Sequence[Occupant]) -> tuple[list[PlanError], list[str]]:
    """E251 and E252 for what does not fit in a pool, and warnings for what nearly does not."""
    mine = [o for o in occupants if o.role.pool == space.name]
    errors: list[PlanError] = []
    notes: list[str] = []
    for phase in phases_of(occupants):
        for load in _loads(space, phase, mine):
            total = f" = {in_units(load.used)}" if len(load.parts) > 1 else ""
            text = f"{phase} needs {' + '.join(load.parts)}{total} of {in_units(load.limit)}"
            if load.used > load.limit:
                fix = _memory_fix(load.largest, phase)
                errors.append(PlanError(f"E251 pools.{space.name}: {text}", where=space.where, fix=fix))
            elif load.used > load.limit * (1 - NEAR_LIMIT):
                notes.append(f"W253 pools.{space.name}: {text}: within {NEAR_LIMIT:.0%} of the limit")
    if not space.virtual:
        errors += _check_host(space, plan)
    return errors, list(dict.fromkeys(notes))


@dataclass(frozen=True, slots=True)
class Load:
    """Bytes used and bytes there, what they are in words, and the kind of role that takes the most."""

    used: int
    limit: int
    parts: tuple[str, ...]
    largest: str


def _loads(space: PoolSpace, phase: str, mine: Sequence[Occupant]) -> Iterator[Load]:
    """What each set of devices holds; each node where the devices are slots of a host."""
    if space.virtual:
        for node in range(len(space.nodes)):
            loads = [(o, _all_bytes(o, phase) * o.nodes.count(node)) for o in mine]
            yield _load(loads, space.nodes[node].memory_bytes, space.reserve_bytes)
        return
    rows = rows_of(mine, (phase,))
    for group in dict.fromkeys(o.group for o in mine):
        members = [o for o in mine if o.group == group]
        loads = [(o, _in_phase(rows, o, phase)) for o in members]
        yield _load(loads, space.device_bytes, space.reserve_bytes)


def _load(loads: Iterable[tuple[Occupant, int]], limit: int, reserve: int) -> Load:
    listed = [(o.role, size) for o, size in loads if size]
    parts = [f"{role.name} {in_units(size)}" for role, size in listed]
    parts += [f"reserve {in_units(reserve)}"] if reserve else []
    largest = max(listed, key=lambda pair: pair[1])[0].kind if listed else ""
    return Load(sum(size for _, size in listed) + reserve, limit, tuple(parts) or ("nothing",), largest)


def _all_bytes(occupant: Occupant, phase: str) -> int:
    """On a host nothing that is parked leaves the machine."""
    there = (a for a in occupant.amounts if a.tag is not Tag.ACTIVATIONS or is_there(occupant, a.tag, phase, scoring=a.scoring))
    return sum(a.num_bytes for a in there)


def is_tight(space: PoolSpace, occupants: Sequence[Occupant]) -> bool:
    """Whether training leaves less than `NEAR_LIMIT` of a pool's devices free."""
    mine = [o for o in occupants if o.role.pool == space.name]
    training = {phase for o in occupants for phase, doing in o.turns.items() if doing == TRAINING}
    return any(load.used > load.limit * (1 - NEAR_LIMIT) for phase in training for load in _loads(space, phase, mine))


def room_for_cache(space: PoolSpace, occupants: Sequence[Occupant], engine: Occupant) -> tuple[int, str]:
    """Bytes that an engine's cache may take beside everything that is on its devices with it, and the arithmetic.

    `NEAR_LIMIT` stays free. `occupants` are counted without any cache.
    """
    together = [o for o in occupants if o.group == engine.group]
    phases = [phase for phase in phases_of(occupants) if is_there(engine, Tag.KV, phase)]
    rows = [row for row in rows_of(together, phases) if row.tag != Tag.KV]
    fullest = max(phases, key=lambda phase: sum(r.num_bytes for r in rows if r.phase == phase))
    held = sum(r.num_bytes for r in rows if r.phase == fullest)
    usable = int(space.device_bytes * (1 - NEAR_LIMIT)) - space.reserve_bytes
    kept = f" - reserve {in_units(space.reserve_bytes)}" if space.reserve_bytes else ""
    parts = " + ".join(f"{o.role.name} {in_units(size)}" for o in together if (size := _in_phase(rows, o, fullest)))
    return usable - held, f"{1 - NEAR_LIMIT:g} x {in_units(space.device_bytes)}{kept} - ({parts} while {fullest})"


def _in_phase(rows: Sequence[MemoryRow], occupant: Occupant, phase: str) -> int:
    return sum(r.num_bytes for r in rows if r.role == occupant.role.name and r.phase == phase)


def _memory_fix(largest: str, phase: str) -> str:
    """What helps the role that takes the most."""
    if largest == "rollout":
        return "bound the engine's cache with rollout.vllm.kv_cache_memory_bytes, or use more devices"
    if phase.startswith(TRAINING):
        return "use more devices (tp, pp, ep or dp), smaller trainer.max_tokens_per_micro_batch, or trainer.recompute full"
    return "use more devices (tp, pp, ep or dp)"


def _check_host(space: PoolSpace, plan: MemoryPlan) -> Iterator[PlanError]:
    limit = space.node_bytes if space.host_limit_bytes is None else min(space.host_limit_bytes, space.node_bytes)
    if plan.host_bytes_per_node > limit:
        which = "limits.host_pinned_per_node" if limit == space.host_limit_bytes else "the node's memory"
        text = (
            f"parked state and published weights need {in_units(plan.host_bytes_per_node)} a node, {which} is {in_units(limit)}"
        )
        yield PlanError(
            f"E252 pools.{space.name}: {text}", where=space.where, fix="raise the limit, or let roles stay resident"
        )
    elif (used := plan.host_bytes_per_node + plan.copied_bytes_per_node) > space.node_bytes:
        text = (
            f"parked state, published weights and the copy of a checkpoint need {in_units(used)} a node,"
            f" the node's memory is {in_units(space.node_bytes)}"
        )
        yield PlanError(f"E252 pools.{space.name}: {text}", where=space.where, fix="set checkpoint.asynchronous to false")
