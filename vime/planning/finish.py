"""What is asked once the residency is decided: collective, environment, engine defaults, masks; and the last sum of memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from vime.errors import Errors
from vime.facts.collectives import GroupRequest
from vime.planning.ask import Asker
from vime.planning.communicators import crowded_domains
from vime.planning.engine_args import engine_args
from vime.planning.env import EdgeEnd, check_equal, merge_env
from vime.planning.masks import check_untouched, process_mask
from vime.planning.occupants import weigh
from vime.planning.plan import EnginePlan, EnvReason, Plan, PoolPlan, Task, TrainerPlan
from vime.planning.situation import Answered, Candidate, Situation
from vime.topology.load import LoadedTopology

Rules = tuple[Mapping[str, Any], ...]


@dataclass(frozen=True, slots=True)
class Rest:
    """The pools by name, and the environment that every process inherits."""

    pools: Mapping[str, PoolPlan]
    inherited: Mapping[str, str]


def finish(loaded: LoadedTopology, situation: Situation, candidate: Candidate, asker: Asker, rest: Rest) -> Plan:
    """The plan without its pools and rates. Raises what contradicts or does not fit after all."""
    trainer, trainer_rules, reasons = _trainer(loaded, (situation, candidate.actor), asker, rest)
    others: list[TrainerPlan] = []
    for answered in candidate.others:
        plan, _, why = _trainer(loaded, (situation, answered), asker, rest)
        others.append(plan)
        reasons += why
    engines: list[EnginePlan] = []
    protocol = candidate.transport.protocol if candidate.transport is not None else None
    for index in range(len(candidate.engine_requests)):
        engine, rules, why = _engine(loaded, (situation, candidate, index), asker, rest)
        ends = EdgeEnd(trainer_rules, trainer.env), EdgeEnd(rules, engine.env)
        check_equal(*ends, protocol=protocol, inherited=rest.inherited, where=loaded.where("env"))
        engines.append(engine)
        reasons += why if index == 0 else ()
    args = {arg.name: arg.value for arg in engines[0].args} if engines else {}
    memory, errors, notes = weigh(situation, candidate, args)
    if errors:
        raise errors[0] if len(errors) == 1 else Errors(errors)
    return Plan(
        topology=loaded.topology.name,
        model=situation.model,
        dtype=situation.dtype,
        pools=(),
        actor=trainer,
        engines=tuple(engines),
        shared=situation.engines_share,
        residency=candidate.residency,
        transport=candidate.transport,
        memory=memory,
        perf={},
        start_timeout_s=loaded.topology.limits.start_timeout or situation.needs.start_timeout_s,
        notes=(*notes, *crowded_domains((trainer, *others), candidate.engine_requests, candidate.transport)),
        env_reasons=reasons,
        recompute=candidate.recompute,
        recompute_why=candidate.recompute_why,
        needs=situation.needs,
        others=tuple(others),
    )


def _trainer(
    loaded: LoadedTopology, chosen: tuple[Situation, Answered], asker: Asker, rest: Rest
) -> tuple[TrainerPlan, Rules, tuple[EnvReason, ...]]:
    situation, answered = chosen
    seat, request = answered.seat, answered.request
    collective = asker.ask(seat.platform, "collective", request, GroupRequest("trainer", seat.role.devices))
    process_env = asker.ask(seat.platform, "process_env", request)
    backend_env = getattr(answered.backend, "env", {})
    runtime = asker.ask(seat.platform, "trainer_runtime", request)
    adaptation = asker.ask(seat.platform, "megatron_adapt", request, seat.model)
    layers, pool = (process_env, backend_env), rest.pools[seat.role.pool]
    user, where = loaded.topology.env.trainer, loaded.where("env", "trainer")
    env, reasons = merge_env(layers, user, process=seat.role.name, where=where, inherited=rest.inherited)
    check_untouched(pool.binding, env, process=seat.role.name, where=where)
    slots = request.placement.slots
    masks = tuple(process_mask(pool.binding, pool.entries[slot.node], [slot.device]) for slot in slots)
    plan = TrainerPlan(
        pool=seat.role.pool,
        request=request,
        runtime=runtime,
        adaptation=adaptation,
        collective=collective,
        memory=answered.backend,
        env=env,
        masks=masks,
        task=cast(Task, seat.role.task),
        model=None if seat.model == situation.model else seat.model,
    )
    return plan, layers, reasons


def _engine(
    loaded: LoadedTopology, chosen: tuple[Situation, Candidate, int], asker: Asker, rest: Rest
) -> tuple[EnginePlan, Rules, tuple[EnvReason, ...]]:
    situation, candidate, index = chosen
    seat, request, sleep = situation.rollout, candidate.engine_requests[index], candidate.sleeps[index]
    assert seat is not None
    process_env = asker.ask(seat.platform, "process_env", request)
    defaults = asker.ask(seat.platform, "vllm_defaults", request)
    layers, pool = (process_env, defaults.env, sleep.env), rest.pools[seat.role.pool]
    user, where = loaded.topology.env.engine, loaded.where("env", "engine")
    env, reasons = merge_env(layers, user, process=seat.role.name, where=where, inherited=rest.inherited)
    check_untouched(pool.binding, env, process=seat.role.name, where=where)
    first = request.placement.slots[0].node
    positions = [slot.device for slot in request.placement.slots if slot.node == first]
    needs = situation.needs
    plan = EnginePlan(
        index=index,
        pool=seat.role.pool,
        request=request,
        defaults=defaults,
        sleep=sleep,
        env=env,
        args=engine_args(
            defaults,
            needs.vllm,
            sleep.args,
            platform=pool.platform,
            chosen=candidate.chosen,
            experts=needs.returns_experts,
        ),
        mask=process_mask(pool.binding, pool.entries[first], positions),
    )
    return plan, layers, reasons
