"""Bytes per device by role, tag and phase, and whether they fit. Pure arithmetic; an estimate says so.

Per parameter of a training rank, with a distributed optimizer over d ranks: in 16 bits 2 (parameter) + 4 (gradient) + 12/d
(float32 copy and two moments); in float32 4 + 4 + 8/d. For dense parameters d = dp x cp, for experts what is left of the
ranks beside ep x etp. Source: Megatron-LM, user guide, distributed optimizer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vime.errors import PlanError
from vime.facts.inventory import NodeInventory
from vime.facts.memory import EngineSleep, MemoryBackend, NullMemory, Tag
from vime.facts.model import ModelShape
from vime.facts.process import Parallel
from vime.planning.needs import PlanNeeds
from vime.planning.plan import MemoryPlan, MemoryRow
from vime.topology.rules import ResolvedRole
from vime.yamltree import parse_bytes

SERVING, TRAINING, UPDATING = PHASES = ("serving", "training", "updating")
NEAR_LIMIT = 0.08
"""A plan that leaves less than this share free is worth a warning: activations are an estimate."""

DTYPE_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class Amount:
    """Bytes of one tag on one device, and how they were found."""

    tag: Tag
    num_bytes: int
    how: str


@dataclass(frozen=True, slots=True)
class Occupant:
    """A role on a set of devices: what it holds on each, and what can leave.

    Roles of one `group` are on the same devices. `parks` is true where the role leaves between turns. `nodes` holds the node
    of every device.
    """

    role: ResolvedRole
    group: str
    amounts: tuple[Amount, ...]
    leaves: MemoryBackend | NullMemory | EngineSleep
    parks: bool
    nodes: tuple[int, ...]


def expert_parameters(model: ModelShape) -> int:
    """Parameters of all experts: three matrices an expert."""
    return min(model.layers * model.experts * 3 * model.hidden * model.expert_ffn, model.parameters)


def model_bytes(model: ModelShape, dtype: str) -> int:
    """A full set of weights."""
    return model.parameters * DTYPE_BYTES[dtype]


def trainer_amounts(
    model: ModelShape, dtype: str, parallel: Parallel, needs: PlanNeeds, *, optimizer: bool = True
) -> tuple[Amount, ...]:
    """What a training rank holds. A role without optimizer holds its parameters only."""
    experts = expert_parameters(model)
    dense_here = -(-(model.parameters - experts) // (parallel.tp * parallel.pp))
    experts_here = -(-experts // (parallel.ep * parallel.etp * parallel.pp))
    here, width = dense_here + experts_here, DTYPE_BYTES[dtype]
    params = Amount(Tag.PARAMS, here * width, f"{here} parameters x {width}")
    if not optimizer:
        return (params,)
    shared = parallel.dp * parallel.cp
    experts_shared = max(1, parallel.devices // parallel.pp // (parallel.ep * parallel.etp))
    state = 8 if dtype == "float32" else 12
    moments = -(-dense_here * state // shared) + -(-experts_here * state // experts_shared)
    how = f"{dense_here} x {state}/{shared}" + (f" + {experts_here} x {state}/{experts_shared}" if experts else "")
    return (
        params,
        Amount(Tag.GRADS, here * 4, f"{here} parameters x 4"),
        Amount(Tag.OPTIMIZER, moments, how),
        activation_amount(model, dtype, parallel, needs),
        logits_amount(model, parallel, needs),
    )


def activation_amount(model: ModelShape, dtype: str, parallel: Parallel, needs: PlanNeeds) -> Amount:
    """Kept for the backward pass, per token and layer: 4 hidden vectors, queries, keys, values and their mix, 3 feed-forward
    vectors (gate, up, product); attention scores are not kept. With full recomputation one hidden vector, plus one layer
    whole. A first pipeline stage holds as many micro-batches as there are stages, so the layer count stays whole.
    """
    ffn = model.experts_per_token * model.expert_ffn if model.experts else model.ffn
    split = (2 * model.heads + 2 * model.kv_heads) * model.head_dim + 3 * ffn
    per_layer = 4 * model.hidden + -(-split // parallel.tp)
    if needs.recompute == "selective":
        per_layer -= -(-2 * ffn // parallel.tp)
    per_token = model.hidden * model.layers + per_layer if needs.recompute == "full" else per_layer * model.layers
    tokens = -(-needs.micro_batch_tokens // parallel.cp)
    how = f"estimate: {tokens} tokens x {per_token} values x {DTYPE_BYTES[dtype]}, recompute {needs.recompute}"
    return Amount(Tag.ACTIVATIONS, tokens * per_token * DTYPE_BYTES[dtype], how)


def logits_amount(model: ModelShape, parallel: Parallel, needs: PlanNeeds) -> Amount:
    """Logits and their gradient of one chunk, in float32."""
    rows, vocab = needs.log_prob_chunk_tokens, -(-model.vocab // parallel.tp)
    return Amount(Tag.ACTIVATIONS, rows * vocab * 4 * 2, f"logits chunk: {rows} rows x {vocab} x 4 x 2")


def engine_amounts(
    model: ModelShape, dtype: str, parallel: Parallel, args: Mapping[str, Any], *, capacity: int
) -> tuple[Amount, ...]:
    """What an engine worker holds. Its cache is counted where an argument bounds it."""
    experts, width = expert_parameters(model), DTYPE_BYTES[dtype]
    here = -(-(model.parameters - experts) // (parallel.tp * parallel.pp))
    here += -(-experts // (parallel.tp * parallel.dp * parallel.pp))
    weights = Amount(Tag.ENGINE_WEIGHTS, here * width, f"{here} parameters x {width}")
    return (weights, _cache_amount(args, weights.num_bytes, capacity))


def cache_is_bounded(args: Mapping[str, Any]) -> bool:
    """Whether an argument bounds the engine's cache."""
    return args.get("kv_cache_memory_bytes") is not None or args.get("gpu_memory_utilization") is not None


