"""What every algorithm gets and gives back: sums over tokens, never means, so that no split of the work matters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from vime.algorithms.sequences import Sequences

MAX_EXPONENT = 20.0
"""Log-ratios are bounded to this before `exp`: e^20 is finite in every float type with 8 exponent bits."""

Reduce = Callable[[Tensor], Tensor]
"""Adds a float64 host tensor up over data-parallel ranks. Every rank calls it equally often, samples or not."""


@dataclass(frozen=True)
class TokenBatch:
    """The response tokens of one micro-batch, flattened: every tensor has shape [tokens].

    `old_log_probs` is the ratio's denominator, `rollout_log_probs` the sampler's. `mask` (bool) is true on trained
    tokens. `weights` already holds the global denominators: summing `weights * loss` over all micro-batches of all
    ranks gives the batch's mean loss. `sequences` says which token is of which sample, whole samples only;
    `prompt_lengths` are the tokens before each. `policy_log_probs` are the trainer's, without gradient: from before the
    step where the ratio is taken to them, else the current ones. Corrections compare them with the sampler's.
    """

    log_probs: Tensor
    entropy: Tensor
    old_log_probs: Tensor
    policy_log_probs: Tensor
    rollout_log_probs: Tensor
    advantages: Tensor
    mask: Tensor
    weights: Tensor
    sequences: Sequences
    ref_log_probs: Tensor | None = None
    teacher_log_probs: Tensor | None = None
    prompt_lengths: tuple[int, ...] = ()


@dataclass(frozen=True)
class AdvantageBatch:
    """All samples that a rank trains in one update. Host tensors.

    Per sample: `rewards` [n]; `group_rewards`, `group_lengths`, `group_weights` [n, widest group]: rewards and response
    tokens of a sample's group, itself included, each weighing 1, or 1 / k where k samples make one rollout, and 0 beyond
    a smaller group (float64); `lengths` [n] response tokens, `total_lengths` [n] with the prompt.
    Per response token, flattened [tokens]: `mask` (bool, true on trained tokens), `log_probs` (the ratio's denominator)
    and the others as in `vime.types.TrainSample`, NaN where a sample has none.
    """

    rewards: Tensor
    group_rewards: Tensor
    group_lengths: Tensor
    group_weights: Tensor
    lengths: Tensor
    total_lengths: Tensor
    mask: Tensor
    log_probs: Tensor
    rollout_log_probs: Tensor
    ref_log_probs: Tensor
    teacher_log_probs: Tensor
    values: Tensor

    @property
    def sequences(self) -> Sequences:
        return Sequences.of(self.lengths.tolist())


@dataclass(frozen=True)
class LossSums:
    """`loss`: scalar with gradient, this micro-batch's share of the batch loss.

    `weighted` are shares of batch means (already divided); `token_sums` are plain sums over trained tokens, to be
    divided by `tokens` after all ranks are added up; `sequence_sums` likewise over samples with a trained token, to be
    divided by `sequences`; `token_maxima` are maxima (at least 0) over trained tokens or such samples.
    """

    loss: Tensor
    tokens: Tensor
    weighted: Mapping[str, Tensor]
    token_sums: Mapping[str, Tensor]
    token_maxima: Mapping[str, Tensor]
    sequences: Tensor = field(default_factory=lambda: torch.zeros(()))
    sequence_sums: Mapping[str, Tensor] = field(default_factory=dict)


class Algorithm(Protocol):
    """Built from its section of the run file by `vime.algorithms.registry.algorithm_of`."""

    needs_rollout_log_probs: bool
    needs_old_log_probs: bool
    """The ratio's denominator is the trainer's before the step."""
    needs_old_for_advantages: bool
    """They must be known before the first update."""
    needs_advantages: bool
    needs_reference: bool
    needs_values: bool
    needs_teacher: bool
    needs_entropy_gradient: bool
    loss_mean: str
    loss_tokens: int | None

    def advantages(self, batch: AdvantageBatch, reduce: Reduce) -> Tensor:
        """-> [tokens] float32, once per optimizer update, over all samples of a rank."""
        ...

    def loss(self, batch: TokenBatch) -> LossSums: ...

    def empty_sums(self) -> LossSums:
        """What `loss` gives for no tokens: the names, for pipeline stages that compute no loss."""
        ...

    def finish(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Metrics of a whole update from its reduced sums: adds what is a function of several means."""
        ...


def empty_batch() -> TokenBatch:
    """A batch of no tokens."""
    floats = torch.zeros(0)
    return TokenBatch(
        log_probs=floats,
        entropy=floats,
        old_log_probs=floats,
        policy_log_probs=floats,
        rollout_log_probs=floats,
        advantages=floats,
        mask=torch.zeros(0, dtype=torch.bool),
        weights=floats,
        sequences=Sequences.of([]),
        ref_log_probs=floats,
        teacher_log_probs=floats,
    )


def select(values: Tensor, mask: Tensor) -> Tensor:
    """`values` where `mask` holds, else 0, of one shape. Selects, so that neither value nor gradient sees what is masked."""
    return torch.where(mask, values, torch.zeros_like(values))


def masked_sum(values: Tensor, mask: Tensor, weights: Tensor | None = None) -> Tensor:
    """Scalar sum of `weights * values` over the tokens where `mask` holds; all [tokens]."""
    chosen = select(values, mask)
    return (chosen if weights is None else chosen * select(weights, mask)).sum()


def masked_max(values: Tensor, mask: Tensor) -> Tensor:
    """Scalar maximum over the tokens where `mask` holds; 0 when there are none. `values` >= 0, [tokens]."""
    chosen = select(values, mask)
    return chosen.max() if chosen.numel() else chosen.sum()


def bounded_ratio(log_ratio: Tensor) -> Tensor:
    """exp(log_ratio) with the exponent bounded first: value and gradient stay finite, NaN stays NaN. Any shape."""
    return log_ratio.clamp(-MAX_EXPONENT, MAX_EXPONENT).exp()


def token_weights(
    mask: Tensor,
    lengths: Tensor,
    *,
    loss_mean: str,
    num_rollouts: int,
    num_tokens: int,
    rollout_tokens: Tensor | None = None,
) -> Tensor:
    """Weight of every token in the batch loss, [tokens] float32.

    `mask` [tokens] bool, `lengths` [samples]: tokens of each sample in it, in order. `rollout` averages the token means
    of rollouts: 1 / (trained tokens of the rollout x `num_rollouts`); a sample is a rollout of its own where
    `rollout_tokens` [samples] is 0 or absent. `token` averages over all tokens: 1 / `num_tokens`; so does `constant`, whose
    `num_tokens` are `num_rollouts` times its length. The counts are those of the whole batch, over all ranks and micro-batches.
    """
    if loss_mean != "rollout":
        return torch.full(mask.shape, 1.0 / max(num_tokens, 1), dtype=torch.float32, device=mask.device)
    sample = torch.repeat_interleave(torch.arange(len(lengths), device=mask.device), lengths)
    trained = torch.zeros(len(lengths), dtype=torch.float64, device=mask.device).index_add_(0, sample, mask.double())
    if rollout_tokens is not None:
        trained = torch.where(rollout_tokens > 0, rollout_tokens.to(trained), trained)
    return (1.0 / (trained.clamp(min=1.0) * max(num_rollouts, 1))).index_select(0, sample).float()
