"""What a plan needs to know of a run, and nothing else of its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vime.config.schema import Config, GrpoSection


@dataclass(frozen=True, slots=True)
class PlanNeeds:
    """Tokens, batch and engine arguments of a run.

    `dtype` None is the platform's default. `vllm` are the user's engine arguments. `samples` is false where nothing is
    sampled for training (supervised fine-tuning), so that a topology without engines will do. `recompute` auto is decided by
    the plan. `log_prob_passes` are forward passes of the trainer over a batch beside the one of its update; `updates_per_step`
    and `max_staleness` are those of the run; `filtered` is true where groups may be dropped and replaced.
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


def needs_from(config: Config) -> PlanNeeds:
    """The needs of a configured run."""
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
        log_prob_passes=int(isinstance(config.algorithm, GrpoSection) and config.algorithm.old_log_probs == "recompute"),
        updates_per_step=config.trainer.updates_per_step,
        max_staleness=config.schedule.max_staleness,
        filtered=config.rollout.filter is not None,
    )
