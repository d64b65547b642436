"""Samples as the tensors that advantages and returns are computed from."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from vime.algorithms.base import AdvantageBatch
from vime.types import TrainSample


def advantage_batch(samples: Sequence[TrainSample], *, log_probs: Tensor | None = None) -> AdvantageBatch:
    """Samples in order, facts that one lacks as NaN. `log_probs` [tokens] is the ratio's denominator; None: the sampler's."""
    rollout = _by_token(samples, "log_probs")
    lengths = torch.tensor([len(s.response_ids) for s in samples], dtype=torch.long)
    return AdvantageBatch(
        rewards=torch.tensor([float("nan") if s.reward is None else s.reward for s in samples], dtype=torch.float64),
        group_rewards=_padded([s.group_rewards for s in samples]),
        group_lengths=_padded([s.group_lengths for s in samples], like=[s.group_rewards for s in samples]),
        group_weights=_padded([s.group_weights or (1.0,) * len(s.group_rewards) for s in samples], fill=0.0),
        lengths=lengths,
        total_lengths=lengths + torch.tensor([len(s.prompt_ids) for s in samples], dtype=torch.long),
        mask=torch.tensor([*chain.from_iterable(s.loss_mask for s in samples)], dtype=torch.bool),
        log_probs=rollout if log_probs is None else log_probs.detach().cpu().float(),
        rollout_log_probs=rollout,
        ref_log_probs=_by_token(samples, "ref_log_probs"),
        teacher_log_probs=_by_token(samples, "teacher_log_probs"),
        values=_by_token(samples, "values"),
    )


def _by_token(samples: Sequence[TrainSample], name: str) -> Tensor:
    rows = (getattr(s, name) or (float("nan"),) * len(s.response_ids) for s in samples)
    return torch.tensor([*chain.from_iterable(rows)], dtype=torch.float32)


def _padded(
    rows: Sequence[Sequence[float]], *, fill: float = float("nan"), like: Sequence[Sequence[float]] | None = None
) -> Tensor:
    """[rows, widest of `rows` and `like`] float64."""
    width = max(map(len, [*rows, *(like or ())]), default=0)
    return torch.tensor([[*row, *[fill] * (width - len(row))] for row in rows], dtype=torch.float64).reshape(len(rows), width)
