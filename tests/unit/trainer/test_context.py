"""Context parallelism: who holds what, and that parts put together are the whole."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from vime.errors import TrainerError
from vime.facts.process import Factory, MegatronAdaptation
from vime.platforms.cpu.attention import HostCoreAttention
from vime.trainer.megatron.attention import block_spec
from vime.trainer.megatron.context import ContextKeys, ContextSplit, key_plan, whole_targets
from vime.trainer.megatron.packing import PackShape, make_pack
from vime.trainer.megatron.varlen import VarlenCoreAttention

HOST = torch.device("cpu")


def shape(rank: int, size: int) -> PackShape:
    return PackShape(8 * size, 100, HOST, ContextSplit(rank, size))


def rows_of(segments: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    return (ContextSplit(rank, size).owners(segments) == rank).nonzero()[:, 0]


def test_each_rank_holds_a_chunk_from_either_end_of_every_segment() -> None:
    segments = torch.tensor([8, 4])
    assert ContextSplit(0, 2).owners(segments).tolist() == [0, 0, 1, 1, 1, 1, 0, 0, 0, 1, 1, 0]
    assert [ContextSplit(1, 3).padded(n) for n in (1, 6, 7)] == [6, 6, 12]


sequences = st.lists(st.integers(1, 30), min_size=0, max_size=6)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(lengths=sequences, size=st.integers(2, 5), data=st.data())
def test_any_pack_is_shared_out_once_and_evenly(lengths: list[int], size: int, data: Any) -> None:
    """Every token and every target belongs to one rank; every rank has as many tokens and as many pairs to attend to."""
    first = [data.draw(st.integers(1, length)) for length in lengths]
    tokens = iter(range(1, 100000))
    made = [[next(tokens) % 99 + 1 for _ in range(length)] for length in lengths]
    parts = [make_pack(made, first, shape(rank, size)) for rank in range(size)]
    alone = make_pack(made, first, PackShape(1, 100, HOST)) if lengths else None
    assert len({part.ids.shape for part in parts}) == 1
    assert parts[0].ids.shape[1] % 8 == 0
    real = sorted(int(i) for part in parts for i in part.ids[0] if i)
    assert real == sorted(i for one in made for i in one)
    total = 0 if alone is None else len(alone.targets)
    targets = torch.full((total,), -1)
    for part in parts:
        assert part.share is not None
        assert part.share.total == total
        assert len(part.rows) == len(part.targets) == len(part.share.places)
        targets[part.share.places] = part.targets
    assert alone is None or torch.equal(targets, alone.targets)
    pairs = {sum(q * k - q * (q - 1) // 2 for q, k in zip(*lengths_of(part), strict=True)) for part in parts}
    assert len(pairs) == 1


def lengths_of(part: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return part.params.context.query_lengths, part.params.context.key_lengths


def test_a_row_predicts_the_token_after_it_wherever_that_is() -> None:
    """Of [1..8] rank 0 has 1 2 7 8 and rank 1 has 3 4 5 6: token 3 is predicted by rank 0, token 7 by rank 1."""
    first, second = (make_pack([[1, 2, 3, 4, 5, 6, 7, 8]], [1], shape(rank, 2)) for rank in (0, 1))
    assert first.ids[0, :4].tolist() == [1, 2, 7, 8]
    assert first.positions[0, :4].tolist() == [0, 1, 6, 7]
    assert (first.rows.tolist(), first.targets.tolist()) == ([0, 1, 2], [2, 3, 8])
    assert (second.rows.tolist(), second.targets.tolist()) == ([0, 1, 2, 3], [4, 5, 6, 7])
    assert first.share is not None
    assert second.share is not None
    assert (first.share.places.tolist(), second.share.places.tolist()) == ([0, 1, 6], [2, 3, 4, 5])


@dataclass(frozen=True)
class Here(ContextKeys):
    """Keys of all ranks lie in this process: the pieces are given in the place of a collective."""

    pieces: Any = None

    def gathered(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return tuple(torch.cat(part).index_select(0, self.rows) for part in self.pieces)  # type: ignore[return-value]


def window_kernel(query: Any, key: Any, value: Any, cu_q: Any, cu_k: Any, max_q: int, max_k: int, **options: Any) -> Any:
    """A varlen kernel whose causal window ends at the lower right, as flash attention's does."""
    assert options.pop("window_size") == (-1, 0)
    lengths = (cu_q[1:] - cu_q[:-1]).tolist(), (cu_k[1:] - cu_k[:-1]).tolist()
    assert (max(lengths[0]), max(lengths[1])) == (max_q, max_k)
    outputs = []
    for q, k, v in zip(query.split(lengths[0]), key.split(lengths[1]), value.split(lengths[1]), strict=True):
        seen = torch.arange(len(k))[None] <= torch.arange(len(q))[:, None] + len(k) - len(q)
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=seen, scale=options.get("scale"), enable_gqa=options.get("enable_gqa", False)
        )
        outputs.append(out[0].transpose(0, 1))
    return torch.cat(outputs)


