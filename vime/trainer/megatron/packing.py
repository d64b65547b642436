"""Sequences laid end to end in one row (THD), with everything that a micro-batch's loss needs beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from vime.algorithms.base import Algorithm, token_weights
from vime.errors import TrainerError
from vime.trainer.megatron.rotary import POSITIONS
from vime.types import TrainSample, UpdateWork

ALIGNMENT = 8
"""Packs are padded to a multiple of this (times tp), which suits matrix kernels and sequence parallelism."""


@dataclass(frozen=True)
class Pack:
    """One micro-batch's sequences.

    `ids` and `positions` are [1, tokens]; the tail is padding, a segment of its own, because the segments must cover
    every token. `rows` [targets] are the positions whose logits predict the tokens `targets` [targets].
    """

    ids: Tensor
    positions: Tensor
    params: Any
    rows: Tensor
    targets: Tensor


@dataclass(frozen=True)
class Targets:
    """What the loss needs of each target, all [targets]; see `vime.algorithms.base.TokenBatch`."""

    rollout_log_probs: Tensor
    advantages: Tensor
    mask: Tensor
    weights: Tensor


@dataclass(frozen=True, slots=True)
class PackShape:
    """What packs must look like: a multiple of `alignment` tokens, ids below `vocab`, on `device`."""

    alignment: int
    vocab: int
    device: torch.device


def make_pack(sequences: Sequence[Sequence[int]], first_targets: Sequence[int], shape: PackShape) -> Pack:
    """Pack sequences; of sequence i the tokens from position `first_targets[i]` (at least 1) on are targets.

    No sequences make a pack of padding alone, so that a rank without work still takes part in every collective.
    Raises TrainerError for a token id outside the vocabulary.
    """
    lengths = [len(sequence) for sequence in sequences]
    padding = -sum(lengths) % shape.alignment or (0 if lengths else shape.alignment)
    segments = torch.tensor([*lengths, padding] if padding else lengths)
    ids = torch.tensor([*chain.from_iterable(sequences), *[0] * padding], dtype=torch.long)
    check_ids(ids, shape.vocab)
    starts = torch.repeat_interleave(segments.cumsum(0) - segments, segments)
    positions = torch.arange(len(ids)) - starts
    first = torch.tensor([*first_targets, padding] if padding else list(first_targets))
    is_target = positions >= torch.repeat_interleave(first, segments)
    predicted = is_target.nonzero()[:, 0]
    placed = positions.to(shape.device)
    return Pack(
        ids=ids[None].to(shape.device),
        positions=placed[None],
        params=pack_params(segments.tolist(), placed, longest=int(segments.max())),
        rows=(predicted - 1).to(shape.device),
        targets=ids[predicted].to(shape.device),
    )


def check_ids(ids: Tensor, vocab: int) -> None:
    """Raise TrainerError unless all token ids are in the vocabulary."""
    if int(ids.min()) < 0 or int(ids.max()) >= vocab:
        raise TrainerError(
            f"token ids span {int(ids.min())} to {int(ids.max())}, but the vocabulary has {vocab} entries",
            fix="use the model's own tokenizer for data and rollout",
        )


def pack_params(lengths: Sequence[int], positions: Tensor, *, longest: int) -> Any:
    """megatron-core's description of a pack of segments; `positions` [tokens] in them are below `longest`."""
    from megatron.core.packed_seq_params import PackedSeqParams

    ends = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    ends[1:] = torch.tensor(lengths).cumsum(0)
    ends = ends.to(positions.device)
    setattr(ends, POSITIONS, positions)
    return PackedSeqParams(qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=longest, max_seqlen_kv=longest)


def pack_samples(samples: Sequence[TrainSample], shape: PackShape) -> Pack:
    """Prompt and response of every sample; the response tokens are targets."""
    sequences = [(*s.prompt_ids, *s.response_ids) for s in samples]
    return make_pack(sequences, [len(s.prompt_ids) for s in samples], shape)


def target_tensors(samples: Sequence[TrainSample], *, algorithm: Algorithm, work: UpdateWork, device: torch.device) -> Targets:
    """Per-target values of a micro-batch, in the order of its pack's targets."""
    lengths = torch.tensor([len(s.response_ids) for s in samples], dtype=torch.long)
    mask = torch.tensor([*chain.from_iterable(s.loss_mask for s in samples)], dtype=torch.bool)
    if algorithm.needs_rollout_log_probs:
        log_probs = torch.tensor([*chain.from_iterable(s.log_probs for s in samples)], dtype=torch.float32)
    else:
        log_probs = torch.zeros(mask.shape)
    advantages = torch.repeat_interleave(_advantages(samples, algorithm), lengths)
    weights = token_weights(
        mask, lengths, loss_mean=algorithm.loss_mean, num_rollouts=work.num_rollouts, num_tokens=work.num_tokens
    )
    return Targets(log_probs.to(device), advantages.to(device), mask.to(device), weights.to(device))


def _advantages(samples: Sequence[TrainSample], algorithm: Algorithm) -> Tensor:
    """[samples] float32; groups of one size are handled together."""
    result = torch.zeros(len(samples), dtype=torch.float32)
    if not algorithm.needs_advantages:
        return result
    by_size: dict[int, list[int]] = {}
    for index, sample in enumerate(samples):
        by_size.setdefault(len(sample.group_rewards), []).append(index)
    for indices in by_size.values():
        rewards = torch.tensor([samples[i].reward for i in indices], dtype=torch.float64)
        siblings = torch.tensor([samples[i].group_rewards for i in indices], dtype=torch.float64)
        result[indices] = algorithm.advantages(rewards, siblings)
    return result


def split_by_tokens(lengths: Sequence[int], cap: int) -> list[list[int]]:
    """Indices in order, cut so that no part holds more than `cap` tokens; a longer one stands alone."""
    parts: list[list[int]] = []
    used = cap + 1
    for index, length in enumerate(lengths):
        if used + length > cap or not parts:
            parts.append([])
            used = 0
        parts[-1].append(index)
        used += length
    return parts


def check_samples(samples: Sequence[TrainSample], algorithm: Algorithm) -> None:
    """Raise TrainerError for a sample whose fields do not fit together."""
    for index, sample in enumerate(samples):
        if problem := _problem(sample, algorithm):
            raise TrainerError(f"sample {index} of the micro-batch: {problem}", fix="check the rollout or data function")


def _problem(sample: TrainSample, algorithm: Algorithm) -> str | None:
    size = len(sample.response_ids)
    if not sample.prompt_ids:
        return "it has no prompt token to predict from"
    if len(sample.loss_mask) != size:
        return f"loss_mask has {len(sample.loss_mask)} entries for {size} response tokens"
    if algorithm.needs_rollout_log_probs and len(sample.log_probs) != size:
        return f"log_probs has {len(sample.log_probs)} entries for {size} response tokens"
    if algorithm.needs_advantages and sample.reward is None:
        return "it has no reward"
    return None
