"""What a role holds on one device, tag by tag. Pure arithmetic; every amount says how it was found.

Per parameter of a training rank, with a distributed optimizer over d ranks: in 16 bits 2 (parameter) + 4 (gradient) + 12/d
(float32 copy and two moments); in float32 4 + 4 + 8/d. For dense parameters d = dp x cp, for experts what is left of the
ranks beside ep x etp. Source: Megatron-LM, user guide, distributed optimizer.

Activations were counted from the allocations of a training step on a host, and agree with the peaks of a model of 4 billion
parameters on an accelerator within 3 %.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from vime.errors import PlanError
from vime.facts.memory import Tag
from vime.facts.model import ModelShape
from vime.facts.perf import PerfTable
from vime.facts.process import Parallel
from vime.planning.needs import PlanNeeds
from vime.planning.plan import TransportPlan
from vime.planning.units import in_units
from vime.yamltree import parse_bytes

DTYPE_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}

RECOMPUTE = ("none", "selective", "full")
"""What can be recomputed in the backward pass, least first."""

MAX_SEQUENCES = 256
"""Sequences that an engine runs at once where `max_num_seqs` does not say."""


class Beside(StrEnum):
    """What occupies a device and nobody parks: what a process takes beside its tensors, and a transport's buffers."""

    RUNTIME = "runtime"
    STAGING = "staging"


@dataclass(frozen=True, slots=True)
class Amount:
    """Bytes of one tag on one device, and how they were found. `scoring` marks activations of a pass without gradients."""

    tag: Tag | Beside
    num_bytes: int
    how: str
    scoring: bool = False


def expert_parameters(model: ModelShape) -> int:
    """Parameters of all experts: three matrices an expert."""
    return min(model.expert_layers * model.experts * 3 * model.hidden * model.expert_ffn, model.parameters)


def model_bytes(model: ModelShape, dtype: str) -> int:
    """A full set of weights."""
    return model.parameters * DTYPE_BYTES[dtype]


# ---- trainer


FROZEN = ("reference", "teacher")
"""Tasks without gradients and optimizer: they only score."""

SCORES = (*FROZEN, "critic")
"""Tasks with a pass over the batch before the updates: log-probs, or a critic's values."""

TURNS = (*SCORES, "actor")
"""In which order tasks on the same devices work. A critic scores last and trains first, so its parameters stay in between;
the actor trains last, since its weights are published next.
"""


def role_parameters(model: ModelShape, task: str) -> int:
    """Parameters of a role's model: a critic has one value a token in place of the output layer."""
    if task != "critic":
        return model.parameters
    return model.parameters - (0 if model.tied_embeddings else model.vocab * model.hidden) + model.hidden


