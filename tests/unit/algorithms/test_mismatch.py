"""Metrics of the difference between trainer and sampler, against definitions written out."""

from __future__ import annotations

import math

import pytest
import torch

from vime.algorithms import mismatch
from vime.algorithms.corrections import corrected
from vime.algorithms.grpo import Grpo
from vime.algorithms.sequences import Sequences
from vime.config.algorithms import GrpoSection
from vime.config.corrections import CorrectionSection, RejectSection

POLICY = torch.tensor([-1.0, -2.0, -0.5, -3.0], dtype=torch.float64)
ROLLOUT = torch.tensor([-1.2, -1.5, -0.5, -2.0], dtype=torch.float64)
MASK = torch.tensor([True, True, True, False])


def means(sums):
    """As the trainer divides them."""
    tokens, samples = sums.mask.sum(), sums.trained.sum()
    found = {name: (value / tokens).item() for name, value in sums.tokens.items()}
    return found | {name: (value / samples).item() for name, value in sums.samples.items()}


def test_differences_by_definition():
    """Two responses of two tokens, the last one masked: log-ratios 0.2, -0.5 and 0."""
    sums = mismatch.Sums(MASK, Sequences.of([2, 2]))
    mismatch.differences(sums, POLICY, ROLLOUT)
    found = {name.removeprefix("rollout_corr/"): value for name, value in means(sums).items()}
    assert found == pytest.approx(
        {
            "kl": 0.1,
            "k3_kl": (math.exp(0.2) - 1.2 + math.exp(-0.5) - 0.5) / 3,
            "chi2_token": (math.exp(0.4) + math.exp(-1.0) + 1.0) / 3 - 1.0,
            "training_ppl": (math.exp(1.5) + math.exp(0.5)) / 2,
            "training_log_ppl": 1.0,
            "rollout_ppl": (math.exp(1.35) + math.exp(0.5)) / 2,
            "rollout_log_ppl": 0.925,
            "log_ppl_diff": 0.075,
            "log_ppl_abs_diff": 0.075,
            "ppl_ratio": (math.exp(0.15) + 1.0) / 2,
            "chi2_seq": (math.exp(-0.6) + 1.0) / 2 - 1.0,
        }
    )
    assert sums.maxima["rollout_corr/log_ppl_abs_diff_max"].item() == pytest.approx(0.15)


def test_equal_policies_have_no_difference():
    sums = mismatch.Sums(MASK, Sequences.of([2, 2]))
    mismatch.differences(sums, POLICY, POLICY)
    found = means(sums)
    for name in ("kl", "k3_kl", "chi2_token", "chi2_seq", "log_ppl_diff", "log_ppl_abs_diff"):
        assert found[f"rollout_corr/{name}"] == 0.0
    assert found["rollout_corr/ppl_ratio"] == 1.0


def test_weights_by_definition(batch_of):
    """Ratios 4, 0.25 and 1, truncated to 2: 2, 0.25 and 1."""
    log_ratio = torch.tensor([4.0, 0.25, 1.0, 9.0], dtype=torch.float64).log()
    section = CorrectionSection(level="token", high=2.0, reject=(RejectSection(statistic="token_k1", high=3.0, low=0.3),))
    batch = batch_of(
        POLICY,
        POLICY,
        [1.0] * 4,
        lengths=(2, 2),
        mask=MASK.tolist(),
        policy_log_probs=POLICY,
        rollout_log_probs=POLICY - log_ratio,
    )
    sums = mismatch.Sums(batch.mask, batch.sequences)
    mismatch.weights(sums, corrected(batch, section), section)
    found = mismatch.finish(means(sums))
    square = (4.0 + 0.0625 + 1.0) / 3
    mean = 3.25 / 3
    assert found == pytest.approx(
        {
            "rollout_corr/rollout_is_mean": mean,
            "rollout_corr/rollout_is_std": math.sqrt(square - mean**2),
            "rollout_corr/rollout_is_eff_sample_size": mean**2 / square,
            "rollout_corr/rollout_is_ratio_fraction_high": 1 / 3,
            "rollout_corr/rollout_is_ratio_fraction_low": 1 / 3,
            "rollout_corr/rollout_is_oob_ratio": 1 / 3,
            "rollout_corr/rollout_is_seq_mean": (1.125 + 1.0) / 2,
            "rollout_corr/rollout_rs_token_k1_masked_fraction": 2 / 3,
            "rollout_corr/rollout_rs_token_k1_seq_masked_fraction": 1 / 2,
            "rollout_corr/rollout_rs_masked_fraction": 2 / 3,
            "rollout_corr/rollout_rs_seq_masked_fraction": 1 / 2,
            "tis": 5.25 / 3,
            "tis_abs": (3.0 + 0.75) / 3,
            "tis_clipfrac": 1 / 3,
        }
    )
    assert sums.maxima["rollout_corr/rollout_is_max"].item() == 2.0


def test_the_share_of_masked_sequences_counts_sequences(batch_of):
    section = GrpoSection(correction=CorrectionSection(opsm_delta=0.1))
    batch = batch_of([-1.3, -1.1, -1.0], [-1.0, -1.0, -1.0], [-1.0, -1.0, -1.0], lengths=(2, 1))
    sums = Grpo(section).loss(batch)
    assert sums.sequence_sums["opsm_clipfrac"].item() == 1.0
    assert sums.sequences.item() == 2


def test_nothing_weighed_has_an_effective_size_of_zero():
    assert mismatch.finish({"rollout_corr/rollout_is_mean": 0.0, "rollout_corr/rollout_is_square": 0.0, "loss": 1.0}) == {
        "rollout_corr/rollout_is_mean": 0.0,
        "rollout_corr/rollout_is_std": 0.0,
        "rollout_corr/rollout_is_eff_sample_size": 0.0,
        "loss": 1.0,
    }
