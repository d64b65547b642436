"""What a plan gives every process, in words and as JSON: trainer adaptation, engine arguments, memory by tag, scheduling."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from vime.facts.engine import features_of
from vime.facts.memory import EngineSleep, MemoryBackend, NullMemory
from vime.facts.process import Factory
from vime.planning.engine_args import owned_args
from vime.planning.masks import scheduler_flags
from vime.planning.memory import DROPPED
from vime.planning.plan import EngineArg, Plan, PoolPlan, TrainerPlan, pool_of

_SHOWN = 24
"""Processes whose masks are listed."""

_FREED = {True: "leaves the device", False: "stays on the device"}
_KEPT = {True: "content kept", False: "content lost"}


def table(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """Rows with their columns under each other, the last one as it is."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)] if rows else []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row[:-1], widths, strict=True)]
        yield "  " + "  ".join([*cells, row[-1]]).rstrip()


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


# ---- trainer


def trainer_text(plan: Plan) -> Iterator[str]:
    """Adaptation and collective of every training role; what is as the actor's is not said again."""
    yield from _trainer_text(plan.actor)
    for other in plan.others:
        mine, first = (replace(t.collective, limits={}) for t in (other, plan.actor))
        if (other.runtime, other.adaptation, mine) == (plan.actor.runtime, plan.actor.adaptation, first):
            yield f"trainer {other.role}: a {other.task}, otherwise as {plan.actor.role}"
        else:
            yield from _trainer_text(other)


def _trainer_text(actor: TrainerPlan) -> Iterator[str]:
    adaptation = actor.adaptation
    yield f"trainer {actor.role}" + ("" if actor.task == "actor" else f": a {actor.task}")
    rows = [("runtime", f"{actor.runtime.bootstrap.target} on {actor.runtime.device_type}", actor.runtime.why)]
    pieces = {"attention": adaptation.core_attention, "norm": adaptation.norm, "optimizer": adaptation.optimizer}
    rows += [(name, _piece(piece), "") for name, piece in pieces.items()]
    rows.append(("transformer engine", "used" if adaptation.transformer_engine else "not used", ""))
    rows.append(("8-bit recipe", adaptation.fp8_recipe or "none", ""))
    rows.append(("checkpoints", ", ".join(adaptation.checkpoint_formats), "asynchronous" if adaptation.async_save else ""))
    rows += [(f"forced {name}", _value(forced.value), forced.why) for name, forced in adaptation.overrides.items()]
    rows += [("limit", condition, what) for condition, what in adaptation.limits.items()]
    yield from table(rows)
    collective = actor.collective
    yield f"collective of {actor.request.role}"
    rows = [("backend", collective.backend, f"time-out {collective.timeout_s:g} s, objects by {collective.object_backend}")]
    rows += [(f"option {name}", _value(value), "") for name, value in collective.options.items()]
    rows += [("limit", condition, what) for condition, what in collective.limits.items()]
    yield from table(rows)


def _piece(piece: Factory | None) -> str:
    return piece.target if piece is not None else "megatron-core's own"


# ---- engines


def engine_args_of(plan: Plan) -> list[EngineArg]:
    """The first engine's arguments (those of the others differ in seed and place only), vime's own last."""
    if not plan.engines:
        return []
    engine = plan.engines[0]
    own = owned_args(engine.request.parallel, plan.dtype, features_of(engine.request.software.get("vllm")))
    return [a for a in engine.args if a.name not in own] + [EngineArg(n, v, origin) for n, (v, origin) in own.items()]


_ORIGINS = {
    "user": "yours (rollout.vllm)",
    "plan": "chosen by the plan",
    "sleep": "needed by engine sleep",
    "replay": "needed by trainer.routing_replay",
    "vime": "needed by vime",
}


def engine_text(plan: Plan) -> Iterator[str]:
    """Launch module, plugins and arguments of the engines."""
    if not plan.engines:
        return
    defaults, release = plan.engines[0].defaults, features_of(plan.engines[0].request.software.get("vllm"))
    yield "engine"
    rows = [("launch", defaults.launch or release.launch, "")]
    rows.append(("plugins", ", ".join(defaults.entry_points) or "none", "the only ones that vLLM may load"))
    rows.append(("platform", defaults.expected_platform or "any", "the class that vLLM must resolve"))
    yield from table(rows)
    yield "engine arguments"
    yield from table([(a.name, _value(a.value), _origin(a)) for a in engine_args_of(plan)])


def _origin(arg: EngineArg) -> str:
    return _ORIGINS.get(arg.origin, arg.origin) + (f", over {_value(arg.over)}" if arg.over is not None else "")


# ---- memory


def leaving_text(plan: Plan) -> Iterator[str]:
    """What leaves a device between turns, tag by tag."""
    if plan.residency is None:
        return
    sharing = [plan.actor, *(other for other in plan.others if plan.shares_actor(other))]
    for index, trainer in enumerate(sharing):
        if all(trainer.memory != before.memory for before in sharing[:index]):
            names = [one.role for one in sharing if one.memory == trainer.memory]
            yield from _memory_text(", ".join(names), trainer.memory)
    if plan.engines and plan.shared:
        sleep = plan.engines[0].sleep
        backend = f", backend {sleep.backend}" if sleep.backend else ""
        why = f": {sleep.why}" if sleep.why else ""
        yield f"sleep of {plan.engines[0].request.role}: level {sleep.level}{backend}{why}"
        yield from table(_tags(sleep))


