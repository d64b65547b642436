"""Masked negative log-likelihood, by hand."""

from __future__ import annotations

import pytest
import torch

from vime.algorithms.base import empty_batch
from vime.algorithms.registry import algorithm_of
from vime.config.schema import GrpoSection, SftSection


def test_loss_is_the_weighted_negative_log_likelihood():
    log_probs = torch.tensor([-1.0, float("nan"), -3.0], requires_grad=True)
    made = empty_batch()
    fields = {**vars(made), "log_probs": log_probs, "mask": torch.tensor([True, False, True])}
    fields |= {"weights": torch.full((3,), 0.5), "entropy": torch.zeros(3)}
    sums = algorithm_of(SftSection()).loss(type(made)(**fields))
    sums.loss.backward()
    assert sums.loss.item() == pytest.approx(2.0)
    assert log_probs.grad.tolist() == [-0.5, 0.0, -0.5]
    assert sums.tokens.item() == 2


@pytest.mark.parametrize("section", [SftSection(), GrpoSection(), GrpoSection(entropy_coef=0.1)])
def test_no_tokens_give_zero_and_the_same_names(section):
    sums = algorithm_of(section).empty_sums()
    assert sums.loss.item() == 0.0
    assert sums.tokens.item() == 0
    assert "loss" in sums.weighted
