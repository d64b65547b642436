"""Core attention for packed sequences on torch's scaled dot-product attention."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from vime.errors import TrainerError


@dataclass(frozen=True, slots=True)
class SegmentGroup:
    """All segments of one length: `tokens` [count * length] are their positions in the pack, segment after segment."""

    length: int
    tokens: Tensor


@dataclass(frozen=True, slots=True)
class SegmentPlan:
    """Groups by length, and `back` [tokens], which puts the groups' outputs into the pack's order."""

    groups: tuple[SegmentGroup, ...]
    back: Tensor


def plan_segments(cu_seqlens: Tensor) -> SegmentPlan:
    """Group the segments of a pack by length. cu_seqlens [segments + 1]: running sum of lengths, from 0."""
    ends = cu_seqlens.tolist()
    starts: dict[int, list[int]] = {}
    for start, end in pairwise(ends):
        starts.setdefault(end - start, []).append(start)
    device = cu_seqlens.device
    groups = tuple(
        SegmentGroup(length, (torch.tensor(at, device=device)[:, None] + torch.arange(length, device=device)).view(-1))
        for length, at in starts.items()
        if length > 0
    )
    return SegmentPlan(groups, torch.argsort(torch.cat([group.tokens for group in groups])))


class HostCoreAttention(torch.nn.Module):
    """Causal attention with grouped queries over packed segments (THD); stands in for megatron-core's own.

    Segments of equal length go through one kernel call, which gives the same bits as a call for each. The plan of a pack
    is kept on its `packed_seq_params`, so that all layers share it. Takes the arguments of megatron-core's
    `DotProductAttention`; dropout is not supported.
    """

    def __init__(self, config: Any, layer_number: int, *_args: Any, softmax_scale: float | None = None, **_kwargs: Any) -> None:
        super().__init__()
        if config.context_parallel_size > 1:
            raise TrainerError("packed attention on a host does not split sequences", fix="set the trainer's cp to 1")
        self._scale = softmax_scale if softmax_scale is not None else 1.0 / math.sqrt(config.kv_channels)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *_args: Any, packed_seq_params: Any = None, **_kwargs: Any
    ) -> Tensor:
        """query [tokens, heads, dim], key and value [tokens, groups, dim] -> [tokens, heads * dim]."""
        if packed_seq_params is None:
            raise TrainerError("packed attention needs packed sequences", fix="pass packed_seq_params")
        plan: SegmentPlan | None = getattr(packed_seq_params, "segment_plan", None)
        if plan is None:
            plan = packed_seq_params.segment_plan = plan_segments(packed_seq_params.cu_seqlens_q)
        outputs = [self._attend(group, query, key, value) for group in plan.groups]
        if len(outputs) == 1:
            return outputs[0]
        return torch.cat(outputs).index_select(0, plan.back)

    def _attend(self, group: SegmentGroup, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        q, k, v = (
            x.index_select(0, group.tokens).view(-1, group.length, x.shape[1], x.shape[2]).transpose(1, 2)
            for x in (query, key, value)
        )
        out = functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=self._scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        return out.transpose(1, 2).reshape(group.tokens.shape[0], -1)
