"""The loss unit: whatever the micro-batches, ranks and order, loss and gradient are those of the whole batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vime.algorithms.base import TokenBatch, masked_sum, token_weights
from vime.algorithms.registry import algorithm_of
from vime.algorithms.sequences import Sequences
from vime.config import algorithms as sections
from vime.config.algorithms import KlSection
from vime.config.corrections import CorrectionSection

KINDS = sections.kinds()
SETTINGS: dict[str, Any] = {
    "entropy_coef": 0.1,
    "kl": KlSection(coef=0.2),
    "old_log_probs": "recompute",
    "correction": CorrectionSection(level="sequence", high=1.3, opsm_delta=0.01),
}

Row = tuple[list[bool], int]
"""A sample: the mask of its tokens, and the rollout that it is of."""

rows = st.lists(st.tuples(st.lists(st.booleans(), min_size=1, max_size=5), st.integers(0, 3)), min_size=1, max_size=6)
parts = st.lists(st.integers(0, 3), min_size=6, max_size=6)


class Batch:
    """A whole batch: a policy of one parameter a token, and everything else drawn."""

    def __init__(self, samples: list[Row], seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.samples, self.sizes = samples, [len(mask) for mask, _ in samples]
        total = sum(self.sizes)

        def numbers(scale: float) -> torch.Tensor:
            return scale * torch.randn(total, generator=draw, dtype=torch.float64)

        self.old = numbers(0.5) - 2.0
        self.parameter = (self.old + numbers(0.1)).requires_grad_()
        self.rollout, self.ref, self.advantages = self.old + numbers(0.1), self.old + numbers(0.2), numbers(1.0)
        trained: dict[int, int] = {}
        for mask, rollout in samples:
            trained[rollout] = trained.get(rollout, 0) + sum(mask)
        self.rollout_tokens = [trained[rollout] for _, rollout in samples]
        self.num_rollouts, self.num_tokens = len(trained), sum(trained.values())

    def micro_batch(self, members: list[int], loss_mean: str, scale: int) -> TokenBatch:
        starts = torch.tensor(self.sizes).cumsum(0) - torch.tensor(self.sizes)
        at = torch.cat([torch.arange(self.sizes[i]) + starts[i] for i in members]) if members else torch.zeros(0).long()
        mask = torch.tensor([flag for i in members for flag in self.samples[i][0]], dtype=torch.bool)
        weights = token_weights(
            mask,
            torch.tensor([self.sizes[i] for i in members], dtype=torch.long),
            loss_mean=loss_mean,
            num_rollouts=self.num_rollouts,
            num_tokens=scale,
            rollout_tokens=torch.tensor([self.rollout_tokens[i] for i in members], dtype=torch.long),
        )
        now = self.parameter[at]
        return TokenBatch(
            log_probs=now,
            entropy=-3.0 * now,
            old_log_probs=self.old[at],
            policy_log_probs=self.old[at],
            rollout_log_probs=self.rollout[at],
            advantages=self.advantages[at],
            mask=mask,
            weights=weights.double(),
            sequences=Sequences.of([self.sizes[i] for i in members]),
            ref_log_probs=self.ref[at],
        )

    def step(self, algorithm: Any, split: list[list[int]], loss_mean: str) -> tuple[dict[str, float], torch.Tensor]:
        """Loss and metrics summed over the micro-batches, and the gradient."""
        self.parameter.grad = None
        scale = self.num_tokens if loss_mean == "token" else self.num_rollouts * 7
        numbers: dict[str, float] = {}
        for members in split:
            sums = algorithm.loss(self.micro_batch(members, loss_mean, scale))
            sums.loss.backward()
            for name, value in {**sums.weighted, **sums.token_sums, **sums.sequence_sums}.items():
                numbers[name] = numbers.get(name, 0.0) + value.item()
        assert self.parameter.grad is not None
        return numbers, self.parameter.grad.clone()


@pytest.mark.parametrize("loss_mean", ["rollout", "token", "constant"])
@pytest.mark.parametrize("kind", ["grpo", "gspo", "cispo", "ppo", "sft"])
@settings(deadline=None, max_examples=15)
@given(samples=rows, part=parts, seed=st.integers(0, 100))
def test_any_split_gives_the_same_loss_gradient_and_metrics(kind, loss_mean, samples, part, seed):
    """Micro-batches, ranks and packs are all the same to the loss: sets of whole samples, some of them empty."""
    algorithm = algorithm_of(KINDS[kind]() if kind == "sft" else KINDS[kind](**SETTINGS))
    batch = Batch(samples, seed)
    whole, gradient = batch.step(algorithm, [list(range(len(samples)))], loss_mean)
    assigned = [[i for i in range(len(samples)) if part[i] == k] for k in range(4)]
    for split in (assigned, [[i] for i in reversed(range(len(samples)))]):
        numbers, other = batch.step(algorithm, split, loss_mean)
        assert numbers == pytest.approx(whole, rel=1e-9, abs=1e-12)
        assert torch.allclose(other, gradient, rtol=1e-9, atol=1e-12)


@settings(deadline=None, max_examples=40)
@given(samples=rows, seed=st.integers(0, 100))
def test_means_are_those_of_rollouts_or_tokens(samples, seed):
    """Against a loop over rollouts: a rollout of several samples has one denominator; masked ones count as rollouts."""
    batch = Batch(samples, seed)
    made = batch.micro_batch(list(range(len(samples))), "rollout", 0)
    by_rollout: dict[int, list[float]] = {}
    values, mask = batch.advantages.split(batch.sizes), made.mask.split(batch.sizes)
    for (_, rollout), row, keep in zip(samples, values, mask, strict=True):
        by_rollout.setdefault(rollout, []).extend(row[keep].tolist())
    expected = sum(sum(row) / max(len(row), 1) for row in by_rollout.values()) / len(by_rollout)
    assert masked_sum(batch.advantages, made.mask, made.weights).item() == pytest.approx(expected, rel=1e-6, abs=1e-6)
    by_token = batch.micro_batch(list(range(len(samples))), "token", batch.num_tokens)
    trained = [value for row in by_rollout.values() for value in row]
    expected = sum(trained) / max(len(trained), 1)
    assert masked_sum(batch.advantages, by_token.mask, by_token.weights).item() == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_a_short_and_a_long_sample_are_weighted_by_tokens_not_by_micro_batch():
    """One token of loss 1 and nine of loss 0, apart or together, are a mean of 0.1."""
    total = 0.0
    for loss, length in ((1.0, 1), (0.0, 9)):
        mask = torch.ones(length, dtype=torch.bool)
        weights = token_weights(mask, torch.tensor([length]), loss_mean="token", num_rollouts=2, num_tokens=10)
        total += masked_sum(torch.full((length,), loss), mask, weights).item()
    assert total == pytest.approx(0.1)
