"""What each process is started with, taken from the configuration and the plan."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vime.cluster.guardian import guardian_command
from vime.cluster.trainer_process import TransferSetup
from vime.cluster.trainer_role import StepRules
from vime.config.algorithms import PpoSection, SftSection, skips_flat_groups
from vime.config.schema import Config
from vime.data.routing import Routing
from vime.facts.model import ModelShape
from vime.facts.process import Factory
from vime.observe import layout
from vime.planning.decode import attention_share
from vime.planning.plan import Plan, Task, TrainerPlan, TransportPlan, pool_of
from vime.rollout.engine import EngineSpec
from vime.rollout.ports import LOOPBACK
from vime.rollout.router import RouterSpec
from vime.rollout.sft_rollout import SupervisedSetup
from vime.rollout.worker import WorkerSetup
from vime.trainer.setup import TrainerSetup

KNOWN_HALVES = frozenset(
    f"vime.weights.transports.{name}" for name in ("host_shm:HostShmEngine", "collective:CollectiveEngine", "disk:DiskEngine")
)
"""Engine halves that every engine knows by protocol, without being told."""


@dataclass(frozen=True)
class Keys:
    """What the run's own processes prove to each other: nobody else on the machine may sample or update weights."""

    run_id: str
    run_token: str
    api_key: str

    @classmethod
    def draw(cls) -> Keys:
        return cls(secrets.token_hex(4), secrets.token_hex(8), secrets.token_urlsafe(16))

    @property
    def segments(self) -> str:
        """Prefix of the run's shared-memory files."""
        return f"vime-{self.run_id}"


def sleep_level(plan: Plan) -> int:
    """vLLM's level at which engines leave the devices while the trainer has them; 0 where they stay."""
    return plan.engines[0].sleep.level if plan.engines and plan.shared and plan.residency == "park" else 0


def takes_turns_at_start(plan: Plan) -> bool:
    """Whether those on the actor's devices start one after the other, engines last: vLLM measures a device while it starts, and
    fails where another process takes or frees memory of it meanwhile.
    """
    return _crowded(plan) and not pool_of(plan.pools, plan.actor.pool).binding.virtual


def _crowded(plan: Plan) -> bool:
    """Whether anyone else is on the actor's devices."""
    return plan.shared or any(plan.shares_actor(other) for other in plan.others)


def away_at_start(plan: Plan) -> bool:
    """Whether training roles leave shared devices before anyone else starts there: engines need at once all that they will
    ever have, and roles that take turns may not fit together.
    """
    others = any(plan.shares_actor(other) for other in plan.others)
    return plan.residency == "park" and takes_turns_at_start(plan) and (others or sleep_level(plan) > 0)


def devices_of(plan: Plan) -> dict[str, int]:
    """By training role a number that roles on the same devices have in common."""
    found: dict[str, int] = {}
    for role in plan.trainers:
        mine = set(role.request.placement.slots)
        beside = [o for o in plan.trainers if o.role in found and o.pool == role.pool and mine & {*o.request.placement.slots}]
        found[role.role] = found[beside[0].role] if beside else len(found)
    return found


def engine_bytes(plan: Plan) -> dict[str, dict[str, int]]:
    """Device bytes of an engine by phase and tag, as planned: one that sleeps has only what its platform cannot free."""
    role = plan.engines[0].request.role if plan.engines else None
    found: dict[str, dict[str, int]] = {}
    for row in plan.memory.rows:
        if row.role == role:
            tags = found.setdefault(row.phase, {})
            tags[row.tag] = tags.get(row.tag, 0) + row.num_bytes
    return found


def trainer_setups(config: Config, plan: Plan, role: TrainerPlan) -> list[TrainerSetup]:
    """One a rank of a training role; the rendezvous address is filled in when rank 0 lives."""
    slots = role.request.placement.slots
    trainer = config.trainer.model_copy(update={"recompute": plan.recompute, **_own_trainer(config, role)})
    return [
        TrainerSetup(
            model_path=model_folder(config, role.task),
            dtype=plan.dtype,
            parallel=role.request.parallel,
            rank=rank,
            world=len(slots),
            # A process that sees one device of its node knows it as number 0.
            node_device=slot.device,
            local_rank=0 if role.masks and role.masks[rank] else slot.device,
            master_address="",
            master_port=0,
            seed=config.run.seed,
            num_steps=config.schedule.num_steps * config.trainer.updates_per_step,
            temperature=config.rollout.sampling.temperature,
            algorithm=config.algorithm,
            trainer=trainer,
            runtime=role.runtime,
            adaptation=role.adaptation,
            collective=role.collective,
            memory=role.memory,
            role=role.role,
            task=role.task,
        )
        for rank, slot in enumerate(slots)
    ]


def model_folder(config: Config, task: Task) -> Path:
    """The folder that a training role begins with."""
    return config.model.others.get(task, config.model.path)


