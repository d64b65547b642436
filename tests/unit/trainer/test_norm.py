"""The norm against autograd over the same arithmetic in float64."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from vime.trainer.megatron.attention import RmsNorm


def build(dtype):
    config = SimpleNamespace(params_dtype=dtype, sequence_parallel=False)
    module = RmsNorm(config, 6, eps=1e-3)
    with torch.no_grad():
        module.weight.copy_(torch.linspace(-1, 2, 6))
    return module


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_and_gradients_are_those_of_autograd(dtype):
    module = build(dtype)
    x = torch.randn(2, 3, 1, 6, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
    slope = torch.linspace(-1, 1, x.numel()).view_as(x).to(dtype)
    out = module(x)
    out.backward(slope)
    wide, weight = (t.detach().double().requires_grad_() for t in (x, module.weight))
    expected = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-3) * weight
    expected.backward(slope.double())
    assert out.dtype == dtype
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-6}
    for ours, theirs in ((out, expected), (x.grad, wide.grad), (module.weight.grad, weight.grad)):
        assert ours is not None
        torch.testing.assert_close(ours.double(), theirs, **tolerance)


def test_the_input_is_rounded_before_the_weight_as_in_hugging_faces():
    module, x = build(torch.bfloat16), torch.randn(5, 6).bfloat16()
    wide = x.float()
    expected = module.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-3)).bfloat16()
    assert torch.equal(module(x), expected)


def test_only_the_input_and_a_factor_a_row_are_kept():
    kept = []
    x = torch.randn(7, 6, requires_grad=True).bfloat16()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()), lambda t: t):
        build(torch.bfloat16)(x)
    assert sorted(kept) == [6, 7, 42]
