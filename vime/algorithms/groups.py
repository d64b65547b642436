"""Rewards relative to those of the siblings. Groups may be partial, of unequal size, and hold several samples a rollout."""

from __future__ import annotations

import torch
from torch import Tensor

from vime.algorithms.base import AdvantageBatch, select
from vime.config.algorithms import OverlongSection

EQUAL_WITHIN = 1e-12
"""Rewards that differ by less than this share of the largest are equal: the rest is rounding of the grader's sums."""


def overlong_penalty(lengths: Tensor, section: OverlongSection) -> Tensor:
    """Response tokens, any shape -> float64 penalty <= 0, the same shape.

    0 up to `max_tokens - buffer_tokens`, then falling linearly to `-penalty` at `max_tokens` (DAPO, arXiv:2503.14476, 13).
    """
    over = lengths.double() - (section.max_tokens - section.buffer_tokens)
    return -section.penalty * (over / section.buffer_tokens).clamp(0.0, 1.0)


def shaped(batch: AdvantageBatch, section: OverlongSection | None) -> tuple[Tensor, Tensor]:
    """Rewards [n] and group rewards [n, widest], float64, with the length penalty of each sample."""
    rewards, siblings = batch.rewards.double(), batch.group_rewards.double()
    if section is None:
        return rewards, siblings
    return rewards + overlong_penalty(batch.lengths, section), siblings + overlong_penalty(batch.group_lengths, section)


def group_advantages(rewards: Tensor, siblings: Tensor, weights: Tensor, *, normalize_std: bool) -> Tensor:
    """Reward minus the mean of the group's rollouts, divided by their unbiased deviation when `normalize_std`.

    rewards [n]; siblings, weights [n, widest] as in `AdvantageBatch` -> [n] float64. Exactly 0 for a group of equal rewards
    and for a group of one; a NaN reward gives NaN.
    """
    present = weights > 0
    siblings = select(siblings, present)
    rollouts = weights.sum(dim=1).clamp(min=1.0)
    mean = (weights * siblings).sum(dim=1) / rollouts
    centred = rewards - mean
    if normalize_std:
        variance = (weights * (siblings - mean[:, None]) ** 2).sum(dim=1) / (rollouts - 1.0)
        centred = centred / variance.sqrt()
    return select(centred, ~(_flat(siblings, present) | (rollouts <= 1.0)))


def leave_one_out(rewards: Tensor, siblings: Tensor, weights: Tensor) -> Tensor:
    """Reward minus the mean of the other rollouts; shapes as in `group_advantages` -> [n] float64. 0 for a group of one."""
    present = weights > 0
    siblings = select(siblings, present)
    rollouts = weights.sum(dim=1)
    others = ((weights * siblings).sum(dim=1) - rewards) / (rollouts - 1.0)
    return select(rewards - others, ~(_flat(siblings, present) | (rollouts <= 1.0)))


def _flat(siblings: Tensor, present: Tensor) -> Tensor:
    """[n] bool: the rewards of the group are equal, up to rounding."""
    if siblings.shape[1] == 0:
        return torch.ones(len(siblings), dtype=torch.bool)
    lowest = torch.where(present, siblings, torch.full_like(siblings, torch.inf)).amin(dim=1)
    highest = torch.where(present, siblings, torch.full_like(siblings, -torch.inf)).amax(dim=1)
    return highest - lowest <= EQUAL_WITHIN * torch.maximum(highest.abs(), lowest.abs())
