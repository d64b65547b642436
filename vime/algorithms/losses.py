"""Policy losses per token, before weights and masks."""

from __future__ import annotations

import torch
from torch import Tensor

from vime.algorithms.base import bounded_ratio
from vime.algorithms.sequences import Sequences


def clipped_loss(
    log_ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> tuple[Tensor, Tensor]:
    """Pessimistic policy loss per token and whether a clip binds (Schulman et al. 2017, arXiv:1707.06347).

    log_ratio = log-prob now minus then, advantages: [tokens] -> loss [tokens], clipped [tokens] bool.
    loss = max(-r A, -clamp(r, 1 - clip_low, 1 + clip_high) A) with r = exp(log_ratio), the exponent bounded; for A < 0 at
    most -dual_clip A (Ye et al. 2019, arXiv:1912.09729).
    """
    ratio = bounded_ratio(log_ratio)
    plain = -ratio * advantages
    clipped = -ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    loss, binds = torch.maximum(plain, clipped), clipped > plain
    if dual_clip is None:
        return loss, binds
    ceiling = -dual_clip * advantages
    stops = (advantages < 0) & (loss > ceiling)
    return torch.where(stops, ceiling, loss), binds | stops


def sequence_log_ratio(log_ratio: Tensor, mask: Tensor, sequences: Sequences) -> Tensor:
    """The mean over a sample's trained tokens, at each of its tokens; log_ratio, mask [tokens] -> [tokens].

    GSPO's ratio is its exponential (Zheng et al. 2025, arXiv:2507.18071, equation 7).
    """
    return sequences.spread(sequences.mean(log_ratio, mask))


def weighted_log_prob_loss(
    log_probs: Tensor, log_ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """-sg(clamp(r, 1 - clip_low, 1 + clip_high)) A log p per token and whether the clamp binds; all [tokens].

    Every token keeps its gradient, at a bounded weight (CISPO: MiniMax 2025, arXiv:2506.13585, equation 4).
    """
    ratio = bounded_ratio(log_ratio.detach())
    bounded = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return -bounded * advantages * log_probs, bounded != ratio
