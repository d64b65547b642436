"""OCP weights on a device that computes with fnuz."""

from __future__ import annotations

import pytest
import torch

from vime.errors import WeightSyncError
from vime_rocm.fp8 import ocp_to_fnuz

FN, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz
NUMBERS = [code for code in range(256) if code & 0x7F != 0x7F]


def from_bits(bits: list[int], shape: tuple[int, ...] = (-1,)) -> torch.Tensor:
    return torch.tensor(bits, dtype=torch.uint8).view(FN).reshape(shape)


def bits_of(weight: torch.Tensor) -> list[int]:
    return weight.view(torch.uint8).flatten().tolist()


@pytest.mark.parametrize("scale", [1.0, 0.5, 3.0e-5, 240.0])
def test_every_number_keeps_its_value(scale: float) -> None:
    weight, factor = from_bits(NUMBERS), torch.tensor(scale)
    made, doubled = ocp_to_fnuz(weight, factor)
    assert made.dtype is FNUZ
    assert torch.equal(made.float() * doubled, weight.float() * factor)


@pytest.mark.parametrize(
    ("bits", "expected"), [(0x80, 0x00), (0x00, 0x00), (0x7F, 0x80), (0xFF, 0x80), (0x7E, 0x7E), (0x81, 0x81)]
)
def test_encodings(bits: int, expected: int) -> None:
    made, _ = ocp_to_fnuz(from_bits([bits]), torch.tensor(1.0))
    assert bits_of(made) == [expected]


def test_nan_stays_nan_and_negative_zero_is_zero() -> None:
    made, _ = ocp_to_fnuz(from_bits([0x7F, 0xFF, 0x80]), torch.tensor(1.0))
    assert made.float().isnan().tolist() == [True, True, False]
    assert made.float()[2].item() == 0.0


def test_an_all_zero_block_keeps_a_scale_above_zero() -> None:
    weight = torch.zeros(256, 130, dtype=torch.float32)
    weight[:128, :128] = 1.5
    scale = torch.tensor([[0.25, 0.0], [0.0, 0.5]])
    made, doubled = ocp_to_fnuz(weight.to(FN), scale)
    assert doubled.tolist() == [[0.5, 1.0], [1.0, 1.0]]
    values = made.float()
    assert values.isfinite().all()
    assert (values[:128, :128] * 0.5 == 0.375).all()
    assert values[:128, :128].numel() == 128 * 128
    assert values[:, 128:].count_nonzero() == 0


def test_bits_under_a_zero_scale_become_zero() -> None:
    weight = torch.full((4, 6), 2.0).to(FN)
    made, doubled = ocp_to_fnuz(weight, torch.tensor([[0.0, 1.0], [1.0, 1.0]]), block=(2, 4))
    assert doubled.tolist() == [[1.0, 2.0], [2.0, 2.0]]
    expected = torch.ones(4, 6)
    expected[:2, :4] = 0.0
    assert torch.equal(made.float(), expected)


@pytest.mark.parametrize("shape", [(), (1,), (2, 1), (1, 3), (2, 3)])
def test_scales_that_broadcast(shape: tuple[int, ...]) -> None:
    weight, scale = from_bits([0x38, 0x40, 0xC0, 0x01, 0x7E, 0x08], (2, 3)), torch.full(shape, 0.125)
    made, doubled = ocp_to_fnuz(weight, scale)
    assert doubled.shape == scale.shape
    assert torch.equal(made.float() * doubled, weight.float() * scale)


def test_inputs_are_left_alone() -> None:
    weight, scale = from_bits([0x80, 0x38]), torch.tensor(0.0)
    ocp_to_fnuz(weight, scale)
    assert bits_of(weight) == [0x80, 0x38]
    assert scale.item() == 0.0


def test_wrong_inputs_are_refused() -> None:
    with pytest.raises(WeightSyncError, match="not float8_e4m3fn"):
        ocp_to_fnuz(torch.zeros(2), torch.tensor(1.0))
    with pytest.raises(WeightSyncError, match="fits neither"):
        ocp_to_fnuz(torch.zeros(256, 256).to(FN), torch.ones(3, 2))
