"""Rewards by token, discounted sums, GAE and whitening, against plain loops and by hand."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vime.algorithms.batch import advantage_batch
from vime.algorithms.returns import discounted_sums, gae, token_rewards, trained_only, whiten
from vime.algorithms.sequences import Sequences
from vime.config.algorithms import KlSection, ReinforcePlusPlusSection

lengths = st.lists(st.integers(0, 9), min_size=1, max_size=5)
factors = st.sampled_from([0.0, 0.5, 0.95, 1.0])


def loop_sums(values: list[float], sizes: list[int], factor: float) -> list[float]:
    result, start = [], 0
    for size in sizes:
        running, row = 0.0, []
        for value in reversed(values[start : start + size]):
            running = value + factor * running
            row.append(running)
        result += row[::-1]
        start += size
    return result


@settings(deadline=None, max_examples=60)
@given(sizes=lengths, factor=factors, data=st.data())
def test_discounted_sums_equal_a_loop(sizes, factor, data):
    values = data.draw(st.lists(st.floats(-3, 3), min_size=sum(sizes), max_size=sum(sizes)))
    found = discounted_sums(torch.tensor(values, dtype=torch.float64), Sequences.of(sizes), factor)
    assert found.tolist() == pytest.approx(loop_sums(values, sizes, factor), abs=1e-12)


def test_invalid_values_stay_in_their_sample():
    values = torch.tensor([1.0, 2.0, float("nan"), 1.0], dtype=torch.float64)
    assert discounted_sums(values, Sequences.of([2, 2]), 0.5)[:2].tolist() == [2.0, 2.0]


@settings(deadline=None, max_examples=60)
@given(sizes=lengths, gamma=factors, lam=factors, data=st.data())
def test_gae_equals_the_recursion(sizes, gamma, lam, data):
    floats = st.lists(st.floats(-3, 3), min_size=sum(sizes), max_size=sum(sizes))
    rewards, values = data.draw(floats), data.draw(floats)
    expected, start = [], 0
    for size in sizes:
        following, running, row = 0.0, 0.0, []
        for t in reversed(range(start, start + size)):
            running = rewards[t] + gamma * following - values[t] + gamma * lam * running
            following = values[t]
            row.append(running)
        expected += row[::-1]
        start += size
    tensors = (torch.tensor(x, dtype=torch.float64) for x in (rewards, values))
    assert gae(*tensors, Sequences.of(sizes), gamma=gamma, lam=lam).tolist() == pytest.approx(expected, abs=1e-12)


def test_gae_by_hand():
    """Reward 1 at the end, values 0.5 and 0.25, gamma 1, lam 0.5: the last 0.75, the first -0.25 + 0.5 x 0.75."""
    found = gae(
        torch.tensor([0.0, 1.0], dtype=torch.float64),
        torch.tensor([0.5, 0.25], dtype=torch.float64),
        Sequences.of([2]),
        gamma=1.0,
        lam=0.5,
    )
    assert found.tolist() == [-0.25 + 0.375, 0.75]


@pytest.mark.parametrize("masked", [9.0, -100.0, float("nan"), float("inf")])
def test_divergence_at_masked_tokens_changes_no_return(sample_of, masked):
    """Divergences 0.1, anything, 0.1 with mask 1, 0, 1 and reward 1: returns 0.8 and 0.9."""
    section = ReinforcePlusPlusSection(kl=KlSection(coef=1.0, estimator="k1", use="reward"))
    sample = sample_of(3, loss_mask=(1, 0, 1), log_probs=(-1.0, -1.0, -1.0), ref_log_probs=(-1.1, -1.0 - masked, -1.1))
    rewards, at, samples = token_rewards(advantage_batch([sample]), torch.tensor([1.0]), section)
    assert at.tolist() == [0, 2]
    assert discounted_sums(rewards, samples, 1.0).tolist() == pytest.approx([0.8, 0.9], rel=1e-6)


def test_the_reward_stands_on_the_last_trained_token(sample_of):
    samples = [sample_of(3, loss_mask=(1, 1, 0)), sample_of(2, loss_mask=(0, 0)), sample_of(1)]
    rewards, at, _ = token_rewards(advantage_batch(samples), torch.tensor([5.0, 6.0, 7.0]), ReinforcePlusPlusSection())
    assert at.tolist() == [0, 1, 5]
    assert rewards.tolist() == [0.0, 5.0, 7.0]


def test_no_trained_token_gives_nothing(sample_of):
    batch = advantage_batch([sample_of(2, loss_mask=(0, 0))])
    at, samples = trained_only(batch)
    assert at.tolist() == []
    assert token_rewards(batch, batch.rewards, ReinforcePlusPlusSection())[0].tolist() == []
    assert gae(torch.zeros(0), torch.zeros(0), samples, gamma=1.0, lam=1.0).tolist() == []


def alone(values):
    return values


def test_whitening_by_hand():
    """1, 2, 3 among masked values: mean 2, unbiased variance 1."""
    values = torch.tensor([1.0, 99.0, 2.0, 3.0, float("nan")], dtype=torch.float64)
    mask = torch.tensor([True, False, True, True, False])
    assert whiten(values, mask, alone).tolist() == pytest.approx([-1.0, 0.0, 0.0, 1.0, 0.0], abs=1e-7)


@pytest.mark.parametrize("values", [[], [3.0], [0.1] * 7])
def test_whitening_nothing_one_value_or_equal_values_gives_zero(values):
    found = whiten(torch.tensor(values, dtype=torch.float64), torch.ones(len(values), dtype=torch.bool), alone)
    assert found.tolist() == [0.0] * len(values)


def test_what_equals_the_mean_up_to_rounding_has_no_sign():
    """0.1 + 0.2 - 0.3 is not 0: added up in another order the mean is, and a value of 0 must not turn positive or negative."""
    values = torch.tensor([0.1, 0.2, -0.3, 0.0], dtype=torch.float64)
    assert values.sum() != 0.0
    assert whiten(values, torch.ones(4, dtype=torch.bool), alone)[3].item() == 0.0


def test_whitening_a_large_offset_loses_nothing():
    values = torch.tensor([1e9, 1e9 + 1, 1e9 + 2], dtype=torch.float64)
    assert whiten(values, torch.ones(3, dtype=torch.bool), alone).tolist() == pytest.approx([-1.0, 0.0, 1.0], abs=1e-6)