def _own_trainer(config: Config, role: TrainerPlan) -> dict[str, Any]:
    """What of `trainer` is a role's own: the critic's optimizer."""
    section = config.algorithm
    return {"optimizer": section.critic.optimizer} if role.task == "critic" and isinstance(section, PpoSection) else {}


def engine_specs(config: Config, plan: Plan, keys: Keys) -> list[EngineSpec]:
    """One an engine: platform defaults under the user's `vllm:` section under what the plan needs."""
    return [
        EngineSpec(
            model_path=config.model.path,
            dtype=plan.dtype,
            log_path=config.run.dir / layout.LOGS / f"engine-{engine.index}.log",
            run_token=keys.run_token,
            api_key=keys.api_key,
            max_model_len=max_model_len(config, plan),
            parallel=engine.request.parallel,
            args={arg.name: arg.value for arg in engine.args},
            env={**engine.env, **engine.mask},
            unset=pool_of(plan.pools, engine.pool).binding.unset_env,
            halves=_own_halves(plan.transport),
            entry_points=engine.defaults.entry_points,
            expected_platform=engine.defaults.expected_platform,
            launch=engine.defaults.launch or EngineSpec.launch,
            in_flight=config.weights.update == "in_flight",
            seed=config.run.seed + engine.index,
            name=f"engine {engine.index}",
        )
        for engine in plan.engines
    ]


def _own_halves(transport: TransportPlan | None) -> dict[str, Factory]:
    """The chosen engine half, by protocol, where an engine does not know it already."""
    if transport is None:
        return {}
    half = transport.engine.factory
    known = half.target in KNOWN_HALVES and not half.options
    return {} if known else {transport.protocol: half}


def max_model_len(config: Config, plan: Plan) -> int:
    """Longest prompt and response together, where both are limited; else what the model's positions allow."""
    longest = max(
        config.rollout.sampling.max_response_tokens, *(s.sampling.max_response_tokens for s in config.evaluation.sets), 0
    )
    if config.data.max_prompt_tokens is None:
        return plan.model.max_positions
    return min(plan.model.max_positions, config.data.max_prompt_tokens + longest)


def experts_bytes(config: Config, plan: Plan) -> int:
    """Of the ids of experts in the object store at most: of the batch in training, the next one, and those sampled ahead."""
    if config.trainer.routing_replay != "rollout":
        return 0
    samples = config.rollout.batch_size * config.rollout.group_size * (config.schedule.max_staleness + 2)
    return samples * max_model_len(config, plan) * Routing.of(plan.model).token_bytes


def router_spec(config: Config, plan: Plan, keys: Keys) -> RouterSpec:
    return RouterSpec(
        log_path=config.run.dir / layout.LOGS / "router.log",
        args=config.rollout.router,
        request_timeout_s=config.rollout.request_timeout_s,
        start_timeout_s=plan.start_timeout_s,
        command_prefix=guardian_command(segments=keys.segments),
    )


def worker_setups(config: Config, keys: Keys, *, sampled: bool) -> Sequence[Any]:
    """One a rollout worker. A supervised run has one: encoding rows is quick."""
    if isinstance(config.algorithm, SftSection):
        apart = config.algorithm.digits_apart
        return [SupervisedSetup(config.model.path, config.data, apart, config.evaluation.sets)]
    setup = WorkerSetup(
        seed=config.run.seed,
        model_path=config.model.path,
        data=config.data,
        rollout=config.rollout,
        reward=config.reward,
        evaluation=config.evaluation.sets,
        api_key=keys.api_key,
        seeded=config.run.deterministic,
        experts=config.trainer.routing_replay == "rollout",
        samples_file=config.run.dir / layout.SAMPLES,
        samples_per_step=config.observe.samples_per_step,
    )
    return [setup] * config.rollout.workers if sampled else []


def transfer_setup(config: Config, plan: Plan, *, run_id: str, host: str = LOOPBACK, guarded: bool = False) -> TransferSetup:
    """The trainer's half of the transport that the plan chose. Engines reach rank 0 at `host`; `guarded` as there."""
    assert plan.transport is not None
    return TransferSetup(
        factory=plan.transport.trainer.factory,
        run_id=run_id,
        directory=config.run.dir,
        bucket_bytes=plan.transport.buffer_bytes,
        timeout_s=config.weights.timeout_s,
        host=host,
        guarded=guarded,
    )


def step_rules(config: Config, model: ModelShape) -> StepRules:
    """How a batch of a model's samples becomes optimizer steps."""
    section = config.algorithm
    return StepRules(
        max_tokens=config.trainer.max_tokens_per_micro_batch,
        updates_per_step=config.trainer.updates_per_step,
        skip_flat=skips_flat_groups(section),
        supervised=isinstance(section, SftSection),
        timeout_s=config.trainer.step_timeout_s,
        critic_warmup_steps=section.critic.warmup_steps if isinstance(section, PpoSection) else 0,
        square=attention_share(model),
    )
