"""Clipped importance-sampling policy optimisation: MiniMax 2025, MiniMax-M1, arXiv:2506.13585. No token loses its gradient."""

from __future__ import annotations

from torch import Tensor

from vime.algorithms.base import AdvantageBatch, TokenBatch, select
from vime.algorithms.grpo import grouped
from vime.algorithms.losses import weighted_log_prob_loss
from vime.algorithms.policy import PolicyAlgorithm
from vime.config.algorithms import CispoSection


class Cispo(PolicyAlgorithm):
    """Log-probs weighed by bounded ratios and group-relative advantages; see `vime.algorithms.base.Algorithm`."""

    def __init__(self, section: CispoSection) -> None:
        super().__init__(section)
        self._normalize_std = section.normalize_std

    def token_advantages(self, batch: AdvantageBatch) -> Tensor:
        return grouped(batch, self, normalize_std=self._normalize_std)

    def token_loss(self, log_ratio: Tensor, batch: TokenBatch) -> tuple[Tensor, Tensor]:
        return weighted_log_prob_loss(
            select(batch.log_probs, batch.mask),
            log_ratio,
            select(batch.advantages, batch.mask),
            clip_low=self.section.clip_low,
            clip_high=self.section.clip_high,
        )
