"""Tiny random models for tests: built in milliseconds, loadable by transformers, vLLM and the trainer."""

from __future__ import annotations

from pathlib import Path
from typing import TypedDict, Unpack

from vime.data.tiny_model import Qwen3Shape, byte_tokenizer, save_qwen3, save_tokenizer
from vime.errors import DataError


class Qwen3Sizes(TypedDict, total=False):
    """See `vime.data.tiny_model.Qwen3Shape`; what is left out keeps the value there."""

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


def make_tiny_qwen3(directory: str | Path, *, seed: int = 0, tied: bool = True, **sizes: Unpack[Qwen3Sizes]) -> Path:
    """Write a random float32 Qwen3 with a byte-level tokenizer of 260 entries, and return its folder.

    Special tokens: `<|pad|>` 0, `<|im_start|>` 1, `<|sep|>` 2, `<|im_end|>` 3 (end of sequence). The vocabulary is
    padded to 320 unless `vocab_size` says otherwise. The same arguments give the same bytes.

    Raises:
        DataError: `vocab_size` is smaller than the tokenizer.
    """
    folder = Path(directory)
    tokenizer = byte_tokenizer()
    chosen: Qwen3Sizes = {"vocab_size": 320, "init_std": 0.05, **sizes}
    shape = Qwen3Shape(tied=tied, **chosen)
    entries = tokenizer.get_vocab_size()
    if shape.vocab_size < entries:
        raise DataError(
            f"vocab_size {shape.vocab_size} is smaller than the byte tokenizer's {entries} entries",
            fix="use 260 or more",
        )
    save_tokenizer(tokenizer, folder, max_length=shape.max_positions)
    save_qwen3(folder, shape, seed=seed)
    return folder


def make_tiny_qwen3_moe(directory: str | Path, *, seed: int = 0, tied: bool = False, **sizes: Unpack[Qwen3Sizes]) -> Path:
    """Like `make_tiny_qwen3`, with 2 layers of 8 experts, 2 of them for a token, unless `sizes` say otherwise."""
    chosen: Qwen3Sizes = {"layers": 2, "experts": 8, "experts_per_token": 2, "ffn": 64, **sizes}
    return make_tiny_qwen3(directory, seed=seed, tied=tied, **chosen)
