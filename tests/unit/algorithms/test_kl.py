"""Estimators of the divergence, by hand."""

from __future__ import annotations

import math

import pytest
import torch

from vime.algorithms.kl import ESTIMATORS, divergence, kl_loss


def test_k3_by_hand():
    """Of reference minus policy 0, 0.5, -0.5, 1."""
    log_ratio = -torch.tensor([0.0, 0.5, -0.5, 1.0], dtype=torch.float64)
    assert divergence(log_ratio, "k3").tolist() == pytest.approx([0.0, 0.1487, 0.1065, 0.7183], abs=5e-5)
    assert divergence(log_ratio, "k2").tolist() == pytest.approx([0.0, 0.125, 0.125, 0.5])
    assert divergence(log_ratio, "k1").tolist() == [0.0, -0.5, 0.5, -1.0]


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [100.0, -100.0, 1000.0, -1000.0])
def test_extreme_log_ratios_have_finite_values_and_gradients(estimator, dtype, value):
    log_ratio = torch.tensor([value], dtype=dtype, requires_grad=True)
    found = divergence(log_ratio, estimator)
    found.sum().backward()
    assert torch.isfinite(found).all()
    assert torch.isfinite(log_ratio.grad).all()


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_nan_stays_visible(estimator):
    assert torch.isnan(divergence(torch.tensor([float("nan")]), estimator)).all()


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_gradients_match_finite_differences(estimator):
    x = torch.tensor([-1.0, 0.3, 0.0, 1.5], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-1.5, 0.1, 0.2, 0.5], dtype=torch.float64)
    old = torch.tensor([-1.1, 0.2, 0.1, 1.4], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda y: kl_loss(y, reference, estimator), (x,))
    assert torch.autograd.gradcheck(lambda y: kl_loss(y, reference, estimator, ratio=(y - old).exp()), (x,))


@pytest.mark.parametrize("estimator", ["k1", "k3", "low_var"])
def test_with_the_ratio_value_and_gradient_are_those_of_the_divergence(estimator):
    """Summed over a whole vocabulary of three with the old policy's probabilities, against KL(policy || reference)."""
    logits = torch.tensor([0.2, -0.4, 0.9], dtype=torch.float64, requires_grad=True)
    reference = torch.log_softmax(torch.tensor([0.0, 0.5, 0.1], dtype=torch.float64), dim=0)
    old = torch.log_softmax(torch.tensor([0.3, -0.1, 0.5], dtype=torch.float64), dim=0)
    policy = torch.log_softmax(logits, dim=0)
    estimate = (old.exp() * kl_loss(policy, reference, estimator, ratio=(policy - old).exp())).sum()
    (gradient,) = torch.autograd.grad(estimate, logits, retain_graph=True)
    exact = (policy.exp() * (policy - reference)).sum()
    (expected,) = torch.autograd.grad(exact, logits)
    assert estimate.item() == pytest.approx(exact.item())
    assert gradient.tolist() == pytest.approx(expected.tolist())


def test_k1_alone_has_no_expected_gradient_on_policy():
    """Why it is refused as a loss: averaged over what the policy samples, its gradient is 0 whatever the reference."""
    logits = torch.tensor([0.2, -0.4, 0.9], dtype=torch.float64, requires_grad=True)
    policy = torch.log_softmax(logits, dim=0)
    reference = torch.tensor([math.log(0.2), math.log(0.5), math.log(0.3)], dtype=torch.float64)
    (policy.detach().exp() * kl_loss(policy, reference, "k1")).sum().backward()
    assert logits.grad.abs().max() < 1e-15
    policy = torch.log_softmax(logits, dim=0)
    (gradient,) = torch.autograd.grad((policy.detach().exp() * kl_loss(policy, reference, "k2")).sum(), logits)
    assert gradient.abs().max() > 0.01


def test_low_var_is_k3_up_to_ten():
    values = torch.tensor([-3.0, -1.0, 2.0, 5.0], dtype=torch.float64)
    k3 = divergence(values, "k3")
    assert divergence(values, "low_var").tolist() == pytest.approx(k3.clamp(max=10.0).tolist())
    assert k3[0] > 10.0
