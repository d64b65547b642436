"""What a plan needs to know of a run, and nothing else of its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vime.config.schema import Config


@dataclass(frozen=True, slots=True)
class PlanNeeds:
    """Tokens, batch and engine arguments of a run.

    `dtype` None is the platform's default. `vllm` are the user's engine arguments. `samples` is false where nothing is
    sampled for training (supervised fine-tuning), so that a topology without engines will do. `recompute` auto is decided by
    the plan.
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
    )