def named_kernel(
    query: Any,
    key: Any,
    value: Any,
    cu_q: Any,
    cu_k: Any,
    max_q: int,
    max_k: int,
    *,
    window_size: Any,
    enable_gqa: bool,
    scale: float,
) -> Any:
    """The same with its options by name, from which `adapt` reads how to ask for them."""
    options = {"window_size": window_size, "enable_gqa": enable_gqa, "scale": scale}
    return window_kernel(query, key, value, cu_q, cu_k, max_q, max_k, **options)


@pytest.mark.parametrize("kind", ["host", "varlen"])
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_together_attend_as_one(kind: str, size: int) -> None:
    """Output and all gradients, with values of another width than keys."""
    segments = torch.tensor([2 * size, 6 * size, 4 * size])
    config = SimpleNamespace(kv_channels=8, context_parallel_size=size, params_dtype=torch.bfloat16)
    layer: Any = HostCoreAttention(config, 1) if kind == "host" else VarlenCoreAttention(config, 1, kernel=named_kernel)
    generator, tokens = torch.Generator().manual_seed(0), int(segments.sum())
    given_tensors = [torch.randn(tokens, heads, dim, generator=generator) for heads, dim in ((4, 8), (2, 8), (2, 6))]
    ours, theirs = ([x.clone().requires_grad_() for x in given_tensors] for _ in range(2))
    where = [rows_of(segments, rank, size) for rank in range(size)]
    pieces = [[x[rows] for rows in where] for x in ours[1:]]
    parts = []
    for rank, rows in enumerate(where):
        plan = key_plan(segments, ContextSplit(rank, size), HOST)
        context = Here(plan.rows, plan.query_lengths, plan.key_lengths, plan.query_ends, plan.key_ends, None, pieces)
        packed = SimpleNamespace(context=context, qkv_format="thd")
        parts.append(layer(ours[0][rows], pieces[0][rank], pieces[1][rank], packed_seq_params=packed))
    out = torch.cat(parts)[torch.argsort(torch.cat(where))]
    ends = torch.tensor([0, *segments.tolist()]).cumsum(0).int()
    longest = int(segments.max())
    options = {"window_size": (-1, 0), "scale": 8**-0.5, "enable_gqa": True}
    query, key, value = theirs
    expected = window_kernel(query, key, value, ends, ends, longest, longest, **options).flatten(1)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
    weights = torch.linspace(-1, 1, out.numel()).view_as(out)
    (out * weights).sum().backward()
    (expected * weights).sum().backward()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-6)


def test_where_nothing_is_shared_values_are_whole() -> None:
    own = torch.tensor([1.0, 2.0])
    assert whole_targets(own, None) is own


class Unable(torch.nn.Module):
    """A core attention that knows nothing of shared sequences."""


def test_an_attention_that_would_not_gather_is_refused() -> None:
    adaptation = MegatronAdaptation(core_attention=Factory(f"{__name__}:Unable"))
    with pytest.raises(TrainerError, match="Unable does not split sequences over cp 2"):
        block_spec(SimpleNamespace(context_parallel_size=2), adaptation)
