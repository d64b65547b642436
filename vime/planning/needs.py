"""What a plan needs to know of a run, and nothing else of its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vime.config.algorithms import log_prob_passes, needs_of
from vime.config.schema import Config
from vime.errors import ConfigError
from vime.facts.model import ModelShape
from vime.models.registry import read_shape
from vime.topology.rules import ResolvedRole


@dataclass(frozen=True, slots=True)
class PlanNeeds:
    """Tokens, batch and engine arguments of a run.

    `dtype` None is the platform's default. `vllm` are the user's engine arguments. `samples` is false where nothing is
    sampled for training (supervised fine-tuning), so that a topology without engines will do. `recompute` auto is decided by
    the plan. `log_prob_passes` are forward passes of the trainer over a batch beside the one of its update; `updates_per_step`
    and `max_staleness` are those of the run; `filtered` is true where groups may be dropped and replaced.

    `workers` are rollout worker processes. With `copies_checkpoints` a checkpoint is written from a copy in host memory, with
    `returns_experts` engines tell the experts of every token. What the algorithm needs beside the actor: `needs_reference`
    log-probs of a frozen reference, `needs_values` a critic, `needs_teacher` log-probs of a teacher. `models` are those of
    roles that hold another model than the actor, by task.
    """

    dtype: str | None = None
    max_prompt_tokens: int | None = None
    max_response_tokens: int = 256
    micro_batch_tokens: int = 8192
    log_prob_chunk_tokens: int = 1024
    recompute: str = "auto"
    batch_size: int = 32
    group_size: int = 8
    deterministic: bool = True
    threads: int = 1
    start_timeout_s: float = 300.0
    samples: bool = True
    vllm: Mapping[str, Any] = field(default_factory=dict)
    log_prob_passes: int = 0
    updates_per_step: int = 1
    max_staleness: int = 0
    filtered: bool = False
    workers: int = 1
    copies_checkpoints: bool = False
    returns_experts: bool = False
    needs_reference: bool = False
    needs_values: bool = False
    needs_teacher: bool = False
    models: Mapping[str, ModelShape] = field(default_factory=dict)

    @property
    def uses(self) -> frozenset[str]:
        """Tasks of training roles beside the actor's."""
        asked = {"reference": self.needs_reference, "critic": self.needs_values, "teacher": self.needs_teacher}
        return frozenset(task for task, needed in asked.items() if needed)


def model_of(role: ResolvedRole, model: ModelShape, needs: PlanNeeds) -> ModelShape:
    """What a role holds: a model of its own where the run names one for its task, else the actor's."""
    return needs.models.get(role.task, model) if role.kind == "train" else model


def _other_models(config: Config) -> dict[str, ModelShape]:
    """Shapes of the models that further training roles hold, by task.

    Raises ConfigError for a folder that cannot be read and for another vocabulary than the policy's.
    """
    found = {task: read_shape(folder) for task, folder in config.model.others.items()}
    vocab = read_shape(config.model.path).vocab if found else 0
    for task, shape in found.items():
        if shape.vocab != vocab:
            raise ConfigError(
                f"model.{task} has a vocabulary of {shape.vocab} entries, model.path one of {vocab}: their token ids differ",
                fix=f"use a {task} of the policy's family of tokenizers",
            )
    return found


def needs_from(config: Config) -> PlanNeeds:
    """The needs of a configured run."""
    asked, updates = needs_of(config.algorithm), config.trainer.updates_per_step
    return PlanNeeds(
        dtype=config.model.dtype,
        max_prompt_tokens=config.data.max_prompt_tokens,
        max_response_tokens=config.rollout.sampling.max_response_tokens,
        micro_batch_tokens=config.trainer.max_tokens_per_micro_batch,
        log_prob_chunk_tokens=config.trainer.log_prob_chunk_tokens,
        recompute=config.trainer.recompute,
        batch_size=config.rollout.batch_size,
        group_size=config.rollout.group_size,
        deterministic=config.run.deterministic,
        threads=config.trainer.threads,
        start_timeout_s=config.rollout.start_timeout_s,
        samples=config.algorithm.kind != "sft",
        vllm=config.rollout.vllm,
        log_prob_passes=log_prob_passes(config.algorithm, updates_per_step=updates),
        updates_per_step=updates,
        max_staleness=config.schedule.max_staleness,
        filtered=config.rollout.filter is not None,
        workers=config.rollout.workers,
        copies_checkpoints=config.checkpoint.asynchronous,
        returns_experts=config.trainer.routing_replay == "rollout",
        needs_reference="reference" in asked,
        needs_values="values" in asked,
        needs_teacher="teacher" in asked,
        models=_other_models(config),
    )
