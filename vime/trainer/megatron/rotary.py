"""Rotary positions of packed sequences, computed once per pack.

megatron-core cuts a pack apart by its segments in every layer, for queries and for keys, which on an accelerator waits for
the device each time. All of them need the same table, so cosine and sine of a pack are kept on its `cu_seqlens`. The
arithmetic and its order are megatron-core's.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vime.models.base import Llama3Scaling, Rotary

POSITIONS = "vime_positions"
"""Attribute of `cu_seqlens` with every token's position [tokens], on the pack's device."""

KEPT_TABLES = 8
"""Packs whose tables are kept at once: those that a pipeline has under way. Others get theirs again when needed."""

_TABLES = "_vime_rope"
_FUNCTION = "_apply_rotary_pos_emb_thd"


def use_pack_tables() -> None:
    """Let megatron-core rotate packs by tables of their own. Repeating it does nothing.

    megatron-core hands rotary embeddings nothing but `cu_seqlens`, so positions travel on that tensor.
    """
    from megatron.core.models.common.embeddings import rope_utils

    found = getattr(rope_utils, _FUNCTION)
    if not hasattr(found, "original"):
        setattr(rope_utils, _FUNCTION, make_packed_rope(found))


def make_packed_rope(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap megatron-core's function for packed sequences.

    Latent attention turns neighbouring entries: they are sorted into halves first, and may be scaled (`mscale`). A pack
    without positions and a rotation of another kind go to `original`.
    """
    recent: deque[weakref.ref[Tensor]] = deque()

    def packed_rope(t: Tensor, cu_seqlens: Tensor, freqs: Tensor, *args: Any, **options: Any) -> Tensor:
        """t [tokens, heads, dim] -> the same shape, rotated by each token's position in its segment."""
        if not hasattr(cu_seqlens, POSITIONS) or args or any(v for name, v in options.items() if name not in _KNOWN):
            return original(t, cu_seqlens, freqs, *args, **options)
        cosine, sine = _tables(cu_seqlens, freqs, t.dtype, options.get("mscale", 1.0), recent)
        size = freqs.shape[-1]
        turned = t[..., :size]
        if options.get("multi_latent_attention"):
            turned = torch.cat((turned[..., 0::2], turned[..., 1::2]), dim=-1)
        first, second = turned.chunk(2, dim=-1)
        turned = (turned * cosine) + (torch.cat((-second, first), dim=-1) * sine)
        return turned if size == t.shape[-1] else torch.cat((turned, t[..., size:]), dim=-1)

    packed_rope.original = original  # type: ignore[attr-defined]
    return packed_rope


_KNOWN = {"multi_latent_attention", "mscale", "cp_group"}
"""Options that are followed here; with any other that is set, the rotation is of another kind."""


def _tables(
    cu_seqlens: Tensor, freqs: Tensor, dtype: torch.dtype, mscale: float, recent: deque[weakref.ref[Tensor]]
) -> tuple[Tensor, Tensor]:
    """Cosine and sine [tokens, 1, size] of a pack. freqs [longest, 1, 1, size]."""
    kept: tuple[Tensor, Tensor] | None = getattr(cu_seqlens, _TABLES, None)
    if kept is None or kept[0].dtype != dtype:
        angles = freqs[:, 0].index_select(0, getattr(cu_seqlens, POSITIONS))
        cosine, sine = torch.cos(angles), torch.sin(angles)
        if mscale != 1.0:
            cosine, sine = cosine * mscale, sine * mscale
        kept = (cosine.to(dtype), sine.to(dtype))
        setattr(cu_seqlens, _TABLES, kept)
        recent.append(weakref.ref(cu_seqlens))
        if len(recent) > KEPT_TABLES and (oldest := recent.popleft()()) is not None and oldest is not cu_seqlens:
            vars(oldest).pop(_TABLES, None)
    return kept


def scale_frequencies(bare: Any, rotary: Rotary) -> None:
    """Let a model's rotary embedding turn by the family's frequencies; megatron-core takes but one number of Llama 3's.

    YaRN is megatron-core's own, by its config.
    """
    if isinstance(rotary.scaling, Llama3Scaling):
        embedding = bare.rotary_pos_emb
        embedding.inv_freq = llama3_frequencies(embedding.inv_freq, rotary.scaling)


def llama3_frequencies(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    """[size] -> [size]; the arithmetic and its order are those of transformers."""
    slowest, fastest = scaling.positions / scaling.low, scaling.positions / scaling.high
    wavelength = 2 * math.pi / frequencies
    scaled = torch.where(wavelength > slowest, frequencies / scaling.factor, frequencies)
    share = (scaling.positions / wavelength - scaling.low) / (scaling.high - scaling.low)
    blended = (1 - share) * scaled / scaling.factor + share * scaled
    return torch.where((wavelength >= fastest) & (wavelength <= slowest), blended, scaled)
