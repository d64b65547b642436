"""A model's shape: what planning and topology rules need to know, read from its Hugging Face config."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a decoder-only transformer. `parameters` counts each tied tensor once."""

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    tied_embeddings: bool
    parameters: int
    max_positions: int
    experts: int = 0
    experts_per_token: int = 0
    expert_ffn: int = 0
