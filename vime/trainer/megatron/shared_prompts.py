"""Packs in which the samples of a group share one copy of their prompt.

Siblings have the same prompt, so its hidden states are the same for all of them: computing it once per group and letting
every response attend to it gives the loss and the gradient of separate sequences, with fewer tokens. What it needs of the
hardware is a core attention that reads `packed_seq_params.shared_prompts`, which says so by `shares_prompts = True`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
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


PromptKey = tuple[tuple[int, ...], bytes]
"""What samples must have in common to share a copy of their prompt: its ids, and the experts that are prescribed to it."""


def prompt_keys(samples: Sequence[TrainSample], *, routed: bool) -> list[PromptKey]:
    """The key of every sample. Experts count only where they are `routed` by the samples' own ids."""

    def experts(sample: TrainSample) -> bytes:
        ids = sample.routed_experts
        return b"" if ids is None or not routed else ids[: len(sample.prompt_ids)].tobytes()

    return [(sample.prompt_ids, experts(sample)) for sample in samples]


def saves_enough(samples: Sequence[TrainSample], *, routed: bool = False) -> bool:
    """Whether sharing leaves clearly fewer tokens."""
    prompts = [ids for ids, _ in set(prompt_keys(samples, routed=routed))]
    responses = sum(len(s.response_ids) for s in samples)
    separate = responses + sum(len(s.prompt_ids) for s in samples)
    return responses + sum(map(len, prompts)) <= WORTHWHILE * separate


def pack_shared(samples: Sequence[TrainSample], shape: PackShape, *, routed: bool = False) -> Pack:
    """Pack samples in the order of `arrange`. With `routed` only those whose prompts took the same experts share a copy.

    Raises TrainerError for a token id outside the vocabulary.
    """
    keys = prompt_keys(samples, routed=routed)
    places = list(_starts(len(s.prompt_ids) + len(s.response_ids) for s in samples))
    copies: dict[PromptKey, int] = {}
    for key, place in sorted(zip(keys, places, strict=True), key=lambda pair: (len(pair[0][0]), pair[0][0])):
        copies.setdefault(key, place)
    prompts = [ids for ids, _ in copies]
    begin = dict(zip(copies, _starts(map(len, prompts)), strict=True))
    begins = [begin[key] for key in keys]
    num_prompt_tokens = sum(map(len, prompts))
    starts = list(_starts((len(s.response_ids) for s in samples), num_prompt_tokens))
    total = num_prompt_tokens + sum(len(s.response_ids) for s in samples)
    padding = -total % shape.alignment
    ids = torch.tensor([*chain.from_iterable(prompts), *chain.from_iterable(s.response_ids for s in samples), *[0] * padding])
    check_ids(ids, shape.vocab)
    positions = [*chain.from_iterable(range(len(p)) for p in prompts)]
    positions += chain.from_iterable(range(len(s.prompt_ids), len(s.prompt_ids) + len(s.response_ids)) for s in samples)
    positions += range(padding)
    origin = [*chain.from_iterable(range(place, place + len(ids)) for (ids, _), place in copies.items())]
    rows: list[int] = []
    for sample, prompt, start, place in zip(samples, begins, starts, places, strict=True):
        last = len(sample.prompt_ids) + len(sample.response_ids)
        rows.append(prompt + len(sample.prompt_ids) - 1)
        rows += range(start, start + len(sample.response_ids) - 1)
        origin += range(place + len(sample.prompt_ids), place + last)
    lengths = [*map(len, prompts), *(len(s.response_ids) for s in samples), *([padding] if padding else [])]
    at = torch.tensor(positions).to(shape.device)
    params = pack_params(lengths, at, longest=max(positions) + 1)
    params.shared_prompts = SharedPrompts(
        tuple(PromptRun(n, n * len(list(same))) for n, same in groupby(map(len, prompts))),
        tuple(_response_runs(samples, starts, begins, shape.device)),
        padding,
    )
    return Pack(
        ids=ids[None].to(shape.device),
        positions=at[None],
        params=params,
        rows=torch.tensor(rows, device=shape.device),
        targets=torch.tensor([*chain.from_iterable(s.response_ids for s in samples)], device=shape.device),
        origin=torch.tensor([*origin, *[-1] * padding]),
    )


def _starts(lengths: Iterable[int], start: int = 0) -> Iterator[int]:
    for length in lengths:
        yield start
        start += length


def _response_runs(
    samples: Sequence[TrainSample], starts: Sequence[int], begins: Sequence[int], device: torch.device
) -> Iterator[ResponseRun]:
    """`begins` are the first rows of the samples' prompts."""
    members = zip(samples, starts, begins, strict=True)
    for (prompt_length, length), same in groupby(members, key=lambda x: (len(x[0].prompt_ids), len(x[0].response_ids))):
        run = list(same)
        first = torch.tensor([begin for _, _, begin in run], device=device)
        rows = (first[:, None] + torch.arange(prompt_length, device=device)).view(-1)
        yield ResponseRun(prompt_length, length, len(run), run[0][1], rows)
