"""Group sequence policy optimisation: Zheng et al. 2025, arXiv:2507.18071. The ratio is that of whole responses, per token."""

from __future__ import annotations

from torch import Tensor

from vime.algorithms.base import TokenBatch
from vime.algorithms.grpo import Grpo
from vime.algorithms.losses import sequence_log_ratio


class Gspo(Grpo):
    """Clipped loss of the response's ratio over group-relative advantages; see `vime.algorithms.base.Algorithm`."""

    def token_loss(self, log_ratio: Tensor, batch: TokenBatch) -> tuple[Tensor, Tensor]:
        """Every token gets the response's ratio: the mean over tokens of the loss then has the response's gradient."""
        return super().token_loss(sequence_log_ratio(log_ratio, batch.mask, batch.sequences), batch)
