"""Group sequence policy optimisation: Zheng et al. 2025, arXiv:2507.18071. The ratio is that of whole responses, per token."""

from __future__ import annotations

from torch import Tensor

from vime.algorithms.base import AdvantageBatch, TokenBatch
from vime.algorithms.grpo import grouped
from vime.algorithms.losses import sequence_log_ratio
from vime.algorithms.policy import PolicyAlgorithm
from vime.config.algorithms import GspoSection


class Gspo(PolicyAlgorithm):
    """Clipped loss of the response's ratio over group-relative advantages; see `vime.algorithms.base.Algorithm`."""

    def __init__(self, section: GspoSection) -> None:
        super().__init__(section)
        self._normalize_std = section.normalize_std

    def token_advantages(self, batch: AdvantageBatch) -> Tensor:
        return grouped(batch, self, normalize_std=self._normalize_std)

    def token_loss(self, log_ratio: Tensor, batch: TokenBatch) -> tuple[Tensor, Tensor]:
        """Every token gets the response's ratio: the mean over tokens of the loss then has the response's gradient."""
        return super().token_loss(sequence_log_ratio(log_ratio, batch.mask, batch.sequences), batch)
