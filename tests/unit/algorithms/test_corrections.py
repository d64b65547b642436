"""Importance weights, rejections and sequence masks, by hand."""

from __future__ import annotations

import math

import pytest
import torch

from vime.algorithms.corrections import bounded, corrected, importance_ratio, keeps, off_policy
from vime.algorithms.grpo import Grpo
from vime.algorithms.sequences import Sequences
from vime.config.algorithms import GrpoSection
from vime.config.corrections import CorrectionSection, RejectSection

TWO = Sequences.of([2, 2])
MASK = torch.ones(4, dtype=torch.bool)
LOG_RATIO = torch.tensor([math.log(4.0), math.log(0.25), math.log(2.0), math.log(2.0)], dtype=torch.float64)


@pytest.mark.parametrize(
    ("level", "expected"),
    [("token", [4.0, 0.25, 2.0, 2.0]), ("sequence", [1.0, 1.0, 4.0, 4.0]), ("geometric", [1.0, 1.0, 2.0, 2.0])],
)
def test_weights_by_level(level, expected):
    assert importance_ratio(LOG_RATIO, MASK, TWO, level=level).tolist() == pytest.approx(expected)


@pytest.mark.parametrize("level", ["sequence", "geometric"])
def test_masked_tokens_do_not_count_in_a_sequences_weight(level):
    log_ratio = torch.tensor([0.1, 50.0, 0.3], dtype=torch.float64)
    found = importance_ratio(log_ratio, torch.tensor([True, False, True]), Sequences.of([3]), level=level)
    assert found[0].item() == pytest.approx(math.exp(0.4 if level == "sequence" else 0.2))


@pytest.mark.parametrize(
    ("bounds", "low", "expected"),
    [
        ("truncate", 0.0, [2.0, 0.25, 2.0, 2.0]),
        ("truncate", 0.5, [2.0, 0.5, 2.0, 2.0]),
        ("mask", 0.0, [0.0, 0.25, 2.0, 2.0]),
        ("mask", 0.5, [0.0, 0.0, 2.0, 2.0]),
    ],
)
def test_truncation_moves_to_the_bound_and_masking_drops(bounds, low, expected):
    ratio = torch.tensor([4.0, 0.25, 2.0, 2.0], dtype=torch.float64)
    assert bounded(ratio, CorrectionSection(bounds=bounds, low=low, high=2.0)).tolist() == expected


@pytest.mark.parametrize(
    ("statistic", "high", "low", "expected"),
    [
        ("token_k1", 3.0, None, [False, False, True, True]),
        ("token_k1", 5.0, 0.2, [True, True, True, True]),
        ("token_k1", 5.0, 0.3, [True, False, True, True]),
        ("token_k2", 0.5, None, [False, False, True, True]),
        ("token_k3", 0.5, None, [False, False, True, True]),
        ("token_k3", 1.0, None, [False, True, True, True]),
        ("seq_sum_k1", 3.0, None, [True, True, False, False]),
        ("seq_mean_k1", 1.5, None, [True, True, False, False]),
        ("seq_mean_k1", 2.1, None, [True, True, True, True]),
        ("seq_sum_k2", 0.5, None, [False, False, True, True]),
        ("seq_mean_k3", 0.5, None, [False, False, True, True]),
        ("seq_max_k2", 0.5, None, [False, False, True, True]),
        ("seq_max_k3", 0.7, None, [False, False, True, True]),
    ],
)
def test_rejections_by_statistic(statistic, high, low, expected):
    """Ratios 4 and 1/4 in one response, 2 and 2 in another. k2: 0.961 and 0.240; k3: 1.614 and 0.636, and 0.307."""
    rule = RejectSection(statistic=statistic, high=high, low=low)
    assert keeps(LOG_RATIO, MASK, TWO, rule).tolist() == expected


def test_all_rejections_must_agree(batch_of):
    section = CorrectionSection(
        reject=(RejectSection(statistic="token_k1", high=3.0), RejectSection(statistic="seq_sum_k1", high=3.0))
    )
    now = torch.full((4,), -1.0, dtype=torch.float64)
    batch = batch_of(now, now, [1.0] * 4, lengths=(2, 2), policy_log_probs=now, rollout_log_probs=now - LOG_RATIO)
    assert corrected(batch, section).kept.tolist() == [False] * 4
    assert corrected(batch, section).factor.tolist() == [0.0] * 4


