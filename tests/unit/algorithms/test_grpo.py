"""Advantages, ratio and loss of GRPO, by hand."""

from __future__ import annotations

import math

import pytest
import torch

from vime.algorithms.base import TokenBatch, bounded_ratio, masked_sum, token_weights
from vime.algorithms.grpo import Grpo, clipped_loss, group_advantages
from vime.config.schema import GrpoSection


def advantages(rewards, *, normalize_std=True):
    group = torch.tensor(rewards, dtype=torch.float64)
    return group_advantages(group, group.expand(len(rewards), -1), normalize_std=normalize_std)


def batch(log_probs, old, adv, mask=None, weights=None, entropy=None):
    n = len(log_probs)
    tensor = torch.as_tensor
    return TokenBatch(
        log_probs=tensor(log_probs),
        entropy=tensor(entropy if entropy is not None else [0.0] * n),
        old_log_probs=tensor(old),
        rollout_log_probs=tensor(old),
        advantages=tensor(adv),
        mask=tensor(mask if mask is not None else [True] * n),
        weights=tensor(weights if weights is not None else [1.0] * n),
    )


@pytest.mark.parametrize("rewards", [[0.1] * 8, [0.7] * 12, [1.0], [0.0, 0.0], [0.3, 0.1 + 0.2]])
def test_equal_rewards_and_single_samples_have_no_advantage_at_all(rewards):
    assert advantages(rewards).tolist() == [0.0] * len(rewards)


def test_advantages_use_the_unbiased_deviation():
    assert advantages([0.0, 0.0, 0.0, 1.0]).tolist() == pytest.approx([-0.5, -0.5, -0.5, 1.5])
    assert advantages([0.0, 0.0, 0.0, 1.0], normalize_std=False).tolist() == pytest.approx([-0.25, -0.25, -0.25, 0.75])


def test_a_nan_reward_stays_visible():
    assert all(math.isnan(x) for x in advantages([0.0, float("nan"), 1.0]).tolist())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [100.0, -100.0, 1000.0, -1000.0])
def test_extreme_ratios_have_finite_values_and_gradients(value, dtype):
    log_ratio = torch.tensor([value], dtype=dtype, requires_grad=True)
    loss, _ = clipped_loss(log_ratio, torch.tensor([0.0], dtype=dtype), clip_low=0.2, clip_high=0.2)
    plain, _ = clipped_loss(log_ratio, torch.tensor([-1.0], dtype=dtype), clip_low=0.2, clip_high=0.2)
    (loss.sum() + plain.sum()).backward()
    assert torch.isfinite(plain).all()
    assert log_ratio.grad is not None
    assert torch.isfinite(log_ratio.grad).all()


def test_the_usual_range_of_the_ratio_is_untouched():
    x = torch.tensor([0.0, 0.5, -0.5, 3.0])
    assert torch.equal(bounded_ratio(x), x.exp())
    assert torch.isnan(bounded_ratio(torch.tensor([float("nan")]))).all()


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected", "clipped"),
    [
        (1.5, 1.0, -1.28, True),
        (1.5, -1.0, 1.5, False),
        (0.5, 1.0, -0.5, False),
        (0.5, -1.0, 0.8, True),
        (1.1, 2.0, -2.2, False),
    ],
)
def test_the_clip_is_asymmetric_and_pessimistic(ratio, advantage, expected, clipped):
    loss, binds = clipped_loss(torch.tensor([math.log(ratio)]), torch.tensor([float(advantage)]), clip_low=0.2, clip_high=0.28)
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    assert binds.item() is clipped


