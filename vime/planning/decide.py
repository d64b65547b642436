"""What a plan decides by arithmetic: whether roles that share devices leave them between turns, how much the trainer
recomputes, and how much cache an engine gets beside a trainer. Candidates are weighed in order, the first that fits wins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from vime.errors import Errors, PlanError
from vime.facts.memory import NullMemory
from vime.facts.process import RoleRequest
from vime.facts.transports import Edge, Side
from vime.planning.amounts import DTYPE_BYTES, RECOMPUTE, cache_is_bounded, model_bytes, rank_parameters, speaks_of_cache
from vime.planning.ask import Asker
from vime.planning.cache import Cache, choose_cache, start_share
from vime.planning.memory import Occupant, can_leave, is_tight
from vime.planning.occupants import occupants_of, weigh
from vime.planning.plan import TransportPlan
from vime.planning.rates import at_rates
from vime.planning.situation import Answered, Candidate, Seat, Situation
from vime.planning.time import gathering, loading, together
from vime.planning.transports import choose, hosts, relation

AUTO = "auto"


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
    actor_request = _resident(situation, actor, residency)[0]
    engine_requests: tuple[RoleRequest, ...] = ()
    errors: list[PlanError] = []
    transport = None
    if rollout is not None:
        engine_requests = _resident(situation, rollout, residency)
        try:
            transport = _transport(situation, rollout, asker, (actor_request, engine_requests[0]))
        except PlanError as error:
            errors.append(error)
    first = Answered(actor, actor_request, asker.ask(actor.platform, "memory_backend", actor_request))
    others: list[Answered] = []
    for seat in situation.others:
        request = _resident(situation, seat, residency)[0]
        others.append(Answered(seat, request, asker.ask(seat.platform, "memory_backend", request)))
    sleeps = tuple(asker.ask(rollout.platform, "engine_sleep", r) for r in engine_requests) if rollout else ()
    candidate = Candidate(residency, first, engine_requests, sleeps, transport, (), tuple(others))
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
        tight = any(is_tight(space, occupants) for space in situation.spaces)
        candidate = replace(candidate, tight=tight, chosen={**candidate.chosen, **_share(situation, occupants, args)})
    except PlanError as error:
        errors.append(error)
    return replace(candidate, errors=tuple(errors))


def _cache(situation: Situation, candidate: Candidate, *, choosy: bool) -> Cache | None:
    """The cache of an engine that shares a device with a trainer, where the user says nothing about it."""
    rollout = situation.rollout
    if rollout is None or not situation.engines_share or rollout.space.virtual:
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


def _resident(situation: Situation, seat: Seat, residency: str | None) -> tuple[RoleRequest, ...]:
    """A role's requests with the residency that is decided for the actor's devices, where it is on them."""
    decided = residency if seat is situation.actor or situation.with_actor(seat) else None
    return tuple(replace(request, residency=decided) for request in seat.requests)


def _transport(situation: Situation, rollout: Seat, asker: Asker, requests: tuple[RoleRequest, RoleRequest]) -> TransportPlan:
    actor = situation.actor
    num_bytes = model_bytes(situation.model, situation.dtype)
    ends, engines = (actor.end, rollout.end), [request.placement.slots for request in rollout.requests]
    edge = Edge(*requests, relation=relation(*ends), num_bytes=num_bytes, hosts=hosts(*ends, engines))
    trainer = asker.ask(actor.platform, "transports", edge, Side.TRAINER)
    engine = asker.ask(rollout.platform, "transports", edge, Side.ENGINE)
    load = loading(num_bytes, situation.rates(rollout), in_place=not situation.model.experts)
    elsewhere = situation.model.parameters - sum(rank_parameters(situation.model, actor.role.parallel))
    load = together(load, gathering(elsewhere * DTYPE_BYTES[situation.dtype], situation.rates(actor)))
    offers = at_rates(trainer, situation.rates(actor)), at_rates(engine, situation.rates(rollout))
    return choose(edge, offers, situation.wishes, where=situation.edge_where, load=load)


def _residency_errors(situation: Situation, candidate: Candidate) -> list[PlanError]:
    """What rules a residency out before any byte is counted."""
    where = situation.share_where
    trainers = [one for one in (candidate.actor, *candidate.others) if one.seat.group == situation.actor.group]
    sleeps = candidate.sleeps if situation.engines_share else ()
    if candidate.residency == "park" and not any(can_leave(x) for x in (*(one.backend for one in trainers), *sleeps)):
        backend = candidate.actor.backend
        trainer = backend.reason if isinstance(backend, NullMemory) else "nothing it holds is freed"
        engine = next((s.why for s in sleeps), "") or "its sleep frees nothing"
        who = f"trainer: {trainer}" + (f"; engine: {engine}" if sleeps else "")
        text = f"E231 residency park: nothing can leave the device ({who})"
        return [PlanError(text, where=where, fix="use residency resident, or devices of their own")]
    user = situation.needs.vllm
    unbounded = situation.engines_share and speaks_of_cache(user) and not cache_is_bounded(user)
    if candidate.residency == "resident" and not situation.actor.space.virtual and unbounded:
        text = "E231 residency resident: nothing bounds the engine's cache, so it takes what the trainer needs"
        return [PlanError(text, where=where, fix="set rollout.vllm.kv_cache_memory_bytes, or leave it out")]
    return []
