"""Estimators of the divergence KL(policy || reference) from single samples (Schulman 2020, http://joschu.net/blog/kl-approx.html)."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from vime.algorithms.base import bounded_ratio

LOW_VAR_LIMIT = 10.0


def k1(log_ratio: Tensor) -> Tensor:
    """log_ratio = log policy - log reference, any shape -> the same shape. Unbiased, of either sign."""
    return log_ratio


def k2(log_ratio: Tensor) -> Tensor:
    """Half the square: biased, but its gradient is that of the divergence on average."""
    return 0.5 * log_ratio**2


def k3(log_ratio: Tensor) -> Tensor:
    """exp(-x) - 1 + x: unbiased and never negative."""
    return bounded_ratio(-log_ratio) - 1.0 + log_ratio


def low_var(log_ratio: Tensor) -> Tensor:
    """k3, at most 10 a token: beyond it neither value nor gradient grows."""
    return k3(log_ratio).clamp(-LOW_VAR_LIMIT, LOW_VAR_LIMIT)


ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3, "low_var": low_var}


def divergence(log_ratio: Tensor, estimator: str) -> Tensor:
    """The named estimator of log policy - log reference, any shape -> the same shape."""
    return ESTIMATORS[estimator](log_ratio)


def kl_loss(log_probs: Tensor, ref_log_probs: Tensor, estimator: str, *, ratio: Tensor | None = None) -> Tensor:
    """Divergence per token with gradient; all [tokens].

    With `ratio` (current to old policy, with gradient) the estimate is multiplied by it, which makes value and gradient
    unbiased although the old policy sampled (DeepSeek-V3.2, arXiv:2512.02556, section 3.1).
    """
    estimate = divergence(log_probs - ref_log_probs, estimator)
    return estimate if ratio is None else ratio * estimate
