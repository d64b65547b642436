"""What a plan decides by arithmetic: whether roles that share devices leave them between turns, how much the trainer
recomputes, and how much cache an engine gets beside a trainer. Candidates are weighed in order, the first that fits wins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from vime.errors import Errors, PlanError
from vime.facts.memory import EngineSleep, MemoryBackend, NullMemory
from vime.facts.model import ModelShape
from vime.facts.perf import PerfTable
from vime.facts.process import RoleRequest
from vime.facts.transports import Edge, Side
from vime.planning.amounts import (
    RECOMPUTE,
    cache_is_bounded,
    engine_amounts,
    engine_footprint,
    model_bytes,
    speaks_of_cache,
    staging_amounts,
    trainer_amounts,
    trainer_footprint,
)
from vime.planning.ask import Asker
from vime.planning.cache import Cache, choose_cache, start_share
from vime.planning.memory import (
    TRAINING,
    Occupant,
    PoolSpace,
    can_leave,
    check_memory,
    is_tight,
    plan_memory,
)
from vime.planning.needs import PlanNeeds
from vime.planning.plan import MemoryPlan, PlatformAnswers, TransportPlan
from vime.planning.time import loading
from vime.planning.transports import End, Wishes, choose, relation
from vime.topology.rules import ResolvedRole

AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Seat:
    """A role with its platform, its device set, and the requests of its processes before residency is decided.

    A training role has one request, a rollout role one per engine. `group` names the set of devices.
    """

    role: ResolvedRole
    platform: PlatformAnswers
    space: PoolSpace
    end: End
    group: str
    requests: tuple[RoleRequest, ...]


@dataclass(frozen=True, slots=True)
class Situation:
    """What every candidate has in common. `share_where` is set where actor and engines share devices; `perf` is by pool."""

    model: ModelShape
    dtype: str
    needs: PlanNeeds
    actor: Seat
    rollout: Seat | None
    wishes: Wishes
    edge_where: str | None
    share_where: str | None
    perf: Mapping[str, PerfTable] = field(default_factory=dict)

    @property
    def spaces(self) -> tuple[PoolSpace, ...]:
        """The pools in use, each once."""
        seats = (self.actor, self.rollout) if self.rollout else (self.actor,)
        return tuple({seat.space.name: seat.space for seat in seats}.values())

    def rates(self, seat: Seat) -> PerfTable:
        """What is known of a seat's devices."""
        return self.perf.get(seat.space.name, PerfTable())


@dataclass(frozen=True, slots=True)
class Candidate:
    """The answers for one residency, what is recomputed and what the engine gets with it. It fits where there are no errors.

    `chosen` are engine arguments that the plan sets where the user does not; `cache_how` is the arithmetic of the cache.
    `tight` is true where training leaves little free.
    """

    residency: str | None
    actor_request: RoleRequest
    engine_requests: tuple[RoleRequest, ...]
    backend: MemoryBackend | NullMemory
    sleeps: tuple[EngineSleep, ...]
    transport: TransportPlan | None
    errors: tuple[PlanError, ...]
    recompute: str = RECOMPUTE[0]
    recompute_why: str = ""
    chosen: Mapping[str, Any] = field(default_factory=dict)
    cache_how: str = ""
    tight: bool = False


def decide(situation: Situation, asker: Asker, residencies: Sequence[str | None]) -> Candidate:
    """Ask transports, memory and sleep once for every residency in question; return the first candidate that fits.

    Recomputation is paid for every token and a switch for every step, so the least recomputation comes first. What is
    chosen by itself must leave `NEAR_LIMIT` free, unless nothing does.

    Raises:
        PlanError: E231 when a share group neither fits together nor can leave; otherwise the only candidate's errors.
    """
    answers: dict[str | None, Candidate] = {}
    by_itself = situation.needs.recompute == AUTO
    options = RECOMPUTE if by_itself else (situation.needs.recompute,)
    tried: list[Candidate] = []
    for recompute in options:
        for residency in residencies:
            if residency not in answers:
                answers[residency] = ask(situation, asker, residency)
            candidate = fit(situation, replace(answers[residency], recompute=recompute), choosy=len(residencies) > 1)
            if not candidate.errors and not (by_itself and candidate.tight):
                return replace(candidate, recompute_why=_why(situation, candidate, tried))
            tried.append(candidate)
    last = tried[-len(residencies) :]
    if fits := [c for c in last if not c.errors]:
        return replace(fits[0], recompute_why=_why(situation, fits[0], tried))
    if len(last) == 1:
        errors = last[0].errors
        raise errors[0] if len(errors) == 1 else Errors(errors)
    reasons = "; ".join(f"{c.residency}: {c.errors[0].what}" for c in last)
    text = f"E231 roles that share devices neither fit together nor can take turns: {reasons}"
    raise PlanError(text, where=situation.share_where, fix=last[0].errors[0].fix)


