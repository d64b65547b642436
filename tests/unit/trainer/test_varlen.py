"""Attention over packs through a variable-length kernel. torch's own runs on accelerators alone, so here a plain one does."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional

from vime.errors import TrainerError
from vime.trainer.megatron.varlen import VarlenCoreAttention, adapt, torch_kernel

LENGTHS = [3, 5, 1, 4]


def attend(query, key, value, ends, scale):
    """Textbook causal attention of each segment: q, k, v [tokens, heads, dim]."""
    parts = []
    for start, end in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True):
        q, k, v = (x[start:end].transpose(0, 1) for x in (query, key, value))
        scores = q @ k.transpose(1, 2) * scale
        hidden = torch.ones(end - start, end - start, dtype=torch.bool).triu(1)
        parts.append((scores.masked_fill(hidden, -math.inf).softmax(-1) @ v).transpose(0, 1))
    return torch.cat(parts)


def check_lengths(ends, longest):
    assert ends.dtype == torch.int32
    assert longest == int((ends[1:] - ends[:-1]).max())


def kernel_of_today(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False):
    """The signature and the rules of torch 2.11 and later."""
    check_lengths(cu_seq_q, max_q)
    assert window_size == (-1, 0), "causal"
    if key.shape[1] != query.shape[1]:
        assert enable_gqa
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    return attend(query, key, value, cu_seq_q, scale)


def first_kernel(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False, return_aux=None):
    """The first release's: no groups, no scale of one's own, and a tuple comes back with it."""
    check_lengths(cu_seq_q, max_q)
    assert is_causal
    assert key.shape == query.shape
    return attend(query, key, value, cu_seq_q, query.shape[-1] ** -0.5), None


KERNELS = [kernel_of_today, first_kernel]


def packed(**changes):
    ends = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    return SimpleNamespace(**{"cu_seqlens_q": ends, "max_seqlen_q": max(LENGTHS), "qkv_format": "thd", **changes})


def attention(kernel, head=8, dropout=0.0, dtype=torch.bfloat16, **options):
    config = SimpleNamespace(kv_channels=head, attention_dropout=dropout, params_dtype=dtype)
    return VarlenCoreAttention(config, 1, "causal", "self", kernel=kernel, **options)


def tensors(groups):
    generator = torch.Generator().manual_seed(0)
    total = sum(LENGTHS)
    return [torch.randn(total, n, 8, generator=generator, requires_grad=True) for n in (4, groups, groups)]


def reference(query, key, value, scale):
    outputs, start = [], 0
    for length in LENGTHS:
        q, k, v = (x[start : start + length].transpose(0, 1)[None] for x in (query, key, value))
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        outputs.append(out[0].transpose(0, 1).reshape(length, -1))
        start += length
    return torch.cat(outputs)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("scale", [None, 0.5])
def test_output_and_gradients_are_those_of_one_segment_at_a_time(kernel, groups, scale):
    ours, theirs = tensors(groups), tensors(groups)
    out = attention(kernel, softmax_scale=scale)(*ours, None, packed_seq_params=packed())
    expected = reference(*theirs, scale or 8**-0.5)
    assert out.shape == (sum(LENGTHS), 32)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
    weights = torch.linspace(-1, 1, out.numel()).view_as(out)
    (out * weights).sum().backward()
    (expected * weights).sum().backward()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-6)


def test_the_longest_segment_is_looked_up_once_a_pack():
    pack = packed(max_seqlen_q=None)
    layer = attention(kernel_of_today)
    layer(*tensors(4), packed_seq_params=pack)
    assert pack.max_seqlen_q == 5
    pack = packed(max_seqlen_q=torch.tensor(5))
    layer(*tensors(4), packed_seq_params=pack)
    assert type(pack.max_seqlen_q) is int


def test_what_it_cannot_do_is_refused_with_the_setting_to_change():
    for options, words in [
        ({"dropout": 0.1}, "attention_dropout"),
        ({"kernel": None, "head": 12}, "multiples of 8"),
        ({"kernel": None, "dtype": torch.float32}, "does not take torch.float32"),
    ]:
        with pytest.raises(TrainerError, match=words):
            attention(**{"kernel": kernel_of_today, **options})
    with pytest.raises(TrainerError, match="packed sequences"):
        attention(kernel_of_today)(*tensors(4))
    with pytest.raises(TrainerError, match="share prompts"):
        attention(kernel_of_today)(*tensors(4), packed_seq_params=packed(shared_prompts=object()))
    with pytest.raises(TrainerError, match="bfloat16"):
        attention(None)(*tensors(4), packed_seq_params=packed())
    with pytest.raises(TrainerError, match="neither window_size nor is_causal"):
        adapt(lambda query, key, value: query)


def test_torchs_own_kernel_is_asked_for_windows_groups_and_a_scale():
    """A release that renames one of these parameters must show here and not on an accelerator."""
    adapted = torch_kernel()
    assert adapted.causal == (("window_size", (-1, 0)),)
    assert not adapted.repeats
    assert not adapted.scales


def test_a_layer_of_the_trainer_takes_it(worker_of):
    """A whole trainer on the host with this attention, and the same log-probs as with the host's own."""
    from vime.facts.process import Factory, MegatronAdaptation

    pieces = {
        "norm": Factory("vime.trainer.megatron.attention:RmsNorm"),
        "optimizer": Factory("vime.platforms.cpu.fused_adam:HostFusedAdam"),
    }
    sequences = [[1, 2, 3, 4], [7, 8]]
    host = worker_of(
        adaptation=MegatronAdaptation(core_attention=Factory("vime.platforms.cpu.attention:HostCoreAttention"), **pieces)
    ).log_probs(sequences)
    ours = worker_of(adaptation=MegatronAdaptation(core_attention=Factory(f"{__name__}:host_varlen"), **pieces))
    for a, b in zip(ours.log_probs(sequences), host, strict=True):
        assert a == pytest.approx(b, abs=1e-5)


class host_varlen(VarlenCoreAttention):
    """The attention with the plain kernel, as the layer specification builds it."""

    def __init__(self, *args, **options):
        super().__init__(*args, kernel=kernel_of_today, **options)
