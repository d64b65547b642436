"""Tiny random models for tests: built in milliseconds, loadable by transformers, vLLM and the trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypedDict, Unpack

from vime.data.tiny_model import TinyShape, byte_tokenizer, save_tiny, save_tokenizer
from vime.errors import DataError


class TinySizes(TypedDict, total=False):
    """See `vime.data.tiny_model.TinyShape`; what is left out keeps the value there."""

    vocab_size: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    max_positions: int
    init_std: float
    experts: int
    experts_per_token: int


class FamilySizes(TinySizes, total=False):
    """Also what only some families read."""

    tied: bool
    shared_experts: int
    dense_layers: int
    frozen_layers: int
    groups: int
    qk_norm: bool
    kv_rank: int
    q_rank: int
    rotary_factor: float


_MIXTURE: FamilySizes = {"tied": False, "layers": 3, "experts": 8, "experts_per_token": 2, "ffn": 64}
_CHOSEN: dict[str, FamilySizes] = {
    "qwen3_moe": {"tied": False, "experts": 8, "experts_per_token": 2, "ffn": 64},
    "glm4_moe": _MIXTURE,
    "deepseek_v3": {**_MIXTURE, "groups": 2, "head_dim": 64, "rotary_factor": 4.0},
    "qwen2": {"hidden": 128},
    "llama": {"tied": False, "rotary_factor": 8.0},
}


def make_tiny(directory: str | Path, family: str, *, seed: int = 0, **sizes: Unpack[FamilySizes]) -> Path:
    """Write a random float32 model of a family with a byte-level tokenizer of 260 entries, and return its folder.

    Special tokens: `<|pad|>` 0, `<|im_start|>` 1, `<|sep|>` 2, `<|im_end|>` 3 (end of sequence). The vocabulary is
    padded to 320 unless `vocab_size` says otherwise. The same arguments give the same bytes. Families with experts have 8 of
    them, glm4_moe and deepseek_v3 in the last 2 of 3 layers and with a layer for multi-token prediction.

    Raises:
        DataError: `vocab_size` is smaller than the tokenizer, or there is no such family.
    """
    folder = Path(directory)
    tokenizer = byte_tokenizer()
    chosen: dict[str, Any] = {"vocab_size": 320, "init_std": 0.05, **_CHOSEN.get(family, {}), **sizes}
    shape = TinyShape(family=family, **chosen)
    entries = tokenizer.get_vocab_size()
    if shape.vocab_size < entries:
        raise DataError(
            f"vocab_size {shape.vocab_size} is smaller than the byte tokenizer's {entries} entries",
            fix="use 260 or more",
        )
    save_tokenizer(tokenizer, folder, max_length=shape.max_positions)
    save_tiny(folder, shape, seed=seed)
    return folder


def make_tiny_qwen3(directory: str | Path, *, seed: int = 0, tied: bool = True, **sizes: Unpack[TinySizes]) -> Path:
    """`make_tiny` of the family qwen3: dense, or with `experts` in every layer."""
    return make_tiny(directory, "qwen3", seed=seed, tied=tied, **sizes)


def make_tiny_qwen3_moe(directory: str | Path, *, seed: int = 0, tied: bool = False, **sizes: Unpack[TinySizes]) -> Path:
    """`make_tiny` of the family qwen3_moe: 2 layers of 8 experts, 2 of them for a token, unless `sizes` say otherwise."""
    return make_tiny(directory, "qwen3_moe", seed=seed, tied=tied, **sizes)
