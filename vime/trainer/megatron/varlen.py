"""Core attention for packed sequences on torch's variable-length attention."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from vime.errors import TrainerError

Kernel = Callable[..., Any]
"""The contract of `torch.nn.attention.varlen.varlen_attn`, as far as `adapt` finds it in a signature."""

FLASH_DTYPES = (torch.float16, torch.bfloat16)
FLASH_MAX_HEAD_DIM = 256
FLASH_HEAD_DIM_MULTIPLE = 8


@dataclass(frozen=True, slots=True)
class Segments:
    """Running sums of the segments' queries and keys, from 0 [segments + 1] int32, and the longest of each."""

    query_ends: Tensor
    key_ends: Tensor
    longest_query: int
    longest_key: int


@dataclass(frozen=True)
class AdaptedKernel:
    """A kernel and what has to be done for it, because releases of torch differ in what they take.

    `repeats`: keys and values are repeated for each query head of their group. `scales`: the kernel divides by the root of
    the head size and nothing else, so another scale goes into the query.
    """

    kernel: Kernel
    causal: tuple[tuple[str, Any], ...]
    repeats: bool
    scales: bool

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float) -> Tensor:
        """query [tokens, heads, dim], key and value [keys, groups, dim] -> like query, with the values' last dim.

        Where a segment has more keys than queries, its last query sees all of them.
        """
        options = dict(self.causal)
        if query.shape[1] != key.shape[1]:
            if self.repeats:
                key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
            else:
                options["enable_gqa"] = True
        if not self.scales:
            options["scale"] = scale
        elif not math.isclose(factor := scale * math.sqrt(query.shape[-1]), 1.0):
            query = query * factor
        ends, longest = (segments.query_ends, segments.key_ends), (segments.longest_query, segments.longest_key)
        out = self.kernel(query, key, value, *ends, *longest, **options)
        return out[0] if isinstance(out, tuple) else out


def adapt(kernel: Kernel) -> AdaptedKernel:
    """Read from a kernel's signature how to ask it for causal attention. Raises TrainerError when it cannot be asked."""
    names = inspect.signature(kernel).parameters
    causal: tuple[tuple[str, Any], ...]
    if "window_size" in names:
        causal = (("window_size", (-1, 0)),)
    elif "is_causal" in names:
        causal = (("is_causal", True),)
    else:
        raise TrainerError(
            f"{getattr(kernel, '__name__', kernel)} takes neither window_size nor is_causal",
            fix="install a torch release whose variable-length attention can be causal (2.9 or later)",
        )
    return AdaptedKernel(kernel, causal, repeats="enable_gqa" not in names, scales="scale" not in names)


@cache
def torch_kernel() -> AdaptedKernel:
    """torch's own. Raises TrainerError where this torch has none."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError as error:
        raise TrainerError(
            f"torch {torch.__version__} has no variable-length attention", fix="install torch 2.11 or later"
        ) from error
    return adapt(varlen_attn)


class VarlenCoreAttention(torch.nn.Module):
    """Causal attention with grouped queries over packed segments (THD); stands in for megatron-core's own.

    Takes the arguments of megatron-core's `DotProductAttention`; dropout is not supported. `kernel` replaces torch's, which
    has no implementation for a host and takes 16-bit types alone. Where ranks share sequences (`packed_seq_params.context`),
    keys and values are gathered first. The longest segment is read from the pack, where it is a
    plain number, so that no layer waits for the device.
    """

    dtype_names = tuple(str(dtype).removeprefix("torch.") for dtype in FLASH_DTYPES)
    """What torch's kernel takes, by torch's short names."""
    splits_sequences = True
    """Ranks may share sequences (`packed_seq_params.context`)."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        *_args: Any,
        softmax_scale: float | None = None,
        kernel: Kernel | None = None,
        **_kwargs: Any,
    ) -> None:
        super().__init__()
        if getattr(config, "attention_dropout", 0.0):
            raise TrainerError("variable-length attention has no dropout", fix="set attention_dropout to 0")
        self._scale = softmax_scale if softmax_scale is not None else 1.0 / math.sqrt(config.kv_channels)
        self._is_torchs = kernel is None
        if self._is_torchs:
            _check_dtype(getattr(config, "params_dtype", torch.bfloat16))
            _check_head_dim(config.kv_channels)
        self._kernel = torch_kernel() if kernel is None else adapt(kernel)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *_args: Any, packed_seq_params: Any = None, **_kwargs: Any
    ) -> Tensor:
        """query [tokens, heads, dim], key and value [tokens, groups, dim] -> [tokens, heads * dim]."""
        if packed_seq_params is None:
            raise TrainerError("packed attention needs packed sequences", fix="pass packed_seq_params")
        if getattr(packed_seq_params, "shared_prompts", None) is not None:
            raise TrainerError("variable-length attention does not share prompts", fix="pack every sample with its prompt")
        if self._is_torchs:
            _check_dtype(query.dtype)
        context = getattr(packed_seq_params, "context", None)
        if context is not None:
            key, value = context.gathered(key, value)
            longest = max(context.query_lengths), max(context.key_lengths)
            segments = Segments(context.query_ends, context.key_ends, *longest)
        else:
            ends, longest = packed_seq_params.cu_seqlens_q, _longest(packed_seq_params)
            segments = Segments(ends, ends, longest, longest)
        out = self._kernel(query, key, value, segments, self._scale)
        return out.reshape(query.shape[0], -1)


def _longest(packed: Any) -> int:
    """The longest segment, kept on the pack as a number."""
    longest = packed.max_seqlen_q
    if not isinstance(longest, int):
        ends = packed.cu_seqlens_q
        longest = int((ends[1:] - ends[:-1]).max()) if longest is None else int(longest)
        packed.max_seqlen_q = longest
    return longest


def _check_dtype(dtype: torch.dtype) -> None:
    if dtype not in FLASH_DTYPES:
        raise TrainerError(f"torch's variable-length attention does not take {dtype}", fix="set model.dtype to bfloat16")


def _check_head_dim(size: int) -> None:
    if size > FLASH_MAX_HEAD_DIM or size % FLASH_HEAD_DIM_MULTIPLE:
        raise TrainerError(
            f"torch's variable-length attention takes heads of up to {FLASH_MAX_HEAD_DIM} in multiples of "
            f"{FLASH_HEAD_DIM_MULTIPLE}, this model's have {size}",
            fix="install the platform's fused attention library, or train another model",
        )
