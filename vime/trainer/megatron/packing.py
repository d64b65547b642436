"""Sequences laid end to end in one row (THD), with everything that a micro-batch's loss needs beside them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vime.algorithms.base import Algorithm, token_weights
from vime.algorithms.sequences import Sequences
from vime.errors import TrainerError
from vime.trainer.megatron.context import ContextSplit, TargetShare, key_plan
from vime.trainer.megatron.parallel import Axes
from vime.trainer.megatron.rotary import POSITIONS
from vime.types import TrainSample, UpdateWork

if TYPE_CHECKING:
    from vime.trainer.megatron.replayed import PackExperts

ALIGNMENT = 8
"""Packs are padded to a multiple of this (times tp and cp), which suits matrix kernels and sequence parallelism."""


@dataclass(frozen=True)
class Pack:
    """One micro-batch's sequences.

    `ids` and `positions` are [1, tokens]; the tail is padding, a segment of its own, because the segments must cover
    every token. `rows` [targets] are the positions whose logits predict the tokens `targets` [targets]. `origin` [tokens], on
    the host, is each row's place among the tokens of all sequences, laid end to end without padding; -1 for a row of padding.

    Under context parallelism every sequence is a padded segment, and all of these are the rank's own part: `share` says which
    targets those are. `experts` are those that the rows are sent to; None: the model's routers choose.
    """

    ids: Tensor
    positions: Tensor
    params: Any
    rows: Tensor
    targets: Tensor
    origin: Tensor
    share: TargetShare | None = None
    experts: PackExperts | None = None


@dataclass(frozen=True)
class Targets:
    """What the loss needs of each target, all [targets]; see `vime.algorithms.base.TokenBatch`."""

    rollout_log_probs: Tensor
    advantages: Tensor
    mask: Tensor
    weights: Tensor
    sequences: Sequences
    prompt_lengths: tuple[int, ...]
    ref_log_probs: Tensor | None = None
    teacher_log_probs: Tensor | None = None


@dataclass(frozen=True, slots=True)
class PackShape:
    """What packs must look like: a multiple of `alignment` tokens, ids below `vocab`, on `device`.

    `context` is set where ranks share sequences; `alignment` is then a multiple of twice their number.
    """

    alignment: int
    vocab: int
    device: torch.device
    context: ContextSplit | None = None


def pack_shape(axes: Axes, *, vocab: int, device: torch.device) -> PackShape:
    """What the packs of a rank look like."""
    context = ContextSplit(axes.cp_rank, axes.cp_size, axes.cp_group) if axes.cp_size > 1 else None
    return PackShape(ALIGNMENT * axes.tp_size * axes.cp_size, vocab, device, context)


def make_pack(sequences: Sequence[Sequence[int]], first_targets: Sequence[int], shape: PackShape) -> Pack:
    """Pack sequences; of sequence i the tokens from position `first_targets[i]` (at least 1) on are targets.

    No sequences make a pack of padding alone, so that a rank without work still takes part in every collective.
    Raises TrainerError for a token id outside the vocabulary.
    """
    context = shape.context
    lengths = [len(sequence) for sequence in sequences]
    widths = lengths if context is None else [context.padded(length) for length in lengths]
    padding = -sum(widths) % shape.alignment or (0 if lengths else shape.alignment)
    segments = torch.tensor([*widths, padding] if padding else widths)
    filled = ((*sequence, *[0] * (width - len(sequence))) for sequence, width in zip(sequences, widths, strict=True))
    ids = torch.tensor([*chain.from_iterable(filled), *[0] * padding], dtype=torch.long)
    check_ids(ids, shape.vocab)
    starts = torch.repeat_interleave(segments.cumsum(0) - segments, segments)
    positions = torch.arange(len(ids)) - starts
    tail = [0] if padding else []
    first, last = (torch.tensor([*given, *tail]) for given in (first_targets, lengths))
    is_token = positions < torch.repeat_interleave(last, segments)
    origin = torch.where(is_token, is_token.cumsum(0) - 1, -1)
    predicted = (is_token & (positions >= torch.repeat_interleave(first, segments))).nonzero()[:, 0]
    if context is not None:
        return _own_part(ids, positions, predicted, segments, origin, shape=shape)
    placed = positions.to(shape.device)
    return Pack(
        ids=ids[None].to(shape.device),
        positions=placed[None],
        params=pack_params(segments.tolist(), placed, longest=int(segments.max())),
        rows=(predicted - 1).to(shape.device),
        targets=ids[predicted].to(shape.device),
        origin=origin,
    )


def _own_part(ids: Tensor, positions: Tensor, predicted: Tensor, segments: Tensor, origin: Tensor, *, shape: PackShape) -> Pack:
    """This rank's tokens of a pack whose ranks share sequences; `predicted` [targets] are rows of the whole pack."""
    context, device = shape.context, shape.device
    assert context is not None
    mine = context.owners(segments) == context.rank
    local = mine.cumsum(0) - 1
    places = mine[predicted - 1].nonzero()[:, 0]
    own, placed = predicted[places], positions[mine].to(device)
    params = pack_params(segments.tolist(), placed, longest=int(segments.max()))
    params.context = key_plan(segments, context, device)
    return Pack(
        ids=ids[mine][None].to(device),
        positions=placed[None],
        params=params,
        rows=local[own - 1].to(device),
        targets=ids[own].to(device),
        origin=origin[mine],
        share=TargetShare(places.to(device), len(predicted), context.group),
    )


