"""Context parallelism over packed sequences: who holds which tokens, and what is gathered where.

Each segment of a pack is cut into 2 cp chunks, of which rank r holds chunks r and 2 cp - 1 - r (megatron-core's zigzag), so
that causal attention costs every rank the same. Queries stay where they are; keys and values are gathered over the ranks
(Llama 3, arXiv:2407.21783, section 3.3.2), and each chunk attends to its segment up to its own end. Log-probs are put together
after the head, so that a loss always sees whole sequences, the same on every rank of the group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ContextSplit:
    """This rank's place among the `size` ranks of `group` that share sequences."""

    rank: int
    size: int
    group: Any = None

    @property
    def multiple(self) -> int:
        """What the length of every segment must be a multiple of."""
        return 2 * self.size

    def padded(self, length: int) -> int:
        """The smallest length of a segment that holds `length` tokens."""
        return -(-length // self.multiple) * self.multiple

    def owners(self, segments: Tensor) -> Tensor:
        """The rank of every row of a pack with segments of these lengths [segments], each a multiple: [tokens]."""
        chunk = torch.repeat_interleave(segments // self.multiple, segments)
        starts = torch.repeat_interleave(segments.cumsum(0) - segments, segments)
        number = torch.div(torch.arange(int(segments.sum())) - starts, chunk, rounding_mode="floor")
        return torch.minimum(number, self.multiple - 1 - number)


@dataclass(frozen=True, slots=True)
class ContextKeys:
    """Which keys the chunks of this rank attend to; kept on megatron-core's description of a pack.

    `rows` [keys]: rows of the gathered keys, for one chunk after the other its segment from the beginning to the chunk's end.
    `query_lengths` and `key_lengths` are those of the chunks, `query_ends` and `key_ends` their running sums from 0 (int32).
    """

    rows: Tensor
    query_lengths: tuple[int, ...]
    key_lengths: tuple[int, ...]
    query_ends: Tensor
    key_ends: Tensor
    group: Any

    def gathered(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """key [tokens, heads, dim], value [tokens, heads, other dim] of this rank -> [keys, heads, ...]; a collective."""
        both = _Gather.apply(torch.cat((key, value), dim=-1), self.group).index_select(0, self.rows)
        return both[..., : key.shape[-1]], both[..., key.shape[-1] :]


@dataclass(frozen=True, slots=True)
class TargetShare:
    """Which of a pack's `total` targets this rank scores: those at `places` [own targets] of their order."""

    places: Tensor
    total: int
    group: Any = field(compare=False)

    def whole(self, own: Tensor) -> Tensor:
        """own [own targets] -> [total], the same on every rank of the group; a collective in forward alone.

        The gradient of a rank's own values is that of the loss which it computes itself, so nothing is added up.
        """
        return _Whole.apply(own, self)


def whole_targets(own: Tensor, share: TargetShare | None) -> Tensor:
    """A value for every target of a pack from those of this rank's; as it is where ranks do not share sequences."""
    return own if share is None else share.whole(own)


def key_plan(segments: Tensor, split: ContextSplit, device: torch.device) -> ContextKeys:
    """What this rank's chunks attend to in a pack with segments of these lengths [segments], each a multiple."""
    owners = split.owners(segments)
    place = torch.empty(len(owners), dtype=torch.long)
    place[torch.argsort(owners, stable=True)] = torch.arange(len(owners))
    rows, queries, keys, start = [], list[int](), list[int](), 0
    for length in segments.tolist():
        chunk = length // split.multiple
        for number in (split.rank, split.multiple - 1 - split.rank):
            end = (number + 1) * chunk
            rows.append(place[start : start + end])
            queries.append(chunk)
            keys.append(end)
        start += length
    return ContextKeys(
        torch.cat(rows).to(device),
        tuple(queries),
        tuple(keys),
        _ends(queries, device),
        _ends(keys, device),
        split.group,
    )


def _ends(lengths: Sequence[int], device: torch.device) -> Tensor:
    ends = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    ends[1:] = torch.tensor(lengths).cumsum(0)
    return ends.to(device)


class _Gather(torch.autograd.Function):
    """[rows, ...] of every rank, one after the other; gradients are added up and each rank gets those of its rows."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: Any) -> Tensor:
        ctx.group = group
        whole = own.new_empty(own.shape[0] * dist.get_world_size(group), *own.shape[1:])
        dist.all_gather_into_tensor(whole, own.contiguous(), group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,) = grads
        own = grad.new_empty(grad.shape[0] // dist.get_world_size(ctx.group), *grad.shape[1:])
        dist.reduce_scatter_tensor(own, grad.contiguous(), group=ctx.group)
        return own, None


class _Whole(torch.autograd.Function):
    """See `TargetShare.whole`. A sum with zeros leaves every value as it is."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, share: TargetShare) -> Tensor:
        ctx.places = share.places
        whole = own.new_zeros(share.total)
        whole[share.places] = own
        dist.all_reduce(whole, group=share.group)
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].index_select(0, ctx.places), None
