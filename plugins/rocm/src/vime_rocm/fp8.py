"""8-bit weights of a checkpoint for devices that compute with another 8-bit format.

`e4m3fn` (OCP) and `e4m3fnuz` share the layout of sign, exponent and mantissa, but fnuz's exponent bias is one higher: equal
bits mean half the value. Fnuz has one NaN, whose bits are OCP's negative zero, and no negative zero. (Micikevicius et al.,
"FP8 formats for deep learning", 2022; the fnuz variant in ONNX's description of 8-bit floats.)
"""

from __future__ import annotations

import torch
from torch import Tensor

from vime.errors import WeightSyncError

_SIGN = 0x80
"""Alone: negative zero in OCP, NaN in fnuz."""
_OCP_NAN = 0x7F


def ocp_to_fnuz(weight: Tensor, scale: Tensor, *, block: tuple[int, int] = (128, 128)) -> tuple[Tensor, Tensor]:
    """The same numbers for a device that computes with fnuz.

    Bits stay and scales double, so that `weight * scale` is unchanged, down to subnormals. Negative zero becomes zero, both
    NaNs become fnuz's. A scale of 0 stands for zeros: it becomes 1, and the bits under it zero. Inputs are left alone.

    Args:
        weight: [...] in float8_e4m3fn.
        scale: factor that gives real values. Any shape that broadcasts to weight's, or for a matrix [rows, columns] one
            entry for each block: [ceil(rows / block[0]), ceil(columns / block[1])].
        block: rows and columns under one scale.

    Returns:
        (weight in float8_e4m3fnuz, scale); scales are above 0 where they were 0 or above.

    Raises:
        WeightSyncError: weight is of another dtype, or scale fits neither way.
    """
    if weight.dtype is not torch.float8_e4m3fn:
        raise WeightSyncError(f"weight is {weight.dtype}, not float8_e4m3fn", fix="convert OCP 8-bit weights only")
    empty = scale == 0
    bits = weight.view(torch.uint8)
    nan = (bits & _OCP_NAN) == _OCP_NAN
    zero = (bits == _SIGN) | _spread(empty, weight, block)
    bits = torch.where(nan, _SIGN, torch.where(zero, 0, bits)).to(torch.uint8)
    return bits.view(torch.float8_e4m3fnuz), torch.where(empty, 1.0, scale * 2).to(scale.dtype)


def _spread(values: Tensor, weight: Tensor, block: tuple[int, int]) -> Tensor:
    """One entry for each weight, or a shape that broadcasts to that."""
    try:
        if torch.broadcast_shapes(values.shape, weight.shape) == weight.shape:
            return values
    except RuntimeError:
        pass
    blocks = tuple(-(-size // step) for size, step in zip(weight.shape, block, strict=False))
    if weight.dim() != 2 or tuple(values.shape) != blocks:
        shapes = f"scale {list(values.shape)} fits neither weight {list(weight.shape)} nor its blocks of {list(block)}"
        raise WeightSyncError(shapes, fix="give the block size that the checkpoint was quantised with")
    rows = values.repeat_interleave(block[0], 0)[: weight.shape[0]]
    return rows.repeat_interleave(block[1], 1)[:, : weight.shape[1]]
