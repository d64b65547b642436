"""A model's shape: what planning and topology rules need to know, read from its Hugging Face config."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): the cache holds one compressed vector a token.

    `kv_rank` and `q_rank` are the compressed sizes (`q_rank` 0: queries are not compressed). A head's query and key have
    `plain` entries without and `rotary` with a position, the rotary part of the key is shared by all heads; its value has
    `value` entries.
    """

    kv_rank: int
    q_rank: int
    plain: int
    rotary: int
    value: int


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a decoder-only transformer. `parameters` counts each tied tensor once.

    `ffn` is the width of dense feed-forward layers. With experts, the first `dense_layers` layers are dense and the others
    have experts, beside them one shared expert of width `shared_ffn` (0: none) that every token passes. `head_dim` is that of
    queries and keys. `frozen_layers` are layers for multi-token prediction that the folder holds and nothing trains; they are
    not among `layers` and `parameters`.
    """

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
    dense_layers: int = 0
    shared_ffn: int = 0
    latent: Latent | None = None
    frozen_layers: int = 0

    @property
    def expert_layers(self) -> int:
        """Layers whose feed-forward network is a mixture of experts."""
        return self.layers - self.dense_layers if self.experts else 0

    @property
    def value_dim(self) -> int:
        """Entries of a head's value."""
        return self.latent.value if self.latent else self.head_dim
