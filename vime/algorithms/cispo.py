"""Clipped importance-sampling policy optimisation: MiniMax 2025, MiniMax-M1, arXiv:2506.13585. No token loses its gradient."""

from __future__ import annotations

from torch import Tensor

from vime.algorithms.base import TokenBatch, select
from vime.algorithms.grpo import Grpo
from vime.algorithms.losses import weighted_log_prob_loss


class Cispo(Grpo):
    """Log-probs weighed by bounded ratios and group-relative advantages; see `vime.algorithms.base.Algorithm`."""

    def token_loss(self, log_ratio: Tensor, batch: TokenBatch) -> tuple[Tensor, Tensor]:
        return weighted_log_prob_loss(
            select(batch.log_probs, batch.mask),
            log_ratio,
            select(batch.advantages, batch.mask),
            clip_low=self.section.clip_low,
            clip_high=self.section.clip_high,
        )
