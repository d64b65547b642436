"""Qwen3, dense: grouped-query attention with normalised queries and keys, gated MLP, rotary positions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vime.errors import ConfigError
from vime.facts.model import ModelShape
from vime.models.base import Join, NameRow, NameTable, Rotary, refuse, require

_LAYER = "decoder.layers.{layer}."
_HF = "model.layers.{layer}."

_TABLE = NameTable(
    rows=(
        NameRow("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), tp_dim=0, is_vocab=True),
        NameRow(_LAYER + "input_layernorm.weight", (_HF + "input_layernorm.weight",)),
        NameRow(
            _LAYER + "self_attention.linear_qkv.weight",
            tuple(f"{_HF}self_attn.{part}_proj.weight" for part in ("q", "k", "v")),
            Join.QKV,
            tp_dim=0,
        ),
        NameRow(_LAYER + "self_attention.q_layernorm.weight", (_HF + "self_attn.q_norm.weight",)),
        NameRow(_LAYER + "self_attention.k_layernorm.weight", (_HF + "self_attn.k_norm.weight",)),
        NameRow(_LAYER + "self_attention.linear_proj.weight", (_HF + "self_attn.o_proj.weight",), tp_dim=1),
        NameRow(_LAYER + "pre_mlp_layernorm.weight", (_HF + "post_attention_layernorm.weight",)),
        NameRow(
            _LAYER + "mlp.linear_fc1.weight",
            tuple(f"{_HF}mlp.{part}_proj.weight" for part in ("gate", "up")),
            Join.GATE_UP,
            tp_dim=0,
        ),
        NameRow(_LAYER + "mlp.linear_fc2.weight", (_HF + "mlp.down_proj.weight",), tp_dim=1),
        NameRow("decoder.final_layernorm.weight", ("model.norm.weight",)),
        NameRow("output_layer.weight", ("lm_head.weight",), tp_dim=0, is_vocab=True),
    ),
    tied={"lm_head.weight": "model.embed_tokens.weight"},
)


class Qwen3:
    """The family's answers; see `vime.models.base.Family`."""

    name = "qwen3"
    architectures = ("Qwen3ForCausalLM",)
    table = _TABLE

    def shape(self, config: Mapping[str, Any]) -> ModelShape:
        """Sizes, with the parameter count in closed form."""
        self._check(config)
        ffn = require(config, "intermediate_size")
        return self._sizes(config, ffn=ffn, mlp=3 * ffn)

    def _sizes(self, config: Mapping[str, Any], *, ffn: int, mlp: int, experts: tuple[int, int, int] = (0, 0, 0)) -> ModelShape:
        """`mlp` counts a layer's feed-forward parameters in vectors of the hidden size; `experts` as in `ModelShape`."""
        layers, hidden = require(config, "num_hidden_layers"), require(config, "hidden_size")
        heads, vocab = require(config, "num_attention_heads"), require(config, "vocab_size")
        kv_heads = config.get("num_key_value_heads") or heads
        head_dim = config.get("head_dim") or hidden // heads
        if heads % kv_heads:
            raise ConfigError(f"config.json: num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}")
        tied = bool(config.get("tie_word_embeddings", False))
        attention = hidden * head_dim * (2 * heads + 2 * kv_heads) + 2 * head_dim
        per_layer = attention + mlp * hidden + 2 * hidden
        return ModelShape(
            family=self.name,
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            ffn=ffn,
            vocab=vocab,
            tied_embeddings=tied,
            parameters=layers * per_layer + hidden + vocab * hidden * (1 if tied else 2),
            max_positions=int(config.get("max_position_embeddings") or 32768),
            experts=experts[0],
            experts_per_token=experts[1],
            expert_ffn=experts[2],
        )

    def rotary(self, config: Mapping[str, Any]) -> Rotary:
        """Theta sits in `rope_parameters` (transformers 5) or beside the other keys (before)."""
        parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
        kind = parameters.get("rope_type", parameters.get("type", "default"))
        if kind != "default":
            raise ConfigError(f"config.json asks for {kind} rotary scaling", fix="use a model with default rotary positions")
        theta = parameters.get("rope_theta", config.get("rope_theta"))
        if theta is None:
            raise ConfigError("config.json has no rope_theta", fix="set rope_parameters: {rope_theta: ..., rope_type: default}")
        return Rotary(base=float(theta))

    def transformer_values(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """Megatron's fields for these sizes."""
        shape = self.shape(config)
        return {
            "num_layers": shape.layers,
            "hidden_size": shape.hidden,
            "ffn_hidden_size": shape.ffn,
            "num_attention_heads": shape.heads,
            "num_query_groups": shape.kv_heads,
            "kv_channels": shape.head_dim,
            "normalization": "RMSNorm",
            "layernorm_epsilon": float(config.get("rms_norm_eps", 1e-6)),
            "qk_layernorm": True,
            "gated_linear_unit": True,
            "activation_func": "silu",
            "add_bias_linear": False,
            "add_qkv_bias": False,
        }

    def _check(self, config: Mapping[str, Any]) -> None:
        refuse(config, "hidden_act", "silu")
        refuse(config, "attention_bias", False)
        refuse(config, "use_sliding_window", False)
        refuse(config, "attention_dropout", 0.0)
        for kind in config.get("layer_types") or ():
            if kind != "full_attention":
                raise ConfigError(f"config.json has a layer of type {kind}; only full_attention is supported")


FAMILY = Qwen3()