def rank_parameters(model: ModelShape, parallel: Parallel, task: str = "actor") -> tuple[int, int]:
    """Parameters that a training rank holds: those outside experts, and those of experts."""
    experts = expert_parameters(model)
    dense_here = -(-(role_parameters(model, task) - experts) // (parallel.tp * parallel.pp))
    return dense_here, -(-experts // (parallel.ep * parallel.etp * parallel.pp))


def trainer_amounts(
    model: ModelShape, dtype: str, parallel: Parallel, needs: PlanNeeds, *, task: str = "actor"
) -> tuple[Amount, ...]:
    """What a training rank holds in tensors. A frozen role holds its parameters, and works without gradients."""
    dense_here, experts_here = rank_parameters(model, parallel, task)
    here, width = dense_here + experts_here, DTYPE_BYTES[dtype]
    params = Amount(Tag.PARAMS, here * width, f"{here} parameters x {width}")
    scoring = (scoring_activations(model, dtype, parallel, needs, task=task),) if task in SCORES else ()
    if task in FROZEN:
        return (params, *scoring)
    shared = parallel.dp * parallel.cp
    experts_shared = max(1, parallel.devices // parallel.pp // (parallel.ep * parallel.etp))
    state = 8 if dtype == "float32" else 12
    moments = -(-dense_here * state // shared) + -(-experts_here * state // experts_shared)
    how = f"{dense_here} x {state}/{shared}" + (f" + {experts_here} x {state}/{experts_shared}" if experts_here else "")
    return (
        params,
        Amount(Tag.GRADS, here * 4, f"{here} parameters x 4"),
        Amount(Tag.OPTIMIZER, moments, how),
        kept_activations(model, dtype, parallel, needs),
        working_activations(model, dtype, parallel, needs, head=task != "critic"),
        *scoring,
    )


def layer_values(model: ModelShape, parallel: Parallel, *, selective: bool = False) -> int:
    """Values that one layer keeps for a token until its backward pass; attention scores are not among them.

    Inputs and outputs of the two norms (4 hidden vectors); the product of queries, keys and values, the queries before and
    after their rotation, keys and values once for every query head, the mix (6 q + 2 kv); of a feed-forward network the gate
    and the rest joined, both apart, and their product (5 ffn), of an expert the token and 6 ffn; a shared expert is one more
    network. Selective recomputation runs attention again, so that keys and values are kept once for every group (4 q + 3 kv).
    Latent attention keeps the compressed vectors before and after their norms on every rank; queries, keys, values and the
    mix as wide as queries, and the mix once more without what fills it up.

    Of a mixture whose first layers are dense: the larger of both kinds.
    """
    attention, mlp = _parts_of_layer(model, parallel, selective=selective)
    return 4 * model.hidden + attention + mlp


def _parts_of_layer(model: ModelShape, parallel: Parallel, *, selective: bool = False) -> tuple[int, int]:
    """Values of attention and of the feed-forward network for a token, on one rank."""
    dense = -(-5 * model.ffn // parallel.tp)
    if not model.experts:
        return _attention_values(model, parallel, selective=selective), dense
    chosen = model.experts_per_token * (model.hidden + -(-6 * model.expert_ffn // parallel.etp))
    chosen += -(-5 * model.shared_ffn // parallel.tp)
    return _attention_values(model, parallel, selective=selective), max(chosen, dense if model.dense_layers else 0)


def _attention_values(model: ModelShape, parallel: Parallel, *, selective: bool) -> int:
    q, kv, latent = model.heads * model.head_dim, model.kv_heads * model.head_dim, model.latent
    if latent is not None:
        whole = 2 * (latent.q_rank + latent.kv_rank) + latent.rotary
        return whole + -(-(4 * q + model.heads * latent.value) // parallel.tp)
    return -(-(4 * q + 3 * kv if selective else 6 * q + 2 * kv) // parallel.tp)


def _tokens(parallel: Parallel, needs: PlanNeeds) -> int:
    return -(-needs.micro_batch_tokens // parallel.cp)


def kept_activations(model: ModelShape, dtype: str, parallel: Parallel, needs: PlanNeeds) -> Amount:
    """What the forward pass leaves for the backward pass; with full recomputation the input of every layer.

    A first pipeline stage holds as many micro-batches as there are stages, so the layer count stays whole. Of a stage in pieces
    it holds pp - 1 pieces more (Korthikanti et al. 2022, arXiv:2205.05198), as megatron-core's warm-up does.
    """
    tokens, width, recompute = _tokens(parallel, needs), DTYPE_BYTES[dtype], needs.recompute
    values = model.hidden if recompute == "full" else layer_values(model, parallel, selective=recompute == "selective")
    more = (parallel.pp - 1) * -(-model.layers // (parallel.pp * parallel.vpp)) if parallel.vpp > 1 else 0
    layers = model.layers + more
    how = f"{tokens} tokens x {layers} layers x {values} values x {width}, recompute {recompute}"
    return Amount(Tag.ACTIVATIONS, tokens * layers * values * width, how)


def working_activations(model: ModelShape, dtype: str, parallel: Parallel, needs: PlanNeeds, *, head: bool = True) -> Amount:
    """The larger of what the head and what a layer's backward pass use beside that: they do not run together.

    Without `head` over the vocabulary (a critic) only the layer counts: a value a token is nothing beside it.
    """
    tokens, width = _tokens(parallel, needs), DTYPE_BYTES[dtype]
    most, how = _head(model, width, parallel, needs) if head else (0, "")
    ffn = max(model.ffn, model.experts_per_token * model.expert_ffn + model.shared_ffn)
    # A norm's backward pass has float32 copies of several hidden vectors; a layer's has gradients.
    slopes = max(11 * model.hidden, 3 * model.hidden + -(-2 * ffn // parallel.tp))
    again = layer_values(model, parallel) if needs.recompute == "full" else 0
    layer = tokens * (again + slopes) * width
    if layer > most:
        whole = f"a whole layer, {again} values, and " if again else ""
        return Amount(Tag.ACTIVATIONS, layer, f"{tokens} tokens x ({whole}gradients, {slopes} values) x {width}")
    return Amount(Tag.ACTIVATIONS, most, how)


def scoring_activations(model: ModelShape, dtype: str, parallel: Parallel, needs: PlanNeeds, *, task: str) -> Amount:
    """A pass without gradients: the larger of one layer and of the head's forward pass, which keep nothing for later.

    Of a layer the larger of attention and feed-forward network, with four hidden vectors a token. The head has 18 bytes for an
    entry of a chunk of logits in 16 bits and 16 in float32, the chunk before beside its successor; a critic has none.
    """
    tokens, width = _tokens(parallel, needs), DTYPE_BYTES[dtype]
    attention, mlp = _parts_of_layer(model, parallel)
    values = 4 * model.hidden + max(attention, mlp)
    layer = Amount(
        Tag.ACTIVATIONS, tokens * values * width, f"scoring: {tokens} tokens x {values} values x {width}", scoring=True
    )
    if task == "critic":
        return layer
    rows, vocab, each = min(needs.log_prob_chunk_tokens, tokens), -(-model.vocab // parallel.tp), 16 if width == 4 else 18
    how = f"scoring: head, {rows} rows x {vocab} x {each} + {tokens} tokens x {model.hidden} x {width}"
    head = Amount(Tag.ACTIVATIONS, rows * vocab * each + tokens * model.hidden * width, how, scoring=True)
    return max(layer, head, key=lambda amount: amount.num_bytes)


def _head(model: ModelShape, width: int, parallel: Parallel, needs: PlanNeeds) -> tuple[int, str]:
    """Bytes of `vime.trainer.megatron.logprobs` in its backward pass, where the chunk before is alive beside its successor.

    In 16 bits two chunks of logits, four in float32 and one gradient: 20 bytes an entry; in float32 16, since the types are
    one. The weight's gradient is added up in float32 while a part of it is made. Four hidden vectors a token.
    """
    tokens, vocab = _tokens(parallel, needs), -(-model.vocab // parallel.tp)
    rows, each = min(needs.log_prob_chunk_tokens, tokens), 16 if width == 4 else 20
    sizes = (rows * vocab * each, vocab * model.hidden * (4 + width), 4 * tokens * model.hidden * width)
    how = (
        f"head: {rows} rows x {vocab} x {each} + weight's gradient {vocab} x {model.hidden} x {4 + width}"
        f" + {tokens} tokens x {4 * model.hidden} x {width}"
    )
    return sum(sizes), how


# ---- engine


def engine_amounts(
    model: ModelShape, dtype: str, parallel: Parallel, args: Mapping[str, Any], *, capacity: int, beside: int = 0
) -> tuple[Amount, ...]:
    """What an engine worker holds in weights and cache. The cache is counted where an argument bounds it.

    `beside` is what the worker takes besides: a share of the device is a bound for all of it together.
    """
    experts, width = expert_parameters(model), DTYPE_BYTES[dtype]
    here = -(-(model.parameters - experts) // (parallel.tp * parallel.pp))
    here += -(-experts // (parallel.tp * parallel.dp * parallel.pp))
    weights = Amount(Tag.ENGINE_WEIGHTS, here * width, f"{here} parameters x {width}")
    return (weights, _cache_amount(args, weights.num_bytes, beside, capacity))


def token_bytes(model: ModelShape, dtype: str, parallel: Parallel) -> int:
    """Bytes of a token in an engine worker's cache: keys and values of its layers and heads.

    With latent attention the compressed vector and the rotary part, which every worker of a tensor-parallel group has whole.
    """
    layers = -(-model.layers // parallel.pp)
    if model.latent is not None:
        return layers * (model.latent.kv_rank + model.latent.rotary) * DTYPE_BYTES[dtype]
    return 2 * layers * -(-model.kv_heads // parallel.tp) * model.head_dim * DTYPE_BYTES[dtype]


def given(args: Mapping[str, Any], name: str) -> Any:
    """An argument under either spelling; None where it is not there or null."""
    return args.get(name, args.get(name.replace("_", "-")))


CACHE_ARGS = ("kv_cache_memory_bytes", "gpu_memory_utilization")


def speaks_of_cache(args: Mapping[str, Any]) -> bool:
    """Whether an argument about the size of the cache is there, be it null."""
    return any(name.replace("-", "_") in CACHE_ARGS for name in args)


def cache_is_bounded(args: Mapping[str, Any]) -> bool:
    """Whether an argument bounds the engine's cache."""
    return any(given(args, name) is not None for name in CACHE_ARGS)


def _cache_amount(args: Mapping[str, Any], weights: int, beside: int, capacity: int) -> Amount:
    size, share = given(args, "kv_cache_memory_bytes"), given(args, "gpu_memory_utilization")
    if size is not None:
        return Amount(Tag.KV, _bytes_of(size), "kv_cache_memory_bytes")
    if share is None:
        return Amount(Tag.KV, 0, "no argument bounds it: it takes what is left")
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
        what = f"rollout.vllm.gpu_memory_utilization must be above 0 and at most 1, got {share!r}"
        raise PlanError(what, fix="for example 0.6")
    left = int(share * capacity) - weights - beside
    work = f" and {beside} of work space" if beside else ""
    if left < 0:
        what = f"gpu_memory_utilization {share} x {capacity} bytes is less than the engine's weights, {weights} bytes{work}"
        raise PlanError(f"E251 rollout.vllm.gpu_memory_utilization: {what}", fix="raise it, or split the engine by tp")
    return Amount(Tag.KV, left, f"gpu_memory_utilization {share} x {capacity} - {weights}" + (f" - {beside}" if beside else ""))


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


# ---- beside tensors

_BUFFERS: Mapping[str, int] = {"device_ipc": 2}
"""Buffers that a transport keeps in the first rank's device memory for as long as the run lasts."""


def staging_amounts(transport: TransportPlan) -> tuple[Amount, ...]:
    """What the trainer's half of a transport keeps on the device."""
    count, size = _BUFFERS.get(transport.protocol, 0), min(transport.buffer_bytes, transport.edge.num_bytes)
    how = f"{count} buffers x {size} of {transport.protocol}"
    return (Amount(Beside.STAGING, count * size, how),) if count else ()


def trainer_footprint(perf: PerfTable) -> tuple[Amount, ...]:
    """What a training process takes beside its tensors, where the platform knows."""
    return tuple(_known(perf, ((Beside.RUNTIME, "process"), (Tag.COMMUNICATORS, "trainer_libraries"))))


def engine_footprint(perf: PerfTable, model: ModelShape, parallel: Parallel, args: Mapping[str, Any]) -> tuple[Amount, ...]:
    """What an engine worker takes beside weights and cache, where the platform knows."""
    found = list(_known(perf, ((Beside.RUNTIME, "process"), (Beside.RUNTIME, "engine_rest"), (Tag.ACTIVATIONS, "engine_work"))))
    graphs, layers = perf.get("engine_graph_layer"), -(-model.layers // parallel.pp)
    if graphs.value and not given(args, "enforce_eager"):
        how = f"{layers} layers x {in_units(int(graphs.value))}, {graphs.provenance}: {graphs.source}"
        found.append(Amount(Tag.GRAPHS, int(layers * graphs.value), how))
    return tuple(found)


def _known(perf: PerfTable, named: Sequence[tuple[Tag | Beside, str]]) -> Iterator[Amount]:
    for tag, name in named:
        quantity = perf.get(name)
        if quantity.value:
            yield Amount(tag, int(quantity.value), f"{quantity.provenance}: {quantity.source}")