def _why(situation: Situation, chosen: Candidate, tried: Sequence[Candidate]) -> str:
    """Why this much is recomputed, with what ruled less out."""
    if situation.needs.recompute != AUTO:
        return "yours (trainer.recompute)"
    less = [c for c in tried if RECOMPUTE.index(c.recompute) < RECOMPUTE.index(chosen.recompute)]
    if not less:
        return "chosen by the plan: what training needs fits without"
    named = {(c.recompute, c.residency): _reason(c) for c in less}
    return "chosen by the plan: " + "; ".join(
        f"{recompute}{f', {residency}' if residency else ''}: {reason}" for (recompute, residency), reason in named.items()
    )


def _reason(candidate: Candidate) -> str:
    return candidate.errors[0].what if candidate.errors else "training would leave too little free"


def ask(situation: Situation, asker: Asker, residency: str | None) -> Candidate:
    """One residency's answers, with what rules it out before any byte is counted."""
    actor, rollout = situation.actor, situation.rollout
    actor_request = replace(actor.requests[0], residency=residency)
    engine_requests = _resident(rollout.requests if rollout else (), residency)
    errors: list[PlanError] = []
    transport = None
    if rollout is not None:
        try:
            transport = _transport(situation, rollout, asker, (actor_request, engine_requests[0]))
        except PlanError as error:
            errors.append(error)
    backend = asker.ask(actor.platform, "memory_backend", actor_request)
    sleeps = tuple(asker.ask(rollout.platform, "engine_sleep", r) for r in engine_requests) if rollout else ()
    candidate = Candidate(residency, actor_request, engine_requests, backend, sleeps, transport, ())
    return replace(candidate, errors=(*errors, *_residency_errors(situation, candidate)))


def fit(situation: Situation, candidate: Candidate, *, choosy: bool) -> Candidate:
    """The candidate with its cache and its memory weighed. `choosy`: another residency may serve better than a small cache."""
    errors = list(candidate.errors)
    try:
        if (cache := _cache(situation, candidate, choosy=choosy)) is not None:
            candidate = replace(candidate, chosen=cache.args, cache_how=cache.how)
        args = {**candidate.chosen, **situation.needs.vllm}
        _, found, _ = weigh(situation, candidate, args)
        errors += found
        occupants = occupants_of(situation, candidate, args)
        tight = any(is_tight(space, occupants, TRAINING) for space in situation.spaces)
        candidate = replace(candidate, tight=tight, chosen={**candidate.chosen, **_share(situation, occupants, args)})
    except PlanError as error:
        errors.append(error)
    return replace(candidate, errors=tuple(errors))


def _cache(situation: Situation, candidate: Candidate, *, choosy: bool) -> Cache | None:
    """The cache of an engine that shares a device with a trainer, where the user says nothing about it."""
    rollout = situation.rollout
    if rollout is None or situation.share_where is None or rollout.space.virtual:
        return None
    needs = situation.needs
    if speaks_of_cache(needs.vllm):
        return None
    occupants = occupants_of(situation, candidate, needs.vllm)
    shape, engines = (situation.model, situation.dtype, rollout.role.parallel), len(rollout.requests)
    least_useful = choosy and candidate.residency == "resident"
    return choose_cache(rollout.space, occupants, shape, needs, engines=engines, useful=least_useful)


def _share(situation: Situation, occupants: Sequence[Occupant], args: Mapping[str, Any]) -> dict[str, Any]:
    """`gpu_memory_utilization` beside a cache that is bounded in bytes: a starting engine checks for no more than it takes."""
    rollout = situation.rollout
    if rollout is None or rollout.space.virtual:
        return {}
    return start_share(rollout.space, next(o for o in occupants if o.role is rollout.role), args)


