"""Batches of tokens and samples made of short lists, and ranks that add up what each of them holds."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from vime.algorithms.base import TokenBatch
from vime.algorithms.batch import advantage_batch
from vime.algorithms.sequences import Sequences
from vime.types import TrainSample


def make_batch(log_probs: Any, old: Any, adv: Any, *, lengths: Sequence[int] = (), **given: Any) -> TokenBatch:
    """Tokens of samples of `lengths` (default: one sample), float64 unless a tensor says otherwise; weights 1."""

    def tensor(values: Any) -> Tensor:
        return values if isinstance(values, Tensor) else torch.tensor(values, dtype=torch.float64)

    now, before = tensor(log_probs), tensor(old)
    size = len(now)
    lengths = tuple(lengths) or ((size,) if size else ())
    fields: dict[str, Any] = {
        "entropy": torch.zeros(size, dtype=torch.float64),
        "policy_log_probs": before,
        "rollout_log_probs": before,
        "mask": torch.ones(size, dtype=torch.bool),
        "weights": torch.ones(size, dtype=torch.float64),
        "prompt_lengths": (2,) * len(lengths),
    }
    for name, value in given.items():
        fields[name] = torch.tensor(value, dtype=torch.bool) if name == "mask" else tensor(value)
    return TokenBatch(log_probs=now, old_log_probs=before, advantages=tensor(adv), sequences=Sequences.of(lengths), **fields)


def make_sample(size: int = 2, *, reward: float | None = 1.0, group: Sequence[float] = (1.0, 0.0), **given: Any) -> TrainSample:
    """A sample of `size` response tokens, all trained."""
    fields: dict[str, Any] = {"log_probs": (-1.0,) * size, "loss_mask": (1,) * size, "prompt_ids": (1, 2), **given}
    return TrainSample(response_ids=(5,) * size, reward=reward, group_rewards=tuple(group), **fields)


def on_ranks(shares: Sequence[Sequence[TrainSample]], work: Callable[[Any, Any], Tensor]) -> list[Tensor]:
    """`work(advantage batch, reduce)` of every rank at once; `reduce` waits for all of them."""
    barrier = threading.Barrier(len(shares))
    slots: list[Tensor | None] = [None] * len(shares)
    results: list[Tensor | None] = [None] * len(shares)

    def rank(index: int) -> None:
        def reduce(values: Tensor) -> Tensor:
            assert values.dtype == torch.float64
            slots[index] = values
            barrier.wait(10)
            total = torch.stack([slot for slot in slots if slot is not None]).sum(dim=0)
            barrier.wait(10)
            return total

        results[index] = work(advantage_batch(shares[index]), reduce)

    threads = [threading.Thread(target=rank, args=(index,)) for index in range(len(shares))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return [result for result in results if result is not None]


@pytest.fixture
def batch_of() -> Callable[..., TokenBatch]:
    """`make_batch(log_probs, old, adv, ...)`."""
    return make_batch


@pytest.fixture
def sample_of() -> Callable[..., TrainSample]:
    """`make_sample(size, ...)`."""
    return make_sample


@pytest.fixture
def ranks() -> Callable[..., list[Tensor]]:
    """`on_ranks(shares, work)`."""
    return on_ranks
