"""Rotary positions of packed sequences, computed once per pack.

megatron-core cuts the table of angles apart for every segment, in every layer, for queries and keys. All of them are the
same, so here cosine and sine of a pack are kept on its `cu_seqlens`. The arithmetic and its order are megatron-core's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

POSITIONS = "vime_positions"
"""Attribute of `cu_seqlens` with every token's position, where segments are not whole sequences."""

_KEPT = "_vime_rope"


def make_packed_rope(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap megatron-core's function for packed sequences; what it does differently from the plain case goes to it."""

    def packed_rope(
        t: Tensor,
        cu_seqlens: Tensor,
        freqs: Tensor,
        rotary_interleaved: bool = False,
        multi_latent_attention: bool = False,
        mscale: float = 1.0,
        cp_group: Any = None,
    ) -> Tensor:
        """t [tokens, heads, dim] -> the same shape, rotated by each token's position in its segment."""
        known = hasattr(cu_seqlens, POSITIONS)
        plain = not rotary_interleaved and not multi_latent_attention and mscale == 1.0
        alone = cp_group is not None and cp_group.size() == 1
        if not known and not (plain and alone and freqs.size(0) != cu_seqlens[-1]):
            return original(t, cu_seqlens, freqs, rotary_interleaved, multi_latent_attention, mscale, cp_group)
        cosine, sine = _tables(cu_seqlens, freqs, t)
        size = freqs.shape[-1]
        turned = t[..., :size]
        first, second = turned.chunk(2, dim=-1)
        turned = (turned * cosine) + (torch.cat((-second, first), dim=-1) * sine)
        return turned if size == t.shape[-1] else torch.cat((turned, t[..., size:]), dim=-1)

    return packed_rope


def _tables(cu_seqlens: Tensor, freqs: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine [tokens, 1, size] of a pack. freqs [longest, 1, 1, size]."""
    kept = getattr(cu_seqlens, _KEPT, None)
    if kept is None or kept[0].dtype != like.dtype:
        positions = getattr(cu_seqlens, POSITIONS, None)
        if positions is None:
            ends = cu_seqlens.long()
            positions = torch.arange(int(ends[-1])) - torch.repeat_interleave(ends[:-1], ends[1:] - ends[:-1])
        angles = freqs[:, 0].index_select(0, positions)
        kept = (torch.cos(angles).to(like.dtype), torch.sin(angles).to(like.dtype))
        setattr(cu_seqlens, _KEPT, kept)
    return kept