def _resident(requests: tuple[RoleRequest, ...], residency: str | None) -> tuple[RoleRequest, ...]:
    return tuple(replace(request, residency=residency) for request in requests)


def _transport(situation: Situation, rollout: Seat, asker: Asker, requests: tuple[RoleRequest, RoleRequest]) -> TransportPlan:
    actor = situation.actor
    num_bytes = model_bytes(situation.model, situation.dtype)
    edge = Edge(*requests, relation=relation(actor.end, rollout.end), num_bytes=num_bytes)
    trainer = asker.ask(actor.platform, "transports", edge, Side.TRAINER)
    engine = asker.ask(rollout.platform, "transports", edge, Side.ENGINE)
    load = loading(num_bytes, situation.rates(rollout), in_place=not situation.model.experts)
    return choose(edge, (trainer, engine), situation.wishes, where=situation.edge_where, load=load)


def _residency_errors(situation: Situation, candidate: Candidate) -> list[PlanError]:
    """What rules a residency out before any byte is counted."""
    where = situation.share_where
    if candidate.residency == "park" and not any(can_leave(x) for x in (candidate.backend, *candidate.sleeps)):
        trainer = candidate.backend.reason if isinstance(candidate.backend, NullMemory) else "nothing it holds is freed"
        engine = next((s.why for s in candidate.sleeps), "") or "its sleep frees nothing"
        text = f"E231 residency park: nothing can leave the device (trainer: {trainer}; engine: {engine})"
        return [PlanError(text, where=where, fix="use residency resident, or devices of their own")]
    user = situation.needs.vllm
    unbounded = speaks_of_cache(user) and not cache_is_bounded(user)
    if candidate.residency == "resident" and not situation.actor.space.virtual and unbounded:
        text = "E231 residency resident: nothing bounds the engine's cache, so it takes what the trainer needs"
        return [PlanError(text, where=where, fix="set rollout.vllm.kv_cache_memory_bytes, or leave it out")]
    return []


def weigh(
    situation: Situation, candidate: Candidate, engine_args: Mapping[str, Any]
) -> tuple[MemoryPlan, list[PlanError], list[str]]:
    """Memory of a candidate with these engine arguments: the plan, what does not fit, what nearly does not."""
    occupants = occupants_of(situation, candidate, engine_args)
    published = model_bytes(situation.model, situation.dtype) if situation.rollout else 0
    plan = plan_memory(situation.spaces, occupants, published_bytes=published)
    checked = [check_memory(space, plan, occupants) for space in situation.spaces]
    return plan, [e for errors, _ in checked for e in errors], [n for _, notes in checked for n in notes]


def occupants_of(situation: Situation, candidate: Candidate, engine_args: Mapping[str, Any]) -> list[Occupant]:
    """Everyone on the devices, with engine arguments as given."""
    parks = candidate.residency == "park"
    actor, rollout, model, dtype = situation.actor, situation.rollout, situation.model, situation.dtype
    needs = replace(situation.needs, recompute=candidate.recompute)
    amounts = [*trainer_amounts(model, dtype, actor.role.parallel, needs), *trainer_footprint(situation.rates(actor))]
    if candidate.transport is not None and not actor.space.virtual:
        amounts += staging_amounts(candidate.transport)
    occupants = [Occupant(actor.role, actor.group, tuple(amounts), candidate.backend, parks, _nodes(actor))]
    if rollout is not None:
        parallel = rollout.role.parallel
        footprint = engine_footprint(situation.rates(rollout), model, parallel, engine_args)
        beside, capacity = sum(a.num_bytes for a in footprint), rollout.space.device_bytes
        held = engine_amounts(model, dtype, parallel, engine_args, capacity=capacity, beside=beside)
        if candidate.cache_how:
            held = tuple(replace(a, how=candidate.cache_how) if a.how == "kv_cache_memory_bytes" else a for a in held)
        occupants.append(
            Occupant(rollout.role, rollout.group, (*held, *footprint), candidate.sleeps[0], parks, _nodes(rollout))
        )
    return occupants


def _nodes(seat: Seat) -> tuple[int, ...]:
    return tuple(slot.node for slot in seat.end.slots)