def _cache_amount(args: Mapping[str, Any], weights: int, capacity: int) -> Amount:
    size, share = args.get("kv_cache_memory_bytes"), args.get("gpu_memory_utilization")
    if size is not None:
        return Amount(Tag.KV, _bytes_of(size), "kv_cache_memory_bytes")
    if share is None:
        return Amount(Tag.KV, 0, "no argument bounds it: it takes what is left")
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
        what = f"rollout.vllm.gpu_memory_utilization must be above 0 and at most 1, got {share!r}"
        raise PlanError(what, fix="for example 0.6")
    left = int(share * capacity) - weights
    if left < 0:
        what = f"gpu_memory_utilization {share} x {capacity} bytes is less than the engine's weights, {weights} bytes"
        raise PlanError(f"E251 rollout.vllm.gpu_memory_utilization: {what}", fix="raise it, or split the engine by tp")
    return Amount(Tag.KV, left, f"gpu_memory_utilization {share} x {capacity} - {weights}")


def _bytes_of(size: object) -> int:
    try:
        value = parse_bytes(size)
    except ValueError as error:
        value, reason = None, str(error)
    else:
        reason = f"got {size!r}"
    if isinstance(value, int) and value >= 0:
        return value
    raise PlanError(f"rollout.vllm.kv_cache_memory_bytes: {reason}", fix="give a number of bytes, or a size such as 4GiB")


# ---- phases


def rows_of(occupants: Iterable[Occupant]) -> tuple[MemoryRow, ...]:
    """One row for every tag, role and phase in which the tag is on the device."""
    rows: list[MemoryRow] = []
    for occupant in occupants:
        role = occupant.role
        for amount in occupant.amounts:
            for phase in PHASES:
                if amount.num_bytes and _is_there(occupant, amount.tag, phase):
                    rows.append(MemoryRow(role.pool, role.name, str(amount.tag), phase, amount.num_bytes, amount.how))
    return tuple(rows)


_AT_HOME: Mapping[str, frozenset[Tag]] = {
    SERVING: frozenset({Tag.ENGINE_WEIGHTS, Tag.KV}),
    TRAINING: frozenset({Tag.PARAMS, Tag.GRADS, Tag.OPTIMIZER, Tag.ACTIVATIONS}),
    UPDATING: frozenset({Tag.PARAMS, Tag.ENGINE_WEIGHTS}),
}


def _is_there(occupant: Occupant, tag: Tag, phase: str) -> bool:
    """Activations live in training only; everything else stays unless its role parks and its tag can be freed."""
    if tag in _AT_HOME[phase]:
        return True
    return tag is not Tag.ACTIVATIONS and not (occupant.parks and frees(occupant.leaves, tag))


def frees(leaves: MemoryBackend | NullMemory | EngineSleep, tag: Tag) -> bool:
    """Whether pausing a tag gives its device memory back."""
    return not isinstance(leaves, NullMemory) and tag in leaves.tags and leaves.tags[tag].frees


def kept_on_host(leaves: MemoryBackend | NullMemory | EngineSleep, tag: Tag) -> bool:
    """Whether pausing a tag moves its content to the host: what is lost need not travel."""
    return not isinstance(leaves, NullMemory) and frees(leaves, tag) and leaves.tags[tag].preserves


def can_leave(leaves: MemoryBackend | NullMemory | EngineSleep) -> bool:
    """Whether anything at all can leave the device."""
    return not isinstance(leaves, NullMemory) and any(semantics.frees for semantics in leaves.tags.values())


