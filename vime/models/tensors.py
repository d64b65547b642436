"""Every tensor of a model's folder: its Hugging Face name and shape, from the config alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from vime.facts.model import Latent, ModelShape
from vime.models.decoder import Decoder

Sized = tuple[str, tuple[int, ...]]


def tensor_sizes(family: Decoder, config: Mapping[str, Any]) -> Iterator[Sized]:
    """(name, shape) of every tensor that the family knows, in the order of a forward pass; copies of tied ones are left out.

    Norms, biases and the router's bias have one dimension. Layers for multi-token prediction are not among them.
    """
    shape = family.shape(config)
    known = {name for row in family.table.rows for name in row.names}
    absent = () if family.has_qkv_bias(config) else ("q_proj.bias", "k_proj.bias", "v_proj.bias")
    absent += () if family.has_qk_norm(config) else ("q_norm.weight", "k_norm.weight")
    yield "model.embed_tokens.weight", (shape.vocab, shape.hidden)
    for layer in range(shape.layers):
        for name, size in _layer(shape, layer):
            if _template(name) in known and not name.endswith(absent):
                yield f"model.layers.{layer}.{name}", size
    yield "model.norm.weight", (shape.hidden,)
    if not shape.tied_embeddings:
        yield "lm_head.weight", (shape.vocab, shape.hidden)


def _template(name: str) -> str:
    """A name inside a layer as it stands in a name table."""
    parts = ("{expert}" if part.isdigit() else part for part in name.split("."))
    return "model.layers.{layer}." + ".".join(parts)


def _layer(shape: ModelShape, layer: int) -> Iterator[Sized]:
    """All that a layer of some family could have, without the layer's number."""
    hidden = shape.hidden
    yield "input_layernorm.weight", (hidden,)
    yield from _latent(shape, shape.latent) if shape.latent else _grouped(shape)
    yield "post_attention_layernorm.weight", (hidden,)
    if layer < shape.dense_layers or not shape.experts:
        yield from _gated("mlp", hidden, shape.ffn)
        return
    yield "mlp.gate.weight", (shape.experts, hidden)
    yield "mlp.gate.e_score_correction_bias", (shape.experts,)
    for expert in range(shape.experts):
        yield from _gated(f"mlp.experts.{expert}", hidden, shape.expert_ffn)
    if shape.shared_ffn:
        yield from _gated("mlp.shared_experts", hidden, shape.shared_ffn)


def _gated(prefix: str, hidden: int, width: int) -> Iterator[Sized]:
    yield f"{prefix}.gate_proj.weight", (width, hidden)
    yield f"{prefix}.up_proj.weight", (width, hidden)
    yield f"{prefix}.down_proj.weight", (hidden, width)


def _grouped(shape: ModelShape) -> Iterator[Sized]:
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    for part, rows in (("q", queries), ("k", keys), ("v", keys)):
        yield f"self_attn.{part}_proj.weight", (rows, shape.hidden)
        yield f"self_attn.{part}_proj.bias", (rows,)
    yield "self_attn.o_proj.weight", (shape.hidden, queries)
    yield "self_attn.q_norm.weight", (shape.head_dim,)
    yield "self_attn.k_norm.weight", (shape.head_dim,)


def _latent(shape: ModelShape, latent: Latent) -> Iterator[Sized]:
    queries = shape.heads * (latent.plain + latent.rotary)
    if latent.q_rank:
        yield "self_attn.q_a_proj.weight", (latent.q_rank, shape.hidden)
        yield "self_attn.q_a_layernorm.weight", (latent.q_rank,)
        yield "self_attn.q_b_proj.weight", (queries, latent.q_rank)
    else:
        yield "self_attn.q_proj.weight", (queries, shape.hidden)
    yield "self_attn.kv_a_proj_with_mqa.weight", (latent.kv_rank + latent.rotary, shape.hidden)
    yield "self_attn.kv_a_layernorm.weight", (latent.kv_rank,)
    yield "self_attn.kv_b_proj.weight", (shape.heads * (latent.plain + latent.value), latent.kv_rank)
    yield "self_attn.o_proj.weight", (shape.hidden, shape.heads * latent.value)