def test_gradient_matches_finite_differences():
    old, adv = [-1.0, -2.0, -0.5], [1.0, -0.5, 2.0]
    algorithm = Grpo(GrpoSection(entropy_coef=0.1))

    def loss(log_probs):
        made = batch(log_probs, torch.tensor(old, dtype=torch.float64), torch.tensor(adv, dtype=torch.float64))
        doubles = torch.ones(3, dtype=torch.float64)
        entropy = (log_probs * log_probs).clone()
        return algorithm.loss(TokenBatch(**{**vars(made), "weights": doubles, "entropy": entropy})).loss

    x = torch.tensor([-1.1, -2.05, -0.6], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(loss, (x,), eps=1e-6)


def test_invalid_values_under_the_mask_reach_neither_loss_nor_gradient():
    nan = float("nan")
    log_probs = torch.tensor([-1.0, nan, -3.0], requires_grad=True)
    sums = Grpo(GrpoSection(entropy_coef=0.5)).loss(
        batch(log_probs, [-1.0, nan, -3.0], [1.0, nan, 2.0], [True, False, True], [1.0, nan, 1.0], [0.5, nan, 0.5])
    )
    sums.loss.backward()
    assert sums.loss.item() == pytest.approx(-3.0 - 0.5 * 1.0)
    assert log_probs.grad.tolist() == [-1.0, 0.0, -2.0]
    assert sums.tokens.item() == 2
    assert sums.token_sums["entropy_loss"].item() == pytest.approx(1.0)


def test_masked_sum_selects():
    values = torch.tensor([1.0, float("nan"), 3.0], requires_grad=True)
    total = masked_sum(values, torch.tensor([True, False, True]))
    total.backward()
    assert total.item() == 4.0
    assert values.grad.tolist() == [1.0, 0.0, 1.0]


def test_inputs_are_left_as_they_were():
    made = batch([-1.0, -2.0], [-1.5, -1.5], [1.0, -1.0])
    before = {name: value.clone() for name, value in vars(made).items()}
    Grpo(GrpoSection(entropy_coef=0.1)).loss(made)
    assert all(torch.equal(before[name], value) for name, value in vars(made).items())


def test_metrics_by_hand():
    sums = Grpo(GrpoSection()).loss(batch([-1.0, -2.0], [-1.1, -1.0], [1.0, 1.0], entropy=[0.4, 0.2]))
    assert sums.token_sums["ppo_kl"].item() == pytest.approx(-0.1 + 1.0, rel=1e-5)
    assert sums.token_sums["train_rollout_logprob_abs_diff"].item() == pytest.approx(1.1, rel=1e-5)
    assert sums.token_maxima["train_rollout_logprob_abs_diff_max"].item() == pytest.approx(1.0)
    assert sums.token_sums["entropy_loss"].item() == pytest.approx(0.6)
    assert sums.token_sums["pg_clipfrac"].item() == 0.0


def test_weights_average_token_means_over_rollouts_or_all_tokens():
    mask, lengths = torch.tensor([1, 1, 0, 1, 1, 1, 1], dtype=torch.bool), torch.tensor([3, 4])
    by_rollout = token_weights(mask, lengths, loss_mean="rollout", num_rollouts=2, num_tokens=6)
    assert by_rollout.tolist() == pytest.approx([1 / 4] * 3 + [1 / 8] * 4)
    by_token = token_weights(mask, lengths, loss_mean="token", num_rollouts=2, num_tokens=6)
    assert by_token.tolist() == pytest.approx([1 / 6] * 7)


def test_a_short_and_a_long_sample_are_weighted_by_tokens_not_by_micro_batch():
    """One token of loss 1 and nine of loss 0, apart or together, are a mean of 0.1."""
    total = 0.0
    for loss, length in ((1.0, 1), (0.0, 9)):
        mask = torch.ones(length, dtype=torch.bool)
        weights = token_weights(mask, torch.tensor([length]), loss_mean="token", num_rollouts=2, num_tokens=10)
        total += masked_sum(torch.full((length,), loss), mask, weights).item()
    assert total == pytest.approx(0.1)


def test_a_sample_without_trained_tokens_adds_nothing():
    mask = torch.zeros(3, dtype=torch.bool)
    weights = token_weights(mask, torch.tensor([3]), loss_mean="rollout", num_rollouts=1, num_tokens=0)
    sums = Grpo(GrpoSection()).loss(batch([-1.0] * 3, [-2.0] * 3, [1.0] * 3, mask, weights))
    assert sums.loss.item() == 0.0
    assert sums.tokens.item() == 0