def parked_bytes(occupant: Occupant) -> int:
    """Host bytes for what one device parks with its content kept."""
    if not occupant.parks or isinstance(occupant.leaves, NullMemory):
        return 0
    tags = occupant.leaves.tags
    kept = (a for a in occupant.amounts if a.tag in tags and tags[a.tag].frees and tags[a.tag].preserves)
    return sum(a.num_bytes for a in kept if a.tag is not Tag.ACTIVATIONS)


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


def plan_memory(spaces: Sequence[PoolSpace], occupants: Sequence[Occupant], *, published_bytes: int) -> MemoryPlan:
    """Rows and host bytes. `published_bytes` is the kept copy of the last published weights, once on every node."""
    together: dict[str, tuple[str, ...]] = {}
    for occupant in occupants:
        together[occupant.group] = (*together.get(occupant.group, ()), occupant.role.name)
    return MemoryPlan(
        rows=rows_of(occupants),
        capacity_bytes={space.name: space.device_bytes for space in spaces},
        reserve_bytes=max((space.reserve_bytes for space in spaces), default=0),
        host_bytes_per_node=max((_host_bytes(s, occupants, published_bytes) for s in spaces), default=0),
        together=tuple(together.values()),
    )


def _host_bytes(space: PoolSpace, occupants: Sequence[Occupant], published_bytes: int) -> int:
    mine = [o for o in occupants if o.role.pool == space.name]
    parked = (sum(parked_bytes(o) * o.nodes.count(node) for o in mine) for node in range(len(space.nodes)))
    return max(parked, default=0) + (published_bytes if mine else 0)


def check_memory(space: PoolSpace, plan: MemoryPlan, occupants: Sequence[Occupant]) -> tuple[list[PlanError], list[str]]:
    """E251 and E252 for what does not fit in a pool, and warnings for what nearly does not."""
    mine = [o for o in occupants if o.role.pool == space.name]
    errors: list[PlanError] = []
    notes: list[str] = []
    for phase in PHASES:
        for used, limit, parts in _loads(space, phase, mine, plan):
            total = f" = {in_units(used)}" if len(parts) > 1 else ""
            text = f"{phase} needs {' + '.join(parts)}{total} of {in_units(limit)}"
            if used > limit:
                errors.append(PlanError(f"E251 pools.{space.name}: {text}", where=space.where, fix=_memory_fix(mine, phase)))
            elif used > limit * (1 - NEAR_LIMIT):
                notes.append(f"W253 pools.{space.name}: {text}: within {NEAR_LIMIT:.0%} of the limit")
    if not space.virtual:
        errors += _check_host(space, plan)
    return errors, list(dict.fromkeys(notes))


def _loads(space: PoolSpace, phase: str, mine: Sequence[Occupant], plan: MemoryPlan) -> Iterator[tuple[int, int, list[str]]]:
    """(bytes used, bytes there, parts) of each set of devices; of each node where the devices are slots of a host."""
    if space.virtual:
        for node in range(len(space.nodes)):
            loads = [(o, _all_bytes(o, phase) * o.nodes.count(node)) for o in mine]
            yield _load(loads, space.nodes[node].memory_bytes, space.reserve_bytes)
        return
    rows = rows_of(mine)
    for group in dict.fromkeys(o.group for o in mine):
        members = [o for o in mine if o.group == group]
        loads = [(o, sum(r.num_bytes for r in rows if r.role == o.role.name and r.phase == phase)) for o in members]
        yield _load(loads, space.device_bytes, space.reserve_bytes)


def _load(loads: Iterable[tuple[Occupant, int]], limit: int, reserve: int) -> tuple[int, int, list[str]]:
    listed = [(o.role.name, size) for o, size in loads if size]
    parts = [f"{name} {in_units(size)}" for name, size in listed] + ([f"reserve {in_units(reserve)}"] if reserve else [])
    return sum(size for _, size in listed) + reserve, limit, parts or ["nothing"]


def _all_bytes(occupant: Occupant, phase: str) -> int:
    """On a host nothing that is parked leaves the machine."""
    return sum(a.num_bytes for a in occupant.amounts if a.tag is not Tag.ACTIVATIONS or phase == TRAINING)


def _memory_fix(mine: Sequence[Occupant], phase: str) -> str:
    if phase == TRAINING:
        return "use more devices (tp, pp, ep or dp), smaller trainer.max_tokens_per_micro_batch, or trainer.recompute full"
    engines = any(o.role.kind == "rollout" for o in mine)
    return (
        "bound the engine's cache with rollout.vllm.kv_cache_memory_bytes, or use more devices"
        if engines
        else "use more devices"
    )


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


def in_units(num_bytes: int) -> str:
    """`3.20 GiB`, `512 MiB`, `17 B`."""
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            value = num_bytes / size
            return f"{value:.0f} {unit}" if value >= 100 else f"{value:.2f} {unit}"
    return f"{num_bytes} B"
