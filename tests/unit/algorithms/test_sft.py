"""Masked negative log-likelihood, by hand."""

from __future__ import annotations

import pytest
import torch

from vime.algorithms.registry import algorithm_of
from vime.config.schema import SftSection


def test_loss_is_the_weighted_negative_log_likelihood(batch_of):
    log_probs = torch.tensor([-1.0, float("nan"), -3.0], requires_grad=True)
    made = batch_of(log_probs, torch.zeros(3), torch.zeros(3), mask=[True, False, True], weights=[0.5, 0.5, 0.5])
    sums = algorithm_of(SftSection()).loss(made)
    sums.loss.backward()
    assert sums.loss.item() == pytest.approx(2.0)
    assert log_probs.grad.tolist() == [-0.5, 0.0, -0.5]
    assert sums.tokens.item() == 2
