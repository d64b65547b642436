"""Ratio, clip, weights and metrics of the clipped loss, by hand."""

from __future__ import annotations

import math

import pytest
import torch

from vime.algorithms.base import bounded_ratio, masked_max, masked_sum, token_weights
from vime.algorithms.batch import advantage_batch
from vime.algorithms.grpo import Grpo
from vime.algorithms.losses import clipped_loss
from vime.config.algorithms import GrpoSection, OverlongSection


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


@pytest.mark.parametrize(
    ("ratio", "advantage", "dual_clip", "expected"),
    [(10.0, -1.0, 3.0, 3.0), (10.0, -1.0, None, 10.0), (1.5, 1.0, 3.0, -1.2), (2.0, -1.0, 3.0, 2.0)],
)
def test_the_second_clip_stops_losses_of_negative_advantages(batch_of, ratio, advantage, dual_clip, expected):
    """Through the algorithm, so that the setting is known to arrive."""
    sums = Grpo(GrpoSection(dual_clip=dual_clip)).loss(batch_of([math.log(ratio)], [0.0], [advantage]))
    assert sums.loss.item() == pytest.approx(expected)
    assert sums.token_sums["pg_clipfrac"].item() == (expected != -ratio * advantage)


def test_every_token_gets_its_samples_advantage(sample_of, ranks):
    samples = [sample_of(2, reward=1.0), sample_of(3, reward=0.0, loss_mask=(1, 0, 1))]
    (found,) = ranks([samples], Grpo(GrpoSection()).advantages)
    half = 0.5**0.5
    assert found.tolist() == pytest.approx([half, half, -half, 0.0, -half])
    assert found.dtype == torch.float32


def test_a_scalar_goes_to_each_steps_own_mask(sample_of, ranks):
    """Two steps of one trajectory, masks [1, 1, 0, 0] and [0, 0, 1, 1], advantage 0.5: none of the first is lost."""
    steps = [sample_of(4, loss_mask=mask) for mask in ((1, 1, 0, 0), (0, 0, 1, 1))]
    (found,) = ranks([steps], Grpo(GrpoSection(normalize_std=False)).advantages)
    assert found.tolist() == [0.5, 0.5, 0.0, 0.0, 0.0, 0.0, 0.5, 0.5]


def test_the_length_penalty_reaches_the_advantage(sample_of, ranks):
    section = GrpoSection(normalize_std=False, overlong=OverlongSection(max_tokens=4, buffer_tokens=2))
    samples = [sample_of(n, reward=1.0, group=(1.0, 1.0), group_lengths=(2, 4)) for n in (2, 4)]
    (found,) = ranks([samples], Grpo(section).advantages)
    assert found.tolist() == [0.5, 0.5, -0.5, -0.5, -0.5, -0.5]


def test_advantages_are_paired_with_their_own_samples(sample_of, ranks):
    """Rewards 1, 0, 0, 1 dealt to ranks as (0, 2) and (1, 3): each rank sees its own, compared with all four."""
    group = (1.0, 0.0, 0.0, 1.0)
    samples = [sample_of(1, reward=reward, group=group) for reward in group]
    found = ranks([samples[0::2], samples[1::2]], Grpo(GrpoSection(normalize_std=False)).advantages)
    assert [rows.tolist() for rows in found] == [[0.5, -0.5], [-0.5, 0.5]]


def test_inputs_are_left_as_they_were(batch_of, sample_of):
    made = batch_of([-1.0, -2.0], [-1.5, -1.5], [1.0, -1.0])
    samples = advantage_batch([sample_of(2), sample_of(1)])
    for batch, work in (
        (made, Grpo(GrpoSection(entropy_coef=0.1)).loss),
        (samples, lambda b: Grpo(GrpoSection()).advantages(b, None)),
    ):
        before = {name: value.clone() for name, value in vars(batch).items() if isinstance(value, torch.Tensor)}
        work(batch)
        for name, value in before.items():
            torch.testing.assert_close(vars(batch)[name], value, rtol=0.0, atol=0.0, equal_nan=True)


def test_metrics_by_hand(batch_of):
    sums = Grpo(GrpoSection()).loss(
        batch_of([-1.0, -2.0], [-1.1, -1.0], [1.0, 1.0], policy_log_probs=[-1.0, -2.0], entropy=[0.4, 0.2])
    )
    found = {name: value.item() for name, value in sums.token_sums.items()}
    assert found["ppo_kl"] == pytest.approx(-0.1 + 1.0)
    assert found["ois"] == pytest.approx(math.exp(0.1) + math.exp(-1.0))
    assert found["train_rollout_logprob_abs_diff"] == pytest.approx(1.1)
    assert sums.token_maxima["train_rollout_logprob_abs_diff_max"].item() == pytest.approx(1.0)
    assert found["entropy_loss"] == pytest.approx(0.6)
    assert found["pg_clipfrac"] == 0.0
    assert found["rollout/advantages"] == 2.0
    assert found["rollout/log_probs"] == -3.0
    assert found["rollout/rollout_log_probs"] == pytest.approx(-2.1)


def test_masked_sum_and_maximum_select():
    values = torch.tensor([1.0, float("nan"), 3.0], requires_grad=True)
    mask = torch.tensor([True, False, True])
    total = masked_sum(values, mask)
    total.backward()
    assert total.item() == 4.0
    assert values.grad.tolist() == [1.0, 0.0, 1.0]
    assert masked_max(values, mask).item() == 3.0
    assert masked_max(torch.zeros(0), torch.zeros(0, dtype=torch.bool)).item() == 0.0


def test_weights_average_token_means_over_rollouts_or_all_tokens():
    mask, lengths = torch.tensor([1, 1, 0, 1, 1, 1, 1], dtype=torch.bool), torch.tensor([3, 4])
    by_rollout = token_weights(mask, lengths, loss_mean="rollout", num_rollouts=2, num_tokens=6)
    assert by_rollout.tolist() == pytest.approx([1 / 4] * 3 + [1 / 8] * 4)
    by_token = token_weights(mask, lengths, loss_mean="token", num_rollouts=2, num_tokens=6)
    assert by_token.tolist() == pytest.approx([1 / 6] * 7)


def test_samples_of_one_rollout_share_its_denominator():
    """A rollout of six trained tokens in two samples, and a rollout of one sample: each rollout weighs one half."""
    mask, lengths = torch.ones(8, dtype=torch.bool), torch.tensor([4, 2, 2])
    weights = token_weights(
        mask, lengths, loss_mean="rollout", num_rollouts=2, num_tokens=8, rollout_tokens=torch.tensor([6, 6, 0])
    )
    assert weights.tolist() == pytest.approx([1 / 12] * 6 + [1 / 4] * 2)
