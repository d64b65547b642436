"""Seconds of a step, phase by phase, from a plan. Every number is a platform's rate or a named assumption."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from vime.facts.inventory import in_one_domain
from vime.facts.memory import Tag
from vime.facts.perf import Provenance, Quantity
from vime.planning.amounts import DTYPE_BYTES, MAX_SEQUENCES, given, role_parameters, token_bytes
from vime.planning.assume import NO_WORDS, Assumption, Assumptions, assumptions
from vime.planning.decode import Engine, EngineRates, Lengths, decode_seconds, prefill_seconds, read_weights, touched
from vime.planning.place import nodes_of
from vime.planning.plan import EnginePlan, Plan, TrainerPlan, pool_of
from vime.planning.switching import switches
from vime.planning.time import Estimate, least_certain
from vime.planning.train_time import (
    Trained,
    backward_seconds,
    expert_bytes,
    forward_seconds,
    gradient_bytes,
    reduction_bytes,
)
from vime.planning.units import decimal

ENGINES, SCORES, TRAINER, BETWEEN = "engines", "scores", "trainer", "between"


@dataclass(frozen=True, slots=True)
class Part:
    """A phase of a step, and whose time it is. Scores and trainers on different `devices` run side by side."""

    name: str
    side: str
    estimate: Estimate
    devices: str = ""


@dataclass(frozen=True, slots=True)
class StepTime:
    """`total` has no seconds where any part has none. `ahead` is true where engines sample while the trainer trains."""

    parts: tuple[Part, ...]
    assumed: Assumptions
    total: Estimate
    ahead: bool
    groups: int
    group_size: int

    def seconds(self, name: str) -> float | None:
        """Seconds of a part; None where they are unknown. Raises KeyError."""
        return {part.name: part.estimate.seconds for part in self.parts}[name]


@dataclass(frozen=True, slots=True)
class _Rate:
    """A rate as it is reached: None unknown, with the name to look for."""

    value: float | None
    provenance: str
    name: str


def step_time(plan: Plan, assume: Mapping[str, float] = NO_WORDS) -> StepTime:
    """The step of a planned run. `assume` are the user's values over the default assumptions.

    Raises:
        ConfigError: an assumption that does not exist or makes no sense.
    """
    tables = plan.perf[plan.actor.pool], plan.perf[(plan.engines[0] if plan.engines else plan.actor).pool]
    assumed = assumptions(plan.needs, assume, layers=plan.model.layers, tables=tables)
    parts = [*_sampling(plan, assumed), *_roles(plan, assumed), *_between(plan, assumed)]
    ahead = bool(plan.engines) and not plan.shared and plan.needs.max_staleness > 0
    total = _total(parts, ahead=ahead)
    return StepTime(tuple(parts), assumed, total, ahead, plan.needs.batch_size, plan.needs.group_size)


def _total(parts: Sequence[Part], *, ahead: bool) -> Estimate:
    unknown = [part.name for part in parts if part.estimate.seconds is None]
    if unknown:
        return Estimate(None, "unknown", f"without {', '.join(unknown)}")
    engines, between = (sum(_seconds(p) for p in parts if p.side == side) for side in (ENGINES, BETWEEN))
    trainers = _longest(parts, SCORES) + _longest(parts, TRAINER)
    both = max(engines, trainers) if ahead else engines + trainers
    how = "the longer of engines and trainer, and what is between" if ahead else "one part after the other"
    if len({part.devices for part in parts if part.side in (SCORES, TRAINER)}) > 1:
        how += "; training roles on devices of their own work side by side"
    return Estimate(both + between, least_certain([p.estimate.provenance for p in parts]), how)


def _seconds(part: Part) -> float:
    return part.estimate.seconds or 0.0


def _longest(parts: Sequence[Part], side: str) -> float:
    """Seconds of the set of devices that takes the longest; its roles work one after the other."""
    mine = [part for part in parts if part.side == side]
    sets = {part.devices for part in mine}
    return max((sum(_seconds(part) for part in mine if part.devices == devices) for devices in sets), default=0.0)


# ---- rates


def _rate(quantity: Quantity, name: str, *shares: Assumption) -> _Rate:
    if not quantity.value:
        return _Rate(None, "unknown", name)
    value = quantity.value
    for share in shares:
        value *= share.value
    return _Rate(value, least_certain([str(quantity.provenance), *(share.provenance for share in shares)]), name)


def _products(plan: Plan, pool: str, assumed: Assumptions, share: str) -> _Rate:
    """Matrix products as they are reached: a data sheet's rate is not what even one large product reaches."""
    quantity = plan.perf[pool].get("matmul")
    from_sheet = quantity.provenance not in (Provenance.MEASURED, Provenance.YOURS)
    shares = [assumed[share], *([assumed["matmul_share"]] if from_sheet else [])]
    return _rate(quantity, f"{pool}.matmul", *shares)