def test_rules_of_one_statistic_all_hold(batch_of):
    """Ratios 4 and 1/4, 2 and 2: the first rule takes the first, the second the second; neither takes the others."""
    upper = RejectSection(statistic="token_k1", high=3.0, low=0.1)
    lower = RejectSection(statistic="token_k1", high=5.0, low=0.5)
    now = torch.full((4,), -1.0, dtype=torch.float64)
    batch = batch_of(now, now, [1.0] * 4, lengths=(2, 2), policy_log_probs=now, rollout_log_probs=now - LOG_RATIO)
    for reject in ((upper, lower), (lower, upper)):
        found = corrected(batch, CorrectionSection(reject=reject))
        assert found.kept.tolist() == [False, False, True, True]
        assert found.by_statistic["token_k1"].tolist() == found.kept.tolist()


def test_sequence_masks_look_at_negative_advantages_that_moved_far(batch_of):
    """Old minus current: 0.2 in the first and third response, 0 in the second."""
    batch = batch_of([-1.3, -1.1, -1.0, -1.2], [-1.0, -1.0, -1.0, -1.0], [-1.0, 1.0, -1.0, 1.0], lengths=(2, 1, 1))
    assert off_policy(batch, 0.1).tolist() == [True, False, False, False]
    assert off_policy(batch, 0.25).tolist() == [False] * 4


def test_a_weight_multiplies_loss_and_gradient_and_has_none_itself(batch_of):
    """Trainer/sampler ratio 1.5 bounded to 1.2 and 0.5 kept, at a ratio of 1 to the old policy."""
    section = GrpoSection(old_log_probs="recompute", correction=CorrectionSection(level="token", high=1.2))
    x = torch.tensor([-1.0, -1.0], dtype=torch.float64, requires_grad=True)
    rollout = [-1.0 - math.log(1.5), -1.0 - math.log(0.5)]
    sums = Grpo(section).loss(batch_of(x, [-1.0, -1.0], [1.0, 2.0], rollout_log_probs=rollout))
    sums.loss.backward()
    assert sums.loss.item() == pytest.approx(-1.2 - 2.0 * 0.5)
    assert x.grad.tolist() == pytest.approx([-1.2, -1.0])
    assert sums.token_sums["tis"].item() == pytest.approx(2.0)
    assert sums.token_sums["tis_abs"].item() == pytest.approx(1.0)
    assert sums.token_sums["tis_clipfrac"].item() == 1.0


def test_icepop_drops_what_is_outside_and_the_denominator_stays(batch_of):
    section = GrpoSection(
        old_log_probs="recompute", correction=CorrectionSection(level="token", bounds="mask", low=0.5, high=2.0)
    )
    rollout = [-1.0 - math.log(3.0), -1.0 - math.log(1.25)]
    batch = batch_of([-1.0, -1.0], [-1.0, -1.0], [1.0, 1.0], rollout_log_probs=rollout, weights=[0.5, 0.5])
    assert Grpo(section).loss(batch).loss.item() == pytest.approx(-1.25 * 0.5)


def test_in_bypass_mode_rejections_compare_the_current_policy(batch_of):
    """The ratio is taken to the sampler; a token whose current ratio is 3 is left out."""
    section = GrpoSection(correction=CorrectionSection(reject=(RejectSection(statistic="token_k1", high=2.0),)))
    now = torch.tensor([-1.0 + math.log(3.0), -1.0], dtype=torch.float64)
    batch = batch_of(now, [-1.0, -1.0], [-1.0, -1.0], policy_log_probs=now)
    assert Grpo(section).loss(batch).loss.item() == pytest.approx(1.0)


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_extreme_differences_stay_finite(batch_of, level):
    section = GrpoSection(old_log_probs="recompute", correction=CorrectionSection(level=level, bounds="mask"))
    x = torch.tensor([-1.0, -1.0], requires_grad=True)
    batch = batch_of(x, torch.tensor([-1.0, -1.0]), [1.0, 1.0], rollout_log_probs=[-1000.0, -1.0])
    sums = Grpo(section).loss(batch)
    sums.loss.backward()
    numbers = [*sums.weighted.values(), *sums.token_sums.values(), *sums.sequence_sums.values(), *x.grad]
    assert all(torch.isfinite(value).all() for value in numbers)
