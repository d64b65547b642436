"""Returns and value loss, by hand."""

from __future__ import annotations

import pytest
import torch

from vime.algorithms.batch import advantage_batch
from vime.algorithms.critic import returns, value_loss
from vime.config.algorithms import CriticSection, KlSection, OverlongSection, PpoSection


def losses(values, old, target, *, mask=None, weights=None, clip=0.2):
    def tensor(x):
        return torch.tensor(x, dtype=torch.float64)

    size = len(old)
    return value_loss(
        values if isinstance(values, torch.Tensor) else tensor(values),
        tensor(old),
        tensor(target),
        torch.tensor(mask or [True] * size, dtype=torch.bool),
        tensor(weights or [1.0] * size),
        PpoSection(critic=CriticSection(value_clip=clip)),
    )


def test_returns_are_advantage_plus_value(sample_of):
    """Reward 1, values 0.5 and 0.25, gamma 1, lam 0.5: advantages 0.125 and 0.75."""
    sample = sample_of(2, reward=1.0, values=(0.5, 0.25))
    assert returns(advantage_batch([sample]), PpoSection(lam=0.5)).tolist() == [0.625, 1.0]
    assert returns(advantage_batch([sample]), PpoSection()).tolist() == [1.0, 1.0]


def test_returns_pass_over_what_is_not_trained(sample_of):
    """A tool's answer in the middle has no value, no reward and no discount, whatever stands there."""
    plain = sample_of(2, reward=1.0, values=(0.5, 0.25))
    split = sample_of(4, reward=1.0, values=(0.5, float("nan"), 7.0, 0.25), loss_mask=(1, 0, 0, 1))
    section = PpoSection(gamma=0.9, lam=0.8)
    first, second = (returns(advantage_batch([s]), section).tolist() for s in (plain, split))
    assert second == [first[0], 0.0, 0.0, first[1]]


def test_critic_and_actor_see_the_same_rewards(sample_of):
    """Divergence and length penalty are in the returns."""
    section = PpoSection(
        kl=KlSection(coef=0.5, estimator="k1", use="reward"), overlong=OverlongSection(max_tokens=2, buffer_tokens=1)
    )
    sample = sample_of(2, values=(0.0, 0.0), log_probs=(-1.0, -1.0), ref_log_probs=(-1.2, -1.4))
    assert returns(advantage_batch([sample]), section).tolist() == pytest.approx([-0.1 - 0.2, -0.2], abs=1e-6)


@pytest.mark.parametrize(
    ("value", "old", "target", "clip", "expected", "clipped"),
    [
        (1.0, 0.0, 2.0, 0.2, 0.5 * 1.8**2, 1),
        (1.0, 0.0, 2.0, 0.0, 0.5, 0),
        (0.1, 0.0, 2.0, 0.2, 0.5 * 1.9**2, 0),
        (1.0, 0.0, -1.0, 0.2, 0.5 * 4.0, 0),
    ],
)
def test_the_larger_of_both_errors_counts(value, old, target, clip, expected, clipped):
    sums = losses([value], [old], [target], clip=clip)
    assert sums.loss.item() == pytest.approx(expected)
    assert sums.token_sums["value_clipfrac"].item() == clipped


def test_a_value_within_the_clip_is_not_clipped_by_rounding():
    """Old 0.1, values a little off: adding the difference back would change the last bit."""
    values = torch.linspace(0.0, 0.2, 101, dtype=torch.float64)
    assert losses(values, [0.1] * 101, [7.0] * 101, clip=0.2).token_sums["value_clipfrac"].item() == 0.0


def test_gradient_matches_finite_differences():
    old, target = [0.0, 0.5, 1.0], [0.4, 0.1, 3.0]
    x = torch.tensor([0.1, 0.9, 1.5], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda y: losses(y, old, target).loss, (x,))


def test_masked_values_reach_neither_loss_nor_gradient():
    x = torch.tensor([0.1, float("nan")], dtype=torch.float64, requires_grad=True)
    sums = losses(x, [0.0, float("nan")], [1.0, float("nan")], mask=[True, False], weights=[0.5, float("nan")])
    sums.loss.backward()
    assert sums.loss.item() == pytest.approx(0.5 * 0.5 * 0.81)
    assert x.grad.tolist() == pytest.approx([-0.45, 0.0])
    assert sums.token_sums["values"].item() == pytest.approx(0.1)
    assert sums.token_sums["returns"].item() == 1.0


def test_no_values_give_the_same_names():
    full, none = losses([1.0], [0.0], [1.0]), losses(torch.zeros(0, dtype=torch.float64), [], [])
    assert none.loss.item() == 0.0
    assert none.token_sums.keys() == full.token_sums.keys()
    assert none.weighted.keys() == full.weighted.keys()
