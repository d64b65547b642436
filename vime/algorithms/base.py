"""What every algorithm gets and gives back: sums over tokens, never means, so that no split of the work matters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

MAX_EXPONENT = 20.0
"""Log-ratios are bounded to this before `exp`: e^20 is finite in every float type with 8 exponent bits."""


@dataclass(frozen=True)
class TokenBatch:
    """The response tokens of one micro-batch, flattened: every tensor has shape [tokens].

    `old_log_probs` is the ratio's denominator, `rollout_log_probs` the sampler's. `mask` (bool) is true on trained
    tokens. `weights` already holds the global denominators: summing `weights * loss` over all micro-batches of all
    ranks gives the batch's mean loss.
    """

    log_probs: Tensor
    entropy: Tensor
    old_log_probs: Tensor
    rollout_log_probs: Tensor
    advantages: Tensor
    mask: Tensor
    weights: Tensor


@dataclass(frozen=True)
class LossSums:
    """`loss`: scalar with gradient, this micro-batch's share of the batch loss.

    `weighted` are shares of batch means (already divided); `token_sums` are plain sums over trained tokens, to be
    divided by `tokens` after all ranks are added up; `token_maxima` are maxima over trained tokens.
    """

    loss: Tensor
    tokens: Tensor
    weighted: Mapping[str, Tensor]
    token_sums: Mapping[str, Tensor]
    token_maxima: Mapping[str, Tensor]


class Algorithm(Protocol):
    """Built from its section of the run file by `vime.algorithms.registry.algorithm_of`."""

    needs_rollout_log_probs: bool
    needs_old_log_probs: bool
    needs_advantages: bool
    needs_entropy_gradient: bool
    loss_mean: str

    def advantages(self, rewards: Tensor, group_rewards: Tensor) -> Tensor:
        """rewards [n], group_rewards [n, group] -> advantages [n]."""
        ...

    def loss(self, batch: TokenBatch) -> LossSums: ...

    def empty_sums(self) -> LossSums:
        """What `loss` gives for no tokens: the names, for pipeline stages that compute no loss."""
        ...


def empty_batch() -> TokenBatch:
    """A batch of no tokens."""
    floats = torch.zeros(0)
    return TokenBatch(floats, floats, floats, floats, floats, torch.zeros(0, dtype=torch.bool), floats)


def select(values: Tensor, mask: Tensor) -> Tensor:
    """`values` where `mask` holds, else 0, all [tokens]. Selects, so that neither value nor gradient sees what is masked."""
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


def token_weights(mask: Tensor, lengths: Tensor, *, loss_mean: str, num_rollouts: int, num_tokens: int) -> Tensor:
    """Weight of every token in the batch loss, [tokens] float32.

    `mask` [tokens] bool, `lengths` [samples]: tokens of each sample in it, in order. `rollout` averages the token means
    of rollouts: 1 / (trained tokens of the sample x `num_rollouts`). `token` averages over all tokens: 1 / `num_tokens`.
    The counts are those of the whole batch, over all ranks and micro-batches.
    """
    if loss_mean == "token":
        return torch.full(mask.shape, 1.0 / max(num_tokens, 1), dtype=torch.float32, device=mask.device)
    sample = torch.repeat_interleave(torch.arange(len(lengths), device=mask.device), lengths)
    trained = torch.zeros(len(lengths), dtype=torch.float64, device=mask.device).index_add_(0, sample, mask.double())
    return (1.0 / (trained.clamp(min=1.0) * max(num_rollouts, 1))).index_select(0, sample).float()