def check_ids(ids: Tensor, vocab: int) -> None:
    """Raise TrainerError unless all token ids are in the vocabulary."""
    if int(ids.min()) < 0 or int(ids.max()) >= vocab:
        raise TrainerError(
            f"token ids span {int(ids.min())} to {int(ids.max())}, but the vocabulary has {vocab} entries",
            fix="use the model's own tokenizer for data and rollout",
        )


def pack_params(lengths: Sequence[int], positions: Tensor, *, longest: int) -> Any:
    """megatron-core's description of a pack of segments; this rank's `positions` [tokens] in them are below `longest`."""
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


def target_tensors(
    samples: Sequence[TrainSample], advantages: Tensor, *, algorithm: Algorithm, work: UpdateWork, device: torch.device
) -> Targets:
    """Per-target values of a micro-batch, in the order of its pack's targets; `advantages` [targets] in that order too."""
    mask, weights = loss_weights(samples, loss_mean=algorithm.loss_mean, loss_tokens=algorithm.loss_tokens, work=work)

    def values(name: str, *, wanted: bool) -> Tensor | None:
        rows = chain.from_iterable(getattr(s, name) for s in samples)
        return torch.tensor([*rows], dtype=torch.float32).to(device) if wanted else None

    rollout = values("log_probs", wanted=algorithm.needs_rollout_log_probs)
    return Targets(
        rollout_log_probs=torch.zeros(mask.shape, device=device) if rollout is None else rollout,
        advantages=advantages.to(device),
        mask=mask.to(device),
        weights=weights.to(device),
        sequences=Sequences.of([len(s.response_ids) for s in samples], device),
        prompt_lengths=tuple(len(s.prompt_ids) for s in samples),
        ref_log_probs=values("ref_log_probs", wanted=algorithm.needs_reference),
        teacher_log_probs=values("teacher_log_probs", wanted=algorithm.needs_teacher),
    )


def loss_weights(
    samples: Sequence[TrainSample], *, loss_mean: str, loss_tokens: int | None, work: UpdateWork
) -> tuple[Tensor, Tensor]:
    """Trained tokens [targets] bool and the weight of each target in the loss of the whole batch [targets] float32."""
    mask = torch.tensor([*chain.from_iterable(s.loss_mask for s in samples)], dtype=torch.bool)
    weights = token_weights(
        mask,
        torch.tensor([len(s.response_ids) for s in samples], dtype=torch.long),
        loss_mean=loss_mean,
        num_rollouts=work.num_rollouts,
        num_tokens=work.num_tokens if loss_tokens is None else work.num_rollouts * loss_tokens,
        rollout_tokens=torch.tensor([s.rollout_tokens for s in samples], dtype=torch.long),
    )
    return mask, weights


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
    for name, needed in _facts(algorithm):
        if needed and len(getattr(sample, name)) != size:
            return f"{name} has {len(getattr(sample, name))} entries for {size} response tokens"
    if algorithm.needs_advantages and sample.reward is None:
        return "it has no reward"
    return None


def _facts(algorithm: Algorithm) -> Iterator[tuple[str, bool]]:
    """Fields with a number for every response token, and whether the algorithm reads them."""
    yield "log_probs", algorithm.needs_rollout_log_probs
    yield "ref_log_probs", algorithm.needs_reference
    yield "teacher_log_probs", algorithm.needs_teacher
    yield "values", algorithm.needs_values