def _memory_text(who: str, memory: MemoryBackend | NullMemory) -> Iterator[str]:
    name = memory.factory.target if isinstance(memory, MemoryBackend) else f"none: {memory.reason}"
    yield f"memory of {who}: {name}"
    yield from table(_tags(memory))
    if isinstance(memory, MemoryBackend):
        exclusions = f"; left out: {', '.join(memory.exclusions)}" if memory.exclusions else ""
        pinned = "pinned" if memory.pinned_host else "pageable"
        yield f"  parked in {pinned} host memory, communicators: {memory.communicators}{exclusions}"


def _tags(leaves: MemoryBackend | NullMemory | EngineSleep) -> list[tuple[str, ...]]:
    if isinstance(leaves, NullMemory):
        return []
    dropped = DROPPED if isinstance(leaves, MemoryBackend) else ()
    return [
        (str(tag), _FREED[said.frees], "dropped, zeros later" if tag in dropped else _KEPT[said.preserves], said.why)
        for tag, said in leaves.tags.items()
    ]


# ---- scheduling


def scheduling_text(plan: Plan) -> Iterator[str]:
    """How Ray names the devices, and what every process may see of them."""
    yield "scheduling"
    for pool in plan.pools:
        binding = pool.binding
        labels = ", ".join(f"{name}={value}" for name, value in binding.labels.items()) or "none"
        yield f"  pool {pool.name}: Ray resource {binding.resource}, labels {labels}"
        if scheduler_flags(binding):
            yield f"  pool {pool.name}: {', '.join(scheduler_flags(binding))} = 1, so that Ray leaves the masks alone"
        if binding.unset_env and not binding.virtual:
            yield f"  pool {pool.name}: {', '.join(binding.unset_env)} is taken out of every process"
    masks = [(label, mask) for label, mask in _masks(plan) if mask]
    yield from table(masks[:_SHOWN])
    if len(masks) > _SHOWN:
        yield f"  ... and {len(masks) - _SHOWN} more processes in the same way"


def _masks(plan: Plan) -> Iterator[tuple[str, str]]:
    for trainer in plan.trainers:
        for rank, mask in enumerate(trainer.masks):
            yield f"{trainer.role} rank {rank}", _mask_text(mask)
    for engine in plan.engines:
        yield f"{engine.request.role}#{engine.index}", _mask_text(engine.mask)


def _mask_text(mask: Mapping[str, str]) -> str:
    return f"{' = '.join(mask)} = {next(iter(mask.values()))}" if mask else ""


# ---- JSON


def roles_json(plan: Plan) -> dict[str, Any]:
    """The same as JSON values."""
    leaving = {trainer.role: _leaving_json(trainer.memory) for trainer in plan.trainers}
    leaving |= {plan.engines[0].request.role: _leaving_json(plan.engines[0].sleep)} if plan.engines else {}
    return {
        **_trainer_json(plan.actor),
        "others": [{"role": o.role, "task": o.task, **_trainer_json(o)} for o in plan.others],
        "engine": [{"name": a.name, "value": a.value, "origin": a.origin, "over": a.over} for a in engine_args_of(plan)],
        "leaving": leaving,
        "masks": dict(_masks(plan)),
    }


def _trainer_json(trainer: TrainerPlan) -> dict[str, Any]:
    adaptation, collective = trainer.adaptation, trainer.collective
    pieces = {"attention": adaptation.core_attention, "norm": adaptation.norm, "optimizer": adaptation.optimizer}
    return {
        "trainer": {
            "runtime": trainer.runtime.bootstrap.target,
            "device_type": trainer.runtime.device_type,
            "pieces": {name: piece.target if piece else None for name, piece in pieces.items()},
            "transformer_engine": adaptation.transformer_engine,
            "fp8_recipe": adaptation.fp8_recipe,
            "overrides": {name: {"value": o.value, "why": o.why} for name, o in adaptation.overrides.items()},
            "limits": dict(adaptation.limits),
        },
        "collective": {
            "backend": collective.backend,
            "options": dict(collective.options),
            "limits": dict(collective.limits),
        },
    }


def _leaving_json(leaves: MemoryBackend | NullMemory | EngineSleep) -> dict[str, Any]:
    if isinstance(leaves, NullMemory):
        return {"reason": leaves.reason}
    tags = {str(tag): {"frees": s.frees, "preserves": s.preserves, "why": s.why} for tag, s in leaves.tags.items()}
    if isinstance(leaves, EngineSleep):
        return {"level": leaves.level, "backend": leaves.backend, "tags": tags}
    return {"factory": leaves.factory.target, "communicators": leaves.communicators, "tags": tags}


def binding_json(pool: PoolPlan) -> dict[str, Any]:
    """How Ray names the pool's devices."""
    binding = pool.binding
    return {"resource": binding.resource, "labels": dict(binding.labels), "visible_env": list(binding.visible_env)}


def lineage_text(plan: Plan, pool: str) -> str:
    """`child -> parent -> base`."""
    return " -> ".join(pool_of(plan.pools, pool).lineage)
