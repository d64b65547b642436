"""Supervised fine-tuning: masked negative log-likelihood of the labels (maximum likelihood, no other source)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from vime.algorithms.base import AdvantageBatch, LossSums, Reduce, TokenBatch, empty_batch, masked_sum
from vime.config.algorithms import SftSection


class Sft:
    """The algorithm with its settings; see `vime.algorithms.base.Algorithm`."""

    needs_rollout_log_probs = False
    needs_old_log_probs = False
    needs_old_for_advantages = False
    needs_advantages = False
    needs_reference = False
    needs_values = False
    needs_teacher = False
    needs_entropy_gradient = False
    loss_tokens: int | None = None

    def __init__(self, section: SftSection) -> None:
        self.loss_mean: str = section.loss_mean

    def advantages(self, batch: AdvantageBatch, reduce: Reduce) -> Tensor:
        """Not used: zeros [tokens]."""
        return torch.zeros(batch.mask.shape)

    def loss(self, batch: TokenBatch) -> LossSums:
        """Minus the label's log-prob, weighted and summed; all fields of `batch` are [tokens]."""
        loss = masked_sum(-batch.log_probs, batch.mask, batch.weights)
        with torch.no_grad():
            return LossSums(
                loss=loss,
                tokens=batch.mask.sum(),
                weighted={"loss": loss.detach()},
                token_sums={"entropy_loss": masked_sum(batch.entropy.double(), batch.mask)},
                token_maxima={},
            )

    def empty_sums(self) -> LossSums:
        return self.loss(empty_batch())

    def finish(self, metrics: Mapping[str, float]) -> dict[str, float]:
        return dict(metrics)
