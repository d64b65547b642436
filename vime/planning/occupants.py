"""Who is on the devices with a candidate, and what that adds up to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vime.errors import PlanError
from vime.planning.amounts import (
    Amount,
    engine_amounts,
    engine_footprint,
    model_bytes,
    staging_amounts,
    trainer_amounts,
    trainer_footprint,
)
from vime.planning.memory import Occupant, check_memory, plan_memory, turns_of
from vime.planning.plan import MemoryPlan
from vime.planning.situation import Answered, Candidate, Seat, Situation


def weigh(
    situation: Situation, candidate: Candidate, engine_args: Mapping[str, Any]
) -> tuple[MemoryPlan, list[PlanError], list[str]]:
    """Memory of a candidate with these engine arguments: the plan, what does not fit, what nearly does not."""
    occupants = occupants_of(situation, candidate, engine_args)
    published = model_bytes(situation.model, situation.dtype) if situation.rollout else 0
    copies = situation.needs.copies_checkpoints
    plan = plan_memory(situation.spaces, occupants, published_bytes=published, copies=copies)
    checked = [check_memory(space, plan, occupants) for space in situation.spaces]
    return plan, [e for errors, _ in checked for e in errors], [n for _, notes in checked for n in notes]


def occupants_of(situation: Situation, candidate: Candidate, engine_args: Mapping[str, Any]) -> list[Occupant]:
    """Everyone on the devices, with engine arguments as given."""
    turns = turns_of((seat.role, seat.group) for seat in situation.seats)
    found: list[Occupant] = []
    for answered in (candidate.actor, *candidate.others):
        seat, amounts = answered.seat, _trainer(situation, candidate, answered)
        found.append(
            Occupant(
                seat.role,
                seat.group,
                amounts,
                answered.backend,
                _parks(situation, candidate, seat),
                seat.nodes,
                turns[seat.role.name],
            )
        )
    if situation.rollout is not None:
        seat, amounts = situation.rollout, _engine(situation, candidate, situation.rollout, engine_args)
        parks = _parks(situation, candidate, seat)
        found.append(Occupant(seat.role, seat.group, amounts, candidate.sleeps[0], parks, seat.nodes, turns[seat.role.name]))
    return found


def _parks(situation: Situation, candidate: Candidate, seat: Seat) -> bool:
    return candidate.residency == "park" and situation.with_actor(seat)


def _trainer(situation: Situation, candidate: Candidate, answered: Answered) -> tuple[Amount, ...]:
    seat, needs = answered.seat, replace(situation.needs, recompute=candidate.recompute)
    held = trainer_amounts(seat.model, situation.dtype, seat.role.parallel, needs, task=seat.role.task)
    transport = candidate.transport if seat is situation.actor and not seat.space.virtual else None
    buffers = staging_amounts(transport) if transport is not None else ()
    return (*held, *trainer_footprint(situation.rates(seat)), *buffers)


def _engine(situation: Situation, candidate: Candidate, seat: Seat, args: Mapping[str, Any]) -> tuple[Amount, ...]:
    model, parallel = situation.model, seat.role.parallel
    footprint = engine_footprint(situation.rates(seat), model, parallel, args)
    beside, capacity = sum(a.num_bytes for a in footprint), seat.space.device_bytes
    held = engine_amounts(model, situation.dtype, parallel, args, capacity=capacity, beside=beside)
    if candidate.cache_how:
        held = tuple(replace(a, how=candidate.cache_how) if a.how == "kv_cache_memory_bytes" else a for a in held)
    return (*held, *footprint)
