"""Tiny models: files, sizes, ids and sameness."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from vime.errors import DataError
from vime.models.registry import read_shape
from vime.testing.tiny_models import make_tiny_qwen3, make_tiny_qwen3_moe


def parameters(hidden: int, layers: int, heads: int, kv_heads: int, head_dim: int, ffn: int, vocab: int, tied: bool) -> int:
    attention = hidden * head_dim * (2 * heads + 2 * kv_heads) + 2 * head_dim
    layer = attention + 3 * hidden * ffn + 2 * hidden
    return layers * layer + hidden + vocab * hidden * (1 if tied else 2)


@pytest.mark.parametrize("tied", [True, False])
def test_the_weights_have_the_sizes_of_the_config(tmp_path: Path, tied: bool) -> None:
    folder = make_tiny_qwen3(
        tmp_path, tied=tied, hidden=96, layers=3, heads=4, kv_heads=1, head_dim=64, ffn=160, vocab_size=288
    )
    weights = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())

    assert sum(w.size for w in weights.values()) == parameters(96, 3, 4, 1, 64, 160, 288, tied)
    assert ("lm_head.weight" in weights) is not tied
    assert config["tie_word_embeddings"] is tied
    assert weights["model.layers.2.self_attn.k_proj.weight"].shape == (64, 96)
    assert weights["model.layers.0.mlp.down_proj.weight"].shape == (96, 160)
    assert {str(w.dtype) for w in weights.values()} == {"float32"}
    assert np.all(weights["model.layers.1.self_attn.q_norm.weight"] == 1)
    assert weights["model.embed_tokens.weight"].std() == pytest.approx(0.05, rel=0.05)


def test_a_byte_is_a_token_and_special_tokens_come_first(tmp_path: Path) -> None:
    folder = make_tiny_qwen3(tmp_path)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 260
    assert tokenizer.encode("<|pad|><|im_start|><|sep|><|im_end|>").ids == [0, 1, 2, 3]
    text = "12é\n"
    ids = tokenizer.encode(text).ids
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text
    assert json.loads((folder / "generation_config.json").read_text()) == {"eos_token_id": 3, "pad_token_id": 0}
    assert json.loads((folder / "config.json").read_text())["vocab_size"] == 320


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    weights = [
        (make_tiny_qwen3(tmp_path / name, seed=seed) / "model.safetensors").read_bytes()
        for name, seed in (("a", 0), ("b", 0), ("c", 1))
    ]
    assert weights[0] == weights[1] != weights[2]


def test_a_vocabulary_below_the_tokenizers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="vocab_size 256 is smaller than the byte tokenizer's 260"):
        make_tiny_qwen3(tmp_path, vocab_size=256)


def test_a_mixture_has_the_sizes_of_its_family(tmp_path: Path) -> None:
    folder = make_tiny_qwen3_moe(tmp_path / "tiny", hidden=32, ffn=24)
    weights = load_file(folder / "model.safetensors")
    shape = read_shape(folder)
    assert (shape.family, shape.layers, shape.experts, shape.experts_per_token) == ("qwen3_moe", 2, 8, 2)
    assert sum(w.size for w in weights.values()) == shape.parameters
    assert weights["model.layers.1.mlp.gate.weight"].shape == (8, 32)
    assert weights["model.layers.0.mlp.experts.7.down_proj.weight"].shape == (32, 24)
    assert "model.layers.0.mlp.gate_proj.weight" not in weights
