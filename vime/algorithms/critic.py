"""What a critic learns: returns of the policy's tokens, with a loss that keeps values near their old ones.

Schulman et al. 2015 (GAE), arXiv:1506.02438; the clipped value loss is that of OpenAI baselines' ppo2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vime.algorithms.base import AdvantageBatch, LossSums, masked_sum, select
from vime.algorithms.groups import shaped
from vime.algorithms.returns import gae, placed, token_rewards
from vime.config.algorithms import PpoSection


def raw_advantages(batch: AdvantageBatch, section: PpoSection) -> tuple[Tensor, Tensor]:
    """Generalised advantages of the trained tokens [trained] float64, before whitening, and their positions [trained]."""
    rewards, _ = shaped(batch, section.overlong)
    by_token, at, samples = token_rewards(batch, rewards, section)
    return gae(by_token, batch.values.double()[at], samples, gamma=section.gamma, lam=section.lam), at


def returns(batch: AdvantageBatch, section: PpoSection) -> Tensor:
    """What the values of `batch` should have been: advantage + value, [tokens] float32, 0 at tokens that are not trained."""
    found, at = raw_advantages(batch, section)
    return placed(found + batch.values.double()[at], at, batch.mask).float()


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, weights: Tensor, section: PpoSection
) -> LossSums:
    """Half the squared error, weighted and summed: the larger of the value's and of the value's clipped to its old one.

    All [tokens]; `values` has the gradient, `old_values` are from before the step's first update, `weights` as in
    `vime.algorithms.base.TokenBatch`. With `value_clip` 0 nothing is clipped.
    """
    values, old, target = (select(tensor, mask) for tensor in (values, old_values, returns))
    plain = (values - target) ** 2
    errors = plain
    if clip := section.critic.value_clip:
        kept = values.clamp(old - clip, old + clip)
        errors = torch.maximum(plain, (kept - target) ** 2)
    loss = masked_sum(0.5 * errors, mask, weights)
    with torch.no_grad():
        return LossSums(
            loss=loss,
            tokens=mask.sum(),
            weighted={"loss": loss.detach(), "value_loss": loss.detach()},
            token_sums={
                "value_clipfrac": masked_sum((errors > plain).double(), mask),
                "values": masked_sum(values.double(), mask),
                "returns": masked_sum(target.double(), mask),
            },
            token_maxima={},
        )
