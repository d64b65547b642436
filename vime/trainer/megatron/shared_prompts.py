"""Packs in which the samples of a group share one copy of their prompt.

Siblings have the same prompt, so its hidden states are the same for all of them: computing it once per group and letting
every response attend to it gives the loss and the gradient of separate sequences, with fewer tokens. What it needs of the
hardware is a core attention that reads `packed_seq_params.shared_prompts`, which says so by `shares_prompts = True`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby

import torch
from torch import Tensor

from vime.trainer.megatron.packing import Pack, PackShape, check_ids, pack_params
from vime.types import TrainSample

WORTHWHILE = 0.8
"""Share only where it leaves at most this part of the tokens: attention over two pieces costs a little more a token."""


@dataclass(frozen=True, slots=True)
class PromptRun:
    """Neighbouring prompts of one length: `tokens` rows of the pack."""

    length: int
    tokens: int


@dataclass(frozen=True, slots=True)
class ResponseRun:
    """`count` neighbouring responses of one length whose prompts have one length.

    Their rows begin at `start`; `prompt_rows` [count * prompt_length] are the rows of their prompts.
    """

    prompt_length: int
    length: int
    count: int
    start: int
    prompt_rows: Tensor


@dataclass(frozen=True, slots=True)
class SharedPrompts:
    """A pack's layout: prompts first, then responses, then `padding` rows that attend to nobody else."""

    prompts: tuple[PromptRun, ...]
    responses: tuple[ResponseRun, ...]
    padding: int


def arrange(samples: Sequence[TrainSample]) -> list[TrainSample]:
    """The order that packs with shared prompts need; the order of samples changes neither loss nor gradient."""
    return sorted(samples, key=lambda s: (len(s.prompt_ids), len(s.response_ids), s.prompt_ids))


def saves_enough(samples: Sequence[TrainSample]) -> bool:
    """Whether sharing leaves clearly fewer tokens."""
    prompts = {s.prompt_ids for s in samples}
    responses = sum(len(s.response_ids) for s in samples)
    separate = responses + sum(len(s.prompt_ids) for s in samples)
    return responses + sum(map(len, prompts)) <= WORTHWHILE * separate


def pack_shared(samples: Sequence[TrainSample], shape: PackShape) -> Pack:
    """Pack samples in the order of `arrange`. Raises TrainerError for a token id outside the vocabulary."""
    prompts = list(dict.fromkeys(s.prompt_ids for s in sorted(samples, key=lambda s: (len(s.prompt_ids), s.prompt_ids))))
    begin = dict(zip(prompts, _starts(map(len, prompts)), strict=True))
    num_prompt_tokens = sum(map(len, prompts))
    starts = list(_starts((len(s.response_ids) for s in samples), num_prompt_tokens))
    total = num_prompt_tokens + sum(len(s.response_ids) for s in samples)
    padding = -total % shape.alignment
    ids = torch.tensor([*chain.from_iterable(prompts), *chain.from_iterable(s.response_ids for s in samples), *[0] * padding])
    check_ids(ids, shape.vocab)
    positions = [*chain.from_iterable(range(len(p)) for p in prompts)]
    positions += chain.from_iterable(range(len(s.prompt_ids), len(s.prompt_ids) + len(s.response_ids)) for s in samples)
    positions += range(padding)
    rows: list[int] = []
    for sample, start in zip(samples, starts, strict=True):
        rows.append(begin[sample.prompt_ids] + len(sample.prompt_ids) - 1)
        rows += range(start, start + len(sample.response_ids) - 1)
    lengths = [*map(len, prompts), *(len(s.response_ids) for s in samples), *([padding] if padding else [])]
    at = torch.tensor(positions).to(shape.device)
    params = pack_params(lengths, at, longest=max(positions) + 1)
    params.shared_prompts = SharedPrompts(
        tuple(PromptRun(n, n * len(list(same))) for n, same in groupby(map(len, prompts))),
        tuple(_response_runs(samples, starts, begin, shape.device)),
        padding,
    )
    return Pack(
        ids=ids[None].to(shape.device),
        positions=at[None],
        params=params,
        rows=torch.tensor(rows, device=shape.device),
        targets=torch.tensor([*chain.from_iterable(s.response_ids for s in samples)], device=shape.device),
    )


def _starts(lengths: Iterator[int] | map[int], start: int = 0) -> Iterator[int]:
    for length in lengths:
        yield start
        start += length


def _response_runs(
    samples: Sequence[TrainSample], starts: Sequence[int], begin: dict[tuple[int, ...], int], device: torch.device
) -> Iterator[ResponseRun]:
    keyed = groupby(zip(samples, starts, strict=True), key=lambda x: (len(x[0].prompt_ids), len(x[0].response_ids)))
    for (prompt_length, length), same in keyed:
        members = list(same)
        first = torch.tensor([begin[sample.prompt_ids] for sample, _ in members], device=device)
        rows = (first[:, None] + torch.arange(prompt_length, device=device)).view(-1)
        yield ResponseRun(prompt_length, length, len(members), members[0][1], rows)
