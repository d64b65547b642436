"""The host's pieces of the trainer: attention over packs, Adam, memory."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional

from vime.errors import MemoryStateError, TrainerError
from vime.facts.memory import Tag
from vime.memory.storages import StorageMemory
from vime.platforms.cpu.attention import HostCoreAttention, Run, plan_runs
from vime.platforms.cpu.fused_adam import HostFusedAdam
from vime.platforms.cpu.trainer_runtime import HostRuntime

LENGTHS = [3, 5, 3, 1, 5, 4]


def packed(lengths):
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    return SimpleNamespace(cu_seqlens_q=ends, qkv_format="thd")


def attention():
    return HostCoreAttention(SimpleNamespace(kv_channels=8), 1)


def tensors(requires_grad=False):
    generator = torch.Generator().manual_seed(0)
    total = sum(LENGTHS)
    shapes = ((total, 4, 8), (total, 2, 8), (total, 2, 8))
    return [torch.randn(shape, generator=generator, requires_grad=requires_grad) for shape in shapes]


def one_by_one(query, key, value):
    """Textbook causal attention, segment after segment."""
    outputs, start = [], 0
    for length in LENGTHS:
        q, k, v = (x[start : start + length].transpose(0, 1)[None] for x in (query, key, value))
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=8**-0.5, enable_gqa=True)
        outputs.append(out[0].transpose(0, 1).reshape(length, -1))
        start += length
    return torch.cat(outputs)


def test_grouped_segments_give_the_bits_of_one_call_each():
    query, key, value = tensors()
    out = attention()(query, key, value, None, packed_seq_params=packed(LENGTHS))
    assert torch.equal(out, one_by_one(query, key, value))


def test_gradients_are_those_of_one_call_each():
    ours, theirs = tensors(requires_grad=True), tensors(requires_grad=True)
    attention()(*ours, packed_seq_params=packed(LENGTHS)).pow(2).sum().backward()
    one_by_one(*theirs).pow(2).sum().backward()
    for a, b in zip(ours, theirs, strict=True):
        assert a.grad is not None
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-6)


def test_segments_do_not_see_each_other():
    query, key, value = tensors()
    before = attention()(query, key, value, packed_seq_params=packed(LENGTHS))
    value[3:8] += 1.0
    after = attention()(query, key, value, packed_seq_params=packed(LENGTHS))
    changed = (before != after).any(dim=1).nonzero()[:, 0].tolist()
    assert changed == [3, 4, 5, 6, 7]


def test_layers_share_the_runs_of_a_pack():
    params = packed(LENGTHS)
    attention()(*tensors(), packed_seq_params=params)
    runs = params.runs
    attention()(*tensors(), packed_seq_params=params)
    assert params.runs is runs


def test_neighbours_of_equal_length_make_one_run():
    ends = torch.tensor([0, 3, 6, 9, 14, 14, 17], dtype=torch.int32)
    assert plan_runs(ends) == (Run(3, 9), Run(5, 5), Run(3, 3))


def test_what_the_attention_cannot_do_is_refused():
    with pytest.raises(TrainerError, match="packed"):
        attention()(*tensors())


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_adam_walks_as_torchs_adamw(decay):
    start = torch.linspace(-1, 1, 7)
    ours, theirs = (start.clone().requires_grad_() for _ in range(2))
    options = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": decay}
    a, b = HostFusedAdam([ours], **options), torch.optim.AdamW([theirs], **options)
    for k in range(5):
        for p in (ours, theirs):
            p.grad = torch.sin(p.detach() * (k + 1))
        a.step()
        b.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
    assert a.param_groups[0]["step"] == 5
    assert set(a.state[ours]) == {"exp_avg", "exp_avg_sq"}


@pytest.fixture
def buffer():
    """A buffer with two views, as a parameter buffer has them."""
    base = torch.arange(8.0)
    views = [base, base[:4], base[4:]]
    memory = StorageMemory()
    memory.region(Tag.PARAMS, lambda: views)
    return base, memory


def test_views_survive_pause_and_resume(buffer):
    base, memory = buffer
    view = base[4:]
    memory.pause([Tag.PARAMS])
    assert memory.device_bytes() == {Tag.PARAMS: 0}
    assert memory.host_bytes() == {Tag.PARAMS: 32}
    memory.resume([Tag.PARAMS])
    assert view.tolist() == [4.0, 5.0, 6.0, 7.0]
    view += 1
    assert base[4].item() == 5.0
    assert memory.host_bytes() == {Tag.PARAMS: 0}


def test_discarded_content_comes_back_as_zeros(buffer):
    base, memory = buffer
    memory.discard([Tag.PARAMS])
    assert memory.host_bytes() == {Tag.PARAMS: 0}
    memory.resume([Tag.PARAMS])
    assert base.tolist() == [0.0] * 8


def test_wrong_transitions_raise(buffer):
    _, memory = buffer
    with pytest.raises(MemoryStateError, match="present"):
        memory.resume([Tag.PARAMS])
    memory.pause([Tag.PARAMS])
    with pytest.raises(MemoryStateError, match="paused"):
        memory.pause([Tag.PARAMS])
    with pytest.raises(MemoryStateError, match="nothing is registered"):
        memory.discard([Tag.KV])


def test_a_storage_that_numpy_holds_is_refused_before_anything_is_freed(buffer):
    base, memory = buffer
    held = base.numpy()
    with pytest.raises(MemoryStateError, match="outside torch"):
        memory.pause([Tag.PARAMS])
    assert held[7] == 7.0


def test_runtime_reports_memory_and_keeps_random_state():
    runtime = HostRuntime(threads=1)
    assert 0 < runtime.memory()["allocated"] < runtime.memory()["total"]
    runtime.seed(3)
    state = runtime.rng_state()
    first = torch.rand(2)
    runtime.set_rng_state(state)
    assert torch.equal(torch.rand(2), first)
