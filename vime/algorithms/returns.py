"""From rewards of samples to advantages of tokens: rewards by token, discounted returns, GAE, whitening.

Only trained tokens take part: what stands between them (a tool's answer, a masked span) has no reward, no value and no
step in time. Everything is float64 on the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vime.algorithms.base import AdvantageBatch, Reduce, select
from vime.algorithms.kl import divergence
from vime.algorithms.sequences import Sequences
from vime.config.algorithms import KlSection, PolicySection

VARIANCE_FLOOR = 1e-8
"""Added to the variance before its root, as in TRL, verl and OpenRLHF."""
ROUNDING = 1e-12
"""A whitened value below this is the mean itself: its sign would follow the order of the sum, and with it which clip binds."""


def trained_only(batch: AdvantageBatch) -> tuple[Tensor, Sequences]:
    """Positions [trained] of the trained tokens, and which of them belongs to which sample."""
    samples = batch.sequences
    counts = torch.bincount(samples.sample[batch.mask], minlength=samples.count)
    return batch.mask.nonzero()[:, 0], Sequences.of(counts.tolist())


def kl_in_reward(batch: AdvantageBatch, section: KlSection) -> Tensor:
    """coef x estimated divergence from the reference, [tokens] float64, 0 where nothing is trained.

    Of the sampler's log-probs, so that actor and critic compute the same.
    """
    if not section.coef or section.use != "reward":
        return torch.zeros(batch.mask.shape, dtype=torch.float64)
    log_ratio = batch.rollout_log_probs.double() - batch.ref_log_probs.double()
    return section.coef * divergence(select(log_ratio, batch.mask), section.estimator)


def token_rewards(batch: AdvantageBatch, rewards: Tensor, section: PolicySection) -> tuple[Tensor, Tensor, Sequences]:
    """Rewards of trained tokens [trained]: minus the divergence each, plus the sample's reward [n] on its last one.

    With them the positions [trained] and samples of `trained_only`.
    """
    at, samples = trained_only(batch)
    by_token = select(rewards.double()[samples.sample], samples.last) - kl_in_reward(batch, section.kl)[at]
    return by_token, at, samples


def discounted_sums(values: Tensor, samples: Sequences, factor: float) -> Tensor:
    """s[t] = values[t] + factor x s[t + 1] within each sample; [tokens] float64 -> the same.

    By doubling: after round i, s[t] covers 2^i tokens, so that the rounds grow with the logarithm of the longest sample.
    """
    reach = 1
    while reach < samples.width:
        later = torch.cat([values[reach:], values.new_zeros(reach)])
        same = torch.cat([samples.sample[reach:], samples.sample.new_full((reach,), -1)]) == samples.sample
        values = values + factor**reach * select(later, same)
        reach *= 2
    return values


def gae(rewards: Tensor, values: Tensor, samples: Sequences, *, gamma: float, lam: float) -> Tensor:
    """Generalised advantage estimation (Schulman et al. 2015, arXiv:1506.02438) over trained tokens.

    rewards, values [trained] -> advantages [trained]: sums of r[t] + gamma V[t + 1] - V[t], discounted by gamma x lam. The
    value after a sample's last token is 0.
    """
    following = select(values.roll(-1), ~samples.last)
    return discounted_sums(rewards + gamma * following - values, samples, gamma * lam)


def placed(values: Tensor, at: Tensor, like: Tensor) -> Tensor:
    """values [trained] at positions [trained] of zeros shaped like `like` [tokens]."""
    return torch.zeros(like.shape, dtype=torch.float64).index_put((at,), values)


def whiten(values: Tensor, mask: Tensor, reduce: Reduce) -> Tensor:
    """(values - mean) / deviation over all trained tokens of all ranks; [tokens] float64 -> the same, 0 where masked.

    Unbiased variance. The mean is reduced before the squares, so that large advantages lose nothing.
    """
    count, total = reduce(torch.stack([mask.sum().double(), select(values, mask).sum()])).tolist()
    centred = select(values - total / max(count, 1.0), mask)
    variance = reduce((centred**2).sum()[None])[0] / max(count - 1.0, 1.0)
    scaled = centred * torch.rsqrt(variance + VARIANCE_FLOOR)
    return select(scaled, ~(scaled.abs() < ROUNDING))
