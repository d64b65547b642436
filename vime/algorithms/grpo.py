"""Group-relative policy optimisation.

Shao et al. 2024, DeepSeekMath, arXiv:2402.03300 (group-relative advantages, clipped ratio); the separate upper clip is
Yu et al. 2025, DAPO, arXiv:2503.14476. The ratio is taken to the log-probs that the sampler reported.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vime.algorithms.base import LossSums, TokenBatch, bounded_ratio, empty_batch, masked_max, masked_sum, select
from vime.config.schema import GrpoSection

EQUAL_WITHIN = 1e-12
"""Rewards that differ by less than this share of the largest are equal: the rest is rounding of the grader's sums."""


def group_advantages(rewards: Tensor, group_rewards: Tensor, *, normalize_std: bool) -> Tensor:
    """Reward minus the group's mean, divided by its unbiased standard deviation when `normalize_std`.

    rewards [n], group_rewards [n, group] (row i holds the rewards of all siblings of sample i, itself included)
    -> [n] float32. Exactly 0 for a group of equal rewards and for a group of one; a NaN reward gives NaN.
    """
    rewards, siblings = rewards.double(), group_rewards.double()
    centred = rewards - siblings.mean(dim=1)
    if siblings.shape[1] > 1 and normalize_std:
        centred = centred / siblings.std(dim=1, unbiased=True)
    spread = siblings.amax(dim=1) - siblings.amin(dim=1)
    flat = spread <= EQUAL_WITHIN * siblings.abs().amax(dim=1)
    return torch.where(flat, torch.zeros_like(centred), centred).float()


def clipped_loss(log_ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float) -> tuple[Tensor, Tensor]:
    """Pessimistic policy loss per token and whether the clip binds.

    log_ratio = log-prob now minus then, advantages: [tokens] -> loss [tokens], clipped [tokens] bool.
    loss = max(-r A, -clamp(r, 1 - clip_low, 1 + clip_high) A) with r = exp(log_ratio), the exponent bounded.
    """
    ratio = bounded_ratio(log_ratio)
    plain = -ratio * advantages
    clipped = -ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    return torch.maximum(plain, clipped), clipped > plain


class Grpo:
    """The algorithm with its settings; see `vime.algorithms.base.Algorithm`."""

    needs_rollout_log_probs = True
    needs_advantages = True

    def __init__(self, section: GrpoSection) -> None:
        self._section = section
        self.loss_mean: str = section.loss_mean
        self.needs_old_log_probs = section.old_log_probs == "recompute"
        self.needs_entropy_gradient = section.entropy_coef > 0

    def advantages(self, rewards: Tensor, group_rewards: Tensor) -> Tensor:
        return group_advantages(rewards, group_rewards, normalize_std=self._section.normalize_std)

    def loss(self, batch: TokenBatch) -> LossSums:
        """Policy loss minus `entropy_coef` times entropy; all fields of `batch` are [tokens]."""
        mask, section = batch.mask, self._section
        log_ratio = select(batch.log_probs, mask) - select(batch.old_log_probs, mask)
        token_loss, clipped = clipped_loss(
            log_ratio, select(batch.advantages, mask), clip_low=section.clip_low, clip_high=section.clip_high
        )
        policy_loss = masked_sum(token_loss, mask, batch.weights)
        loss = policy_loss
        if section.entropy_coef:
            loss = policy_loss - section.entropy_coef * masked_sum(batch.entropy, mask, batch.weights)
        with torch.no_grad():
            now = batch.old_log_probs if self.needs_old_log_probs else batch.log_probs
            difference = (select(now, mask) - select(batch.rollout_log_probs, mask)).abs()
            return LossSums(
                loss=loss,
                tokens=mask.sum(),
                weighted={"loss": loss.detach(), "pg_loss": policy_loss.detach()},
                token_sums={
                    "entropy_loss": masked_sum(batch.entropy.double(), mask),
                    "pg_clipfrac": masked_sum(clipped.double(), mask),
                    "ppo_kl": masked_sum(-log_ratio.double(), mask),
                    "train_rollout_logprob_abs_diff": masked_sum(difference.double(), mask),
                },
                token_maxima={"train_rollout_logprob_abs_diff_max": masked_max(difference, mask)},
            )

    def empty_sums(self) -> LossSums:
        return self.loss(empty_batch())