def _link(plan: Plan, member: TrainerPlan | EnginePlan) -> _Rate:
    """Between the devices of a role: within a node or one fabric, else over the network."""
    nodes = [pool_of(plan.pools, member.pool).inventories[n] for n in nodes_of(member.request.placement.slots)]
    name = "scale_up" if len(nodes) == 1 or in_one_domain(nodes) else "network"
    return _rate(plan.perf[member.pool].get(name), f"{member.pool}.{name}")


def _estimate(seconds: float, how: str, rates: Sequence[_Rate], used: Sequence[Assumption]) -> Estimate:
    return Estimate(seconds, least_certain([*(r.provenance for r in rates), *(a.provenance for a in used)]), how)


def _missing(rates: Sequence[_Rate]) -> Estimate | None:
    unknown = [rate.name for rate in rates if rate.value is None]
    return Estimate(None, "unknown", f"rate {' and '.join(unknown)} is unknown") if unknown else None


def _lengths(assumed: Assumptions) -> Lengths:
    prompt, mean, longest = (assumed[name].value for name in ("prompt_tokens", "response_tokens", "longest_tokens"))
    return Lengths(prompt, mean, longest)


def _of(assumed: Assumptions, *names: str) -> list[Assumption]:
    return [assumed[name] for name in names]


# ---- engines


def _sampling(plan: Plan, assumed: Assumptions) -> Iterator[Part]:
    if not plan.engines:
        return
    first, parallel = plan.engines[0], plan.engines[0].request.parallel
    memory = _rate(plan.perf[first.pool].get("device_memory"), f"{first.pool}.device_memory", assumed["memory_share"])
    products, link = _products(plan, first.pool, assumed, "prefill_share"), _link(plan, first)
    rates = [memory, products, *([link] if parallel.tp > 1 else [])]
    if (missing := _missing(rates)) is not None:
        yield from (Part(name, ENGINES, missing) for name in ("prefill", "decode"))
        return
    assert memory.value
    assert products.value
    share, step_s, reduce_s = (assumed[name].value for name in ("expert_share", "decode_step_s", "all_reduce_s"))
    reached = EngineRates(memory.value, products.value, share, step_s, reduce_s, link.value)
    engine = Engine(plan.model, parallel, plan.dtype, DTYPE_BYTES[plan.dtype], reached)
    yield from _sampling_parts(plan, engine, assumed, rates)


