"""Rotary positions of packs: megatron-core's own arithmetic, from tables that are made once a pack."""

from __future__ import annotations

import gc
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from vime.models.base import Llama3Scaling
from vime.platforms.cpu import host_facade
from vime.trainer.megatron.rotary import KEPT_TABLES, POSITIONS, llama3_frequencies, make_packed_rope, use_pack_tables

ENDS = [0, 3, 8, 9, 13]
GROUP = SimpleNamespace(size=lambda: 1, rank=lambda: 0)


@pytest.fixture
def original():
    """megatron-core's function as it is."""
    host_facade.install()
    from megatron.core.models.common.embeddings import rope_utils

    found = rope_utils._apply_rotary_pos_emb_thd
    return getattr(found, "original", found)


def pack():
    ends = torch.tensor(ENDS, dtype=torch.int32)
    setattr(ends, POSITIONS, torch.cat([torch.arange(b - a) for a, b in pairwise(ENDS)]))
    return ends


@pytest.mark.parametrize("size", [8, 4])
def test_positions_turn_tokens_as_megatron_does_bit_for_bit(original, size):
    t, freqs = torch.randn(13, 2, 8), torch.randn(6, 1, 1, size)
    expected = original(t, torch.tensor(ENDS, dtype=torch.int32), freqs, cp_group=GROUP)
    assert torch.equal(make_packed_rope(original)(t, pack(), freqs, cp_group=GROUP), expected)


@pytest.mark.parametrize("mscale", [1.0, 1.25])
def test_neighbouring_entries_are_turned_as_megatron_does_bit_for_bit(original, mscale):
    """As latent attention has them, with YaRN's factor."""
    t, freqs = torch.randn(13, 2, 8), torch.randn(6, 1, 1, 8)
    kind = {"multi_latent_attention": True, "mscale": mscale, "rotary_interleaved": False, "cp_group": GROUP}
    expected = original(t, torch.tensor(ENDS, dtype=torch.int32), freqs, **kind)
    rope = make_packed_rope(lambda *_args, **_options: pytest.fail("not its own"))
    assert torch.equal(rope(t, pack(), freqs, **kind), expected)
    assert not torch.equal(expected, original(t, torch.tensor(ENDS, dtype=torch.int32), freqs, cp_group=GROUP))


def test_llama_3_frequencies_are_megatrons_where_it_has_them():
    """megatron-core fixes all numbers but the factor: those of Llama 3.1."""
    host_facade.install()
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    plain = 1.0 / (500000.0 ** (torch.arange(0, 128, 2, dtype=torch.float32) / 128))
    theirs = RotaryEmbedding._apply_scaling(None, plain, factor=8.0)
    ours = llama3_frequencies(plain, Llama3Scaling(8.0, 1.0, 4.0, 8192))
    assert torch.equal(ours, theirs)
    assert (ours < plain).sum() > 10
    other = llama3_frequencies(plain, Llama3Scaling(8.0, 1.0, 4.0, 1024))
    assert not torch.equal(other, theirs)


def test_a_single_segment_as_long_as_the_table_is_turned_the_same(original):
    t, freqs = torch.randn(6, 2, 8), torch.randn(6, 1, 1, 8)
    ends = torch.tensor([0, 6], dtype=torch.int32)
    expected = original(t, ends.clone(), freqs, cp_group=GROUP)
    setattr(ends, POSITIONS, torch.arange(6))
    assert torch.equal(make_packed_rope(original)(t, ends, freqs, cp_group=GROUP), expected)


def test_layers_share_a_packs_tables_and_few_packs_keep_theirs():
    rope = make_packed_rope(lambda *_args, **_options: pytest.fail("not its own"))
    t, packs = torch.randn(13, 2, 8), [pack() for _ in range(KEPT_TABLES + 2)]
    freqs = torch.randn(6, 1, 1, 8)
    for ends in packs:
        first = rope(t, ends, freqs)
        # Tables are not made again: other angles change nothing.
        assert torch.equal(rope(t, ends, freqs + 1), first)
    assert ["_vime_rope" in vars(ends) for ends in packs] == [False] * 2 + [True] * KEPT_TABLES
    assert torch.equal(rope(t, packs[0], freqs), first)
    del packs
    gc.collect()
    rope(t, pack(), freqs)


@pytest.mark.parametrize("options", [{"rotary_interleaved": True}, {"mla_rotary_interleaved": True}])
def test_rotations_of_another_kind_are_left_to_megatron(options):
    rope = make_packed_rope(lambda *_args, **_options: "megatron's")
    t, freqs = torch.randn(13, 2, 8), torch.randn(6, 1, 1, 8)
    assert rope(t, pack(), freqs, **options) == "megatron's"
    assert rope(t, torch.tensor(ENDS, dtype=torch.int32), freqs) == "megatron's"


def test_it_is_put_in_place_once(original):
    from megatron.core.models.common.embeddings import rope_utils

    use_pack_tables()
    use_pack_tables()
    assert rope_utils._apply_rotary_pos_emb_thd.original is original  # type: ignore[attr-defined]
