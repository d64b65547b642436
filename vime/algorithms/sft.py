"""Supervised fine-tuning: masked negative log-likelihood of the labels (maximum likelihood, no other source)."""

from __future__ import annotations

import torch
from torch import Tensor

from vime.algorithms.base import LossSums, TokenBatch, empty_batch, masked_sum
from vime.config.schema import SftSection


class Sft:
    """The algorithm with its settings; see `vime.algorithms.base.Algorithm`."""

    needs_rollout_log_probs = False
    needs_old_log_probs = False
    needs_advantages = False
    needs_entropy_gradient = False

    def __init__(self, section: SftSection) -> None:
        self.loss_mean: str = section.loss_mean

    def advantages(self, rewards: Tensor, group_rewards: Tensor) -> Tensor:
        """Not used: rewards [n] -> zeros [n]."""
        return torch.zeros_like(rewards)

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