def _sampling_parts(plan: Plan, engine: Engine, assumed: Assumptions, rates: Sequence[_Rate]) -> Iterator[Part]:
    lengths, total = _lengths(assumed), plan.needs.batch_size * plan.needs.group_size / assumed["groups_kept"].value
    mine = -(-total // len(plan.engines))
    at_once, why = _at_once(plan, lengths)
    full, last = decode_seconds(engine, mine, lengths, at_once=at_once)
    running = min(mine, at_once)
    used = _of(assumed, "prompt_tokens", "groups_kept", "prefill_share")
    used += _of(assumed, "expert_share") if plan.model.experts else []
    work = f"{mine:.0f} prompts x {lengths.prompt:.0f} tokens an engine"
    how = f"{work}, over {engine.workers} devices; nothing from a prefix cache"
    yield Part("prefill", ENGINES, _estimate(prefill_seconds(engine, mine, lengths), how, rates, used))
    used = _of(assumed, "response_tokens", "longest_tokens", "groups_kept", "memory_share", "decode_step_s")
    used += _of(assumed, "all_reduce_s") if engine.parallel.tp > 1 else []
    if full:
        how = f"{mine - running:.0f} of {mine:.0f} sequences an engine wait for a place among {running:.0f} ({why})"
        yield Part("full batches", ENGINES, _estimate(full, how, rates, used))
    read = read_weights(plan.model, running, engine.width)
    experts = f", {touched(plan.model, running):.0%} of the experts" if plan.model.experts else ""
    how = (
        f"{lengths.longest:.0f} decode steps from {running:.0f} sequences an engine down to 1; the first step reads"
        f" {read / 1e9:.3g} GB of weights{experts}, and {token_bytes(plan.model, plan.dtype, engine.parallel)} bytes a token of"
        " context on each device"
    )
    yield Part("decode", ENGINES, _estimate(last, how, rates, used))


def _at_once(plan: Plan, lengths: Lengths) -> tuple[float, str]:
    """Sequences that an engine runs together: by its argument, and by its cache where the plan bounds that."""
    engine = plan.engines[0]
    asked = given({arg.name: arg.value for arg in engine.args}, "max_num_seqs")
    bound: float = asked if isinstance(asked, int) and asked > 0 else MAX_SEQUENCES
    role, parallel = engine.request.role, engine.request.parallel
    cache = max((r.num_bytes for r in plan.memory.rows if (r.role, r.tag) == (role, str(Tag.KV))), default=0)
    room = cache / token_bytes(plan.model, plan.dtype, parallel) / lengths.context * parallel.dp
    if 1 <= room < bound:
        return float(int(room)), f"what {cache / 1e9:.3g} GB of cache hold"
    return bound, "max_num_seqs"


# ---- trainer


def _roles(plan: Plan, assumed: Assumptions) -> Iterator[Part]:
    """Scores of every role that gives some, then what is trained, the actor last."""
    for role in plan.others:
        batch, products = _batch(plan, role, assumed), _products(plan, role.pool, assumed, "trainer_share")
        name = f"values of {role.role}" if role.task == "critic" else f"scores of {role.role}"
        yield Part(name, SCORES, _score(batch, products, assumed), _devices(plan, role))
    for role in (*(other for other in plan.others if other.trained), plan.actor):
        yield from _training(plan, role, assumed)


def _devices(plan: Plan, role: TrainerPlan) -> str:
    return plan.actor.role if plan.shares_actor(role) else role.role


def _batch(plan: Plan, role: TrainerPlan, assumed: Assumptions) -> Trained:
    needs, model = plan.needs, plan.model_of(role)
    held = replace(model, parameters=role_parameters(model, role.task))
    sequences, width = needs.batch_size * needs.group_size, DTYPE_BYTES[plan.dtype]
    return Trained(held, role.request.parallel, sequences, _lengths(assumed), width, plan.recompute)


def _score(batch: Trained, products: _Rate, assumed: Assumptions) -> Estimate:
    if (missing := _missing([products])) is not None:
        return missing
    assert products.value
    used = _of(assumed, "prompt_tokens", "response_tokens", "trainer_share")
    used += _of(assumed, "expert_share") if batch.model.experts else []
    how = f"a forward pass over {batch.tokens:.0f} tokens over {batch.parallel.devices} devices, before the update"
    return _estimate(forward_seconds(batch, products.value, assumed["expert_share"].value), how, [products], used)


def _training(plan: Plan, role: TrainerPlan, assumed: Assumptions) -> Iterator[Part]:
    """The passes of a trained role; those of another one than the actor have its name."""
    needs, batch = plan.needs, _batch(plan, role, assumed)
    products, devices = _products(plan, role.pool, assumed, "trainer_share"), _devices(plan, role)
    of = "" if role is plan.actor else f" of {role.role}"
    passes = needs.log_prob_passes if role is plan.actor else 0
    for part in _passes(batch, products, assumed, log_probs=passes):
        yield replace(part, name=part.name + of, devices=devices)
    if role.request.parallel.devices > 1:
        estimate = _exchange(plan, batch, _link(plan, role), assumed, passes)
        yield Part(f"between ranks{of}", TRAINER, estimate, devices)


def _passes(batch: Trained, products: _Rate, assumed: Assumptions, *, log_probs: int) -> Iterator[Part]:
    names = ("forward", "backward", *(("log-probs",) if log_probs else ()))
    if (missing := _missing([products])) is not None:
        yield from (Part(name, TRAINER, missing) for name in names)
        return
    assert products.value
    share = assumed["expert_share"].value
    used = _of(assumed, "prompt_tokens", "response_tokens", "trainer_share")
    used += _of(assumed, "expert_share") if batch.model.experts else []
    once, back = forward_seconds(batch, products.value, share), backward_seconds(batch, products.value, share)
    work = f"{batch.tokens:.0f} tokens over {batch.parallel.devices} devices"
    if log_probs:
        how = f"{log_probs} forward pass over {work}, before the update"
        yield Part("log-probs", TRAINER, _estimate(log_probs * once, how, [products], used))
    yield Part("forward", TRAINER, _estimate(once, f"{work} at {decimal(products.value, 'FLOP/s')} each", [products], used))
    again = "" if batch.recompute == "none" else f", recomputing {batch.recompute}"
    yield Part("backward", TRAINER, _estimate(back, f"twice the forward pass{again}", [products], used))


def _exchange(plan: Plan, batch: Trained, link: _Rate, assumed: Assumptions, log_probs: int) -> Estimate:
    """Gradients and parameters of every update, and what experts and tensor parallelism send in every pass."""
    needs, full = plan.needs, plan.recompute == "full"
    passes = 2 + log_probs + full
    gradients = needs.updates_per_step * gradient_bytes(batch.model, batch.parallel, batch.width)
    inside = expert_bytes(batch, passes) + reduction_bytes(batch, passes)
    if gradients + inside == 0:
        return Estimate(0.0, "derived", "nothing is sent")
    if (missing := _missing([link])) is not None:
        return missing
    assert link.value
    how = (
        f"{gradients / 1e9:.3g} GB of gradients and parameters, {inside / 1e9:.3g} GB inside {passes} passes, none of it hidden"
    )
    used = _of(assumed, "prompt_tokens", "response_tokens")
    return _estimate((gradients + inside) / link.value, f"{how}, at {decimal(link.value, 'B/s')}", [link], used)


# ---- between


def _between(plan: Plan, assumed: Assumptions) -> Iterator[Part]:
    if plan.transport is not None:
        yield Part("update", BETWEEN, Estimate(plan.transport.seconds, plan.transport.provenance, plan.transport.how))
    for role, one in switches(plan):
        there = None if one.seconds is None else 2 * one.seconds
        yield Part(f"switch of {role}", BETWEEN, Estimate(there, one.provenance, f"there and back: {one.how}"))
    other = assumed["other_s"]
    yield Part("other", BETWEEN, Estimate(other.value, other.provenance, other.source))
