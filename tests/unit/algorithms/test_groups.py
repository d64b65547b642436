"""Rewards relative to siblings, by hand."""

from __future__ import annotations

import math

import pytest
import torch

from vime.algorithms.batch import advantage_batch
from vime.algorithms.groups import group_advantages, leave_one_out, overlong_penalty, shaped
from vime.config.algorithms import OverlongSection


def advantages(rewards, *, normalize_std=True, weights=None):
    group = torch.tensor(rewards, dtype=torch.float64)
    rows = group.expand(len(rewards), -1)
    parts = torch.ones_like(rows) if weights is None else torch.tensor(weights, dtype=torch.float64).expand_as(rows)
    return group_advantages(group, rows, parts, normalize_std=normalize_std).tolist()


@pytest.mark.parametrize("rewards", [[0.1] * 8, [0.7] * 12, [1.0], [0.0, 0.0], [0.3, 0.1 + 0.2]])
@pytest.mark.parametrize("normalize_std", [True, False])
def test_equal_rewards_and_single_samples_have_no_advantage_at_all(rewards, normalize_std):
    assert advantages(rewards, normalize_std=normalize_std) == [0.0] * len(rewards)
    group = torch.tensor(rewards, dtype=torch.float64)
    assert leave_one_out(group, group.expand(len(group), -1), torch.ones(len(group), len(group))).tolist() == [0.0] * len(group)


def test_advantages_use_the_unbiased_deviation():
    assert advantages([0.0, 0.0, 0.0, 1.0]) == pytest.approx([-0.5, -0.5, -0.5, 1.5])
    assert advantages([0.0, 0.0, 0.0, 1.0], normalize_std=False) == pytest.approx([-0.25, -0.25, -0.25, 0.75])


def test_the_baseline_of_leave_one_out_is_the_mean_of_the_others():
    rewards = torch.tensor([1.0, 0.0, 0.5], dtype=torch.float64)
    found = leave_one_out(rewards, rewards.expand(3, -1), torch.ones(3, 3, dtype=torch.float64))
    assert found.tolist() == pytest.approx([1.0 - 0.25, 0.0 - 0.75, 0.5 - 0.5])


def test_a_nan_reward_stays_visible():
    assert all(math.isnan(x) for x in advantages([0.0, float("nan"), 1.0]))
    rewards = torch.tensor([0.0, float("nan"), 1.0], dtype=torch.float64)
    assert all(math.isnan(x) for x in leave_one_out(rewards, rewards.expand(3, -1), torch.ones(3, 3)).tolist())


def test_groups_of_unequal_size_do_not_mix(sample_of):
    """A partial group of two stands beside a group of four; each is compared with its own siblings only."""
    large, small = (1.0, 0.0, 0.0, 0.0), (5.0, 3.0)
    samples = [
        sample_of(1, reward=1.0, group=large),
        sample_of(3, reward=3.0, group=small),
        sample_of(2, reward=0.0, group=large),
    ]
    batch = advantage_batch(samples)
    found = group_advantages(batch.rewards, batch.group_rewards, batch.group_weights, normalize_std=True)
    assert found.tolist() == pytest.approx([1.5, -(0.5**0.5), -0.5])
    assert leave_one_out(batch.rewards, batch.group_rewards, batch.group_weights).tolist() == pytest.approx([1.0, -2.0, -1 / 3])


def test_a_rollout_of_several_samples_counts_once():
    """Rewards 1, 0, 0 of three rollouts, the first in two samples: the statistics are those of [1, 0, 0]."""
    fanned = advantages([1.0, 1.0, 0.0, 0.0], weights=[0.5, 0.5, 1.0, 1.0])
    plain = advantages([1.0, 0.0, 0.0])
    assert fanned == pytest.approx([plain[0], *plain])
    rewards = torch.tensor([1.0, 1.0, 0.0, 0.0], dtype=torch.float64)
    weights = torch.tensor([0.5, 0.5, 1.0, 1.0], dtype=torch.float64).expand(4, -1)
    assert leave_one_out(rewards, rewards.expand(4, -1), weights).tolist() == pytest.approx([1.0, 1.0, -0.5, -0.5])
    assert advantages([1.0, 0.0], weights=[0.5, 0.5]) == [0.0, 0.0]


SECTION = OverlongSection(max_tokens=100, buffer_tokens=20, penalty=0.5)


@pytest.mark.parametrize(("length", "penalty"), [(0, 0.0), (80, 0.0), (90, -0.25), (100, -0.5), (130, -0.5)])
def test_the_length_penalty_rises_over_the_buffer(length, penalty):
    assert overlong_penalty(torch.tensor([length]), SECTION).tolist() == pytest.approx([penalty])


def test_siblings_are_penalised_for_their_own_length(sample_of):
    """Equal rewards and lengths 80 and 100: the shorter one is better."""
    samples = [sample_of(n, reward=1.0, group=(1.0, 1.0), group_lengths=(80, 100)) for n in (80, 100)]
    batch = advantage_batch(samples)
    rewards, siblings = shaped(batch, SECTION)
    assert rewards.tolist() == [1.0, 0.5]
    assert siblings.tolist() == [[1.0, 0.5], [1.0, 0.5]]
    assert group_advantages(rewards, siblings, batch.group_weights, normalize_std=False).tolist() == [0.25, -0.25]
    assert shaped(batch, None)[0].tolist() == [1.0, 1.0]
