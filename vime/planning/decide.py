"""Whether roles that share devices leave them between turns: candidates are weighed, the first that fits wins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vime.errors import Errors, PlanError
from vime.facts.memory import EngineSleep, MemoryBackend, NullMemory
from vime.facts.model import ModelShape
from vime.facts.process import RoleRequest
from vime.facts.transports import Edge, Side
from vime.planning.ask import Asker
from vime.planning.memory import (
    Occupant,
    PoolSpace,
    cache_is_bounded,
    can_leave,
    check_memory,
    engine_amounts,
    model_bytes,
    plan_memory,
    trainer_amounts,
)
from vime.planning.needs import PlanNeeds
from vime.planning.plan import MemoryPlan, PlatformAnswers, TransportPlan
from vime.planning.transports import End, Wishes, choose, relation
from vime.topology.rules import ResolvedRole


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
    """What every candidate has in common. `share_where` is set where actor and engines share devices."""

    model: ModelShape
    dtype: str
    needs: PlanNeeds
    actor: Seat
    rollout: Seat | None
    wishes: Wishes
    edge_where: str | None
    share_where: str | None

    @property
    def spaces(self) -> tuple[PoolSpace, ...]:
        """The pools in use, each once."""
        seats = (self.actor, self.rollout) if self.rollout else (self.actor,)
        return tuple({seat.space.name: seat.space for seat in seats}.values())


@dataclass(frozen=True, slots=True)
class Candidate:
    """The answers for one residency, and why it is out (no errors: it fits)."""

    residency: str | None
    actor_request: RoleRequest
    engine_requests: tuple[RoleRequest, ...]
    backend: MemoryBackend | NullMemory
    sleeps: tuple[EngineSleep, ...]
    transport: TransportPlan | None
    errors: tuple[PlanError, ...]


def decide(situation: Situation, asker: Asker, residencies: Sequence[str | None]) -> Candidate:
    """Ask transports, memory and sleep once for every residency; return the first that fits.

    Raises:
        PlanError: E231 when a share group neither fits together nor can leave; otherwise the only candidate's errors.
    """
    tried: list[Candidate] = []
    for residency in residencies:
        candidate = consider(situation, asker, residency)
        if not candidate.errors:
            return candidate
        tried.append(candidate)
    if len(tried) == 1:
        errors = tried[0].errors
        raise errors[0] if len(errors) == 1 else Errors(errors)
    reasons = "; ".join(f"{c.residency}: {c.errors[0].what}" for c in tried)
    text = f"E231 roles that share devices neither fit together nor can take turns: {reasons}"
    raise PlanError(text, where=situation.share_where, fix=tried[0].errors[0].fix)


def consider(situation: Situation, asker: Asker, residency: str | None) -> Candidate:
    """One residency's answers, weighed."""
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
    errors += _residency_errors(situation, candidate)
    try:
        _, found, _ = weigh(situation, candidate, situation.needs.vllm)
        errors += found
    except PlanError as error:
        errors.append(error)
    return replace(candidate, errors=tuple(errors))


def _resident(requests: tuple[RoleRequest, ...], residency: str | None) -> tuple[RoleRequest, ...]:
    return tuple(replace(request, residency=residency) for request in requests)


def _transport(situation: Situation, rollout: Seat, asker: Asker, requests: tuple[RoleRequest, RoleRequest]) -> TransportPlan:
    actor = situation.actor
    num_bytes = model_bytes(situation.model, situation.dtype)
    edge = Edge(*requests, relation=relation(actor.end, rollout.end), num_bytes=num_bytes)
    trainer = asker.ask(actor.platform, "transports", edge, Side.TRAINER)
    engine = asker.ask(rollout.platform, "transports", edge, Side.ENGINE)
    return choose(edge, (trainer, engine), situation.wishes, where=situation.edge_where)


def _residency_errors(situation: Situation, candidate: Candidate) -> list[PlanError]:
    """What rules a residency out before any byte is counted."""
    where = situation.share_where
    if candidate.residency == "park" and not any(can_leave(x) for x in (candidate.backend, *candidate.sleeps)):
        trainer = candidate.backend.reason if isinstance(candidate.backend, NullMemory) else "nothing it holds is freed"
        engine = next((s.why for s in candidate.sleeps), "") or "its sleep frees nothing"
        text = f"E231 residency park: nothing can leave the device (trainer: {trainer}; engine: {engine})"
        return [PlanError(text, where=where, fix="use residency resident, or devices of their own")]
    shares_a_device = candidate.residency == "resident" and not situation.actor.space.virtual
    if shares_a_device and not cache_is_bounded(situation.needs.vllm):
        text = "E231 residency resident: nothing bounds the engine's cache, so it takes what the trainer needs"
        return [PlanError(text, where=where, fix="set rollout.vllm.kv_cache_memory_bytes")]
    return []


def weigh(
    situation: Situation, candidate: Candidate, engine_args: Mapping[str, Any]
) -> tuple[MemoryPlan, list[PlanError], list[str]]:
    """Memory of a candidate with these engine arguments: the plan, what does not fit, what nearly does not."""
    occupants = _occupants(situation, candidate, engine_args)
    published = model_bytes(situation.model, situation.dtype) if situation.rollout else 0
    plan = plan_memory(situation.spaces, occupants, published_bytes=published)
    checked = [check_memory(space, plan, occupants) for space in situation.spaces]
    return plan, [e for errors, _ in checked for e in errors], [n for _, notes in checked for n in notes]


def _occupants(situation: Situation, candidate: Candidate, engine_args: Mapping[str, Any]) -> list[Occupant]:
    parks = candidate.residency == "park"
    actor, rollout, model, dtype = situation.actor, situation.rollout, situation.model, situation.dtype
    amounts = trainer_amounts(model, dtype, actor.role.parallel, situation.needs)
    occupants = [Occupant(actor.role, actor.group, amounts, candidate.backend, parks, _nodes(actor))]
    if rollout is not None:
        held = engine_amounts(model, dtype, rollout.role.parallel, engine_args, capacity=rollout.space.device_bytes)
        occupants.append(Occupant(rollout.role, rollout.group, held, candidate.sleeps[0], parks, _nodes(rollout)))
    return occupants


def _nodes(seat: Seat) -> tuple[int, ...]:
    return tuple(slot.node for slot in seat.end.slots)
