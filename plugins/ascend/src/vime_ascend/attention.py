"""Core attention for packed sequences on torch_npu's fused kernel. The kernel call has not run on hardware."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from vime.errors import TrainerError

Kernel = Callable[..., tuple[Tensor, ...]]

CAUSAL_BY_SEGMENT = 3
"""`sparse_mode`: causal, aligned to the right lower corner of every segment. It wants a mask of one fixed size."""

MASK_SIZE = 2048


class NpuCoreAttention(torch.nn.Module):
    """Causal attention with grouped queries over packed segments (THD); stands in for megatron-core's own.

    The kernel knows the layout as TND and takes the segments' ends as host integers, which are read from the device once a
    pack and kept on its `packed_seq_params`, so that all layers share them. Takes the arguments of megatron-core's
    `DotProductAttention`; dropout is not supported.
    """

    shares_prompts = False
    """Packs hold every response with its own copy of the prompt."""

    kernel: Kernel | None = None
    """`torch_npu.npu_fusion_attention` unless a subclass names another."""

    def __init__(self, config: Any, layer_number: int, *_args: Any, softmax_scale: float | None = None, **_kwargs: Any) -> None:
        super().__init__()
        if config.context_parallel_size > 1:
            raise TrainerError("packed attention does not split sequences over ranks", fix="set the trainer's cp to 1")
        self._scale = softmax_scale if softmax_scale is not None else 1.0 / math.sqrt(config.kv_channels)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *_args: Any, packed_seq_params: Any = None, **_kwargs: Any
    ) -> Tensor:
        """query [tokens, heads, dim], key and value [tokens, groups, dim] -> [tokens, heads * dim]."""
        if packed_seq_params is None:
            raise TrainerError("packed attention needs packed sequences", fix="pass packed_seq_params")
        ends = _ends(packed_seq_params)
        kernel = type(self).kernel or _torch_npu_kernel()
        out = kernel(
            query,
            key,
            value,
            query.shape[1],
            input_layout="TND",
            atten_mask=_mask(packed_seq_params, query.device),
            scale=self._scale,
            keep_prob=1.0,
            actual_seq_qlen=ends,
            actual_seq_kvlen=ends,
            sparse_mode=CAUSAL_BY_SEGMENT,
        )[0]
        return out.reshape(query.shape[0], -1)


def _ends(packed: Any) -> list[int]:
    """Running ends of the segments, without the leading 0; empty segments are left out."""
    kept: list[int] | None = getattr(packed, "segment_ends", None)
    if kept is None:
        ends = packed.cu_seqlens_q.tolist()
        kept = packed.segment_ends = [end for start, end in pairwise(ends) if end > start]
    return kept


def _mask(packed: Any, device: torch.device) -> Tensor:
    """What the causal mode asks for whatever the lengths are: True above the diagonal is masked out."""
    kept: Tensor | None = getattr(packed, "causal_mask", None)
    if kept is None:
        kept = packed.causal_mask = torch.ones(MASK_SIZE, MASK_SIZE, dtype=torch.bool, device=device).triu(1)
    return kept


def _torch_npu_kernel() -> Kernel:
    import torch_npu  # pyright: ignore[reportMissingImports]

    return torch_npu.npu_fusion_attention
