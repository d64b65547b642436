"""What the families have in common: decoders with a norm before each part, gated feed-forward networks, rotary positions.

A family is a subclass that says what its config means; the rows of its name table are put together from those here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vime.errors import ConfigError
from vime.facts.model import Latent, ModelShape
from vime.models.base import Join, Llama3Scaling, NameRow, NameTable, Rotary, YarnScaling, refuse, require

LAYER, HF_LAYER = "decoder.layers.{layer}.", "model.layers.{layer}."
_MLP, _HF_MLP = LAYER + "mlp.", HF_LAYER + "mlp."
_ATTENTION, _HF_ATTENTION = LAYER + "self_attention.", HF_LAYER + "self_attn."


def _gated(megatron: str, hf: str) -> tuple[NameRow, NameRow]:
    """A gated feed-forward network: gate and up joined, then down."""
    joined = (hf + "gate_proj.weight", hf + "up_proj.weight")
    return (
        NameRow(megatron + "linear_fc1.weight", joined, Join.GATE_UP, tp_dim=0),
        NameRow(megatron + "linear_fc2.weight", (hf + "down_proj.weight",), tp_dim=1),
    )


def _joined_qkv(kind: str) -> NameRow:
    parts = tuple(f"{_HF_ATTENTION}{part}_proj.{kind}" for part in ("q", "k", "v"))
    return NameRow(f"{_ATTENTION}linear_qkv.{kind}", parts, Join.QKV, tp_dim=0)


def _of_attention(megatron: str, hf: str, *, tp_dim: int | None = None) -> NameRow:
    return NameRow(f"{_ATTENTION}{megatron}.weight", (f"{_HF_ATTENTION}{hf}.weight",), tp_dim=tp_dim)


EMBEDDING = NameRow("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), tp_dim=0, is_vocab=True)
NORMS = (
    NameRow(LAYER + "input_layernorm.weight", (HF_LAYER + "input_layernorm.weight",)),
    NameRow(LAYER + "pre_mlp_layernorm.weight", (HF_LAYER + "post_attention_layernorm.weight",)),
)
HEAD = (
    NameRow("decoder.final_layernorm.weight", ("model.norm.weight",)),
    NameRow("output_layer.weight", ("lm_head.weight",), tp_dim=0, is_vocab=True),
)
QKV, QKV_BIAS = _joined_qkv("weight"), _joined_qkv("bias")
QK_NORM = (_of_attention("q_layernorm", "q_norm"), _of_attention("k_layernorm", "k_norm"))
PROJECTION = _of_attention("linear_proj", "o_proj", tp_dim=1)
LATENT_ATTENTION = (
    _of_attention("linear_q_proj", "q_proj", tp_dim=0),
    _of_attention("linear_q_down_proj", "q_a_proj", tp_dim=0),
    _of_attention("q_layernorm", "q_a_layernorm"),
    _of_attention("linear_q_up_proj", "q_b_proj", tp_dim=0),
    _of_attention("linear_kv_down_proj", "kv_a_proj_with_mqa", tp_dim=0),
    _of_attention("kv_layernorm", "kv_a_layernorm"),
    _of_attention("linear_kv_up_proj", "kv_b_proj", tp_dim=0),
    PROJECTION,
)
DENSE = _gated(_MLP, _HF_MLP)
EXPERTS = _gated(_MLP + "experts.local_experts.{expert}.", _HF_MLP + "experts.{expert}.")
ROUTER = NameRow(_MLP + "router.weight", (_HF_MLP + "gate.weight",))
EXPERT_BIAS = NameRow(_MLP + "router.expert_bias", (_HF_MLP + "gate.e_score_correction_bias",), is_buffer=True)
SHARED_EXPERT = _gated(_MLP + "shared_experts.", _HF_MLP + "shared_experts.")
SHARED_MIXTURE = (*EXPERTS, ROUTER, EXPERT_BIAS, *SHARED_EXPERT, *DENSE)
"""Experts and a shared one behind a router with a bias, and the dense layers before them."""


def table(*rows: NameRow) -> NameTable:
    """Rows of the layers' parts, and those that every family has.

    A table is searched from its beginning, and nearly all parameters of a mixture are its experts'.
    """
    ordered = sorted(rows, key=lambda row: not row.is_expert)
    return NameTable(rows=(*ordered, EMBEDDING, *NORMS, *HEAD), tied={"lm_head.weight": "model.embed_tokens.weight"})


@dataclass(frozen=True, slots=True)
class Mixture:
    """A mixture of experts: see `ModelShape`."""

    experts: int
    chosen: int
    width: int
    dense_layers: int = 0
    shared: int = 0


class Decoder:
    """A family's answers with grouped-query attention; subclasses say what differs. See `vime.models.base.Family`."""

    name: str
    architectures: tuple[str, ...]
    table: NameTable

    rotary_kinds: tuple[str, ...] = ("default",)
    """What the family takes of `rope_type`."""

    # ---- what differs

    def has_qk_norm(self, config: Mapping[str, Any]) -> bool:
        """Queries and keys are normalised, head by head."""
        return False

    def has_qkv_bias(self, config: Mapping[str, Any]) -> bool:
        """Queries, keys and values have a bias."""
        return False

    def mixture(self, config: Mapping[str, Any]) -> Mixture | None:
        """The experts, None for a dense model. Raises ConfigError for numbers that do not fit."""
        return None

    def latent(self, config: Mapping[str, Any]) -> Latent | None:
        """Sizes of latent attention, None for grouped queries."""
        return None

    def check(self, config: Mapping[str, Any]) -> None:
        """Raise ConfigError for a setting that would be ignored."""
        refuse(config, "hidden_act", "silu")
        refuse(config, "attention_dropout", 0.0)
        refuse(config, "mlp_bias", False)
        refuse_quantized(config)
        for kind in config.get("layer_types") or ():
            if kind != "full_attention":
                raise ConfigError(f"config.json has a layer of type {kind}; only full_attention is supported")

    # ---- answers

    def shape(self, config: Mapping[str, Any]) -> ModelShape:
        """Sizes, with the parameter count in closed form. Raises ConfigError for a missing or unsupported setting."""
        self.check(config)
        layers, hidden = require(config, "num_hidden_layers"), require(config, "hidden_size")
        heads, vocab = require(config, "num_attention_heads"), require(config, "vocab_size")
        mixture, latent = self.mixture(config), self.latent(config)
        kv_heads = heads if latent else config.get("num_key_value_heads") or heads
        if heads % kv_heads:
            raise ConfigError(f"config.json: num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}")
        dense = layers if mixture is None else mixture.dense_layers
        ffn, tied = (require(config, "intermediate_size") if dense else 0), bool(config.get("tie_word_embeddings", False))
        head_dim = latent.plain + latent.rotary if latent else config.get("head_dim") or hidden // heads
        attention = self._latent_parameters(latent, hidden, heads) if latent else 0
        if latent is None:
            attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
            attention += head_dim * (heads + 2 * kv_heads) if self.has_qkv_bias(config) else 0
            attention += 2 * head_dim if self.has_qk_norm(config) else 0
        parameters = layers * (attention + 2 * hidden) + dense * 3 * ffn * hidden
        if mixture is not None:
            each = mixture.experts * (3 * mixture.width + 1) + 3 * mixture.shared
            parameters += (layers - dense) * each * hidden
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
            parameters=parameters + hidden + vocab * hidden * (1 if tied else 2),
            max_positions=int(config.get("max_position_embeddings") or 32768),
            experts=mixture.experts if mixture else 0,
            experts_per_token=mixture.chosen if mixture else 0,
            expert_ffn=mixture.width if mixture else 0,
            dense_layers=mixture.dense_layers if mixture else 0,
            shared_ffn=mixture.shared if mixture else 0,
            latent=latent,
            frozen_layers=int(config.get("num_nextn_predict_layers", config.get("num_mtp_layers")) or 0),
        )

    @staticmethod
    def _latent_parameters(latent: Latent, hidden: int, heads: int) -> int:
        query = latent.plain + latent.rotary
        to_query = hidden * heads * query
        if latent.q_rank:
            to_query = latent.q_rank * (hidden + heads * query + 1)
        to_key = hidden * (latent.kv_rank + latent.rotary) + latent.kv_rank * (heads * (latent.plain + latent.value) + 1)
        return to_query + to_key + heads * latent.value * hidden

    def rotary(self, config: Mapping[str, Any]) -> Rotary:
        """Theta and scaling sit in `rope_parameters` (transformers 5), or beside the other keys and in `rope_scaling`.

        Raises ConfigError for a scaling that the family does not take.
        """
        values = config.get("rope_parameters") or config.get("rope_scaling") or {}
        kind = values.get("rope_type", values.get("type", "default"))
        if kind not in self.rotary_kinds:
            raise ConfigError(
                f"config.json asks for {kind} rotary scaling; {self.name} takes {' or '.join(self.rotary_kinds)}",
                fix="use a model with such rotary positions, or remove the scaling for contexts that need none",
            )
        theta = values.get("rope_theta", config.get("rope_theta"))
        if theta is None:
            raise ConfigError("config.json has no rope_theta", fix="set rope_parameters: {rope_theta: ..., rope_type: default}")
        return Rotary(float(theta), percent=self.rotary_percent(config, values), scaling=_scaling(kind, values, config))

    def rotary_percent(self, config: Mapping[str, Any], values: Mapping[str, Any]) -> float:
        """The share of a head's dimensions that is turned; `values` are the rotary settings."""
        return 1.0

    def transformer_values(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """Megatron's fields for these sizes."""
        shape = self.shape(config)
        values: dict[str, Any] = {
            "num_layers": shape.layers,
            "hidden_size": shape.hidden,
            "ffn_hidden_size": shape.ffn or shape.expert_ffn,
            "num_attention_heads": shape.heads,
            "num_query_groups": shape.kv_heads,
            "kv_channels": shape.head_dim,
            "normalization": "RMSNorm",
            "layernorm_epsilon": float(config.get("rms_norm_eps", 1e-6)),
            "qk_layernorm": self.has_qk_norm(config),
            "gated_linear_unit": True,
            "activation_func": "silu",
            "add_bias_linear": False,
            "add_qkv_bias": self.has_qkv_bias(config),
        }
        return {**values, **(self.mixture_values(config, shape) if shape.experts else {})}

    def mixture_values(self, config: Mapping[str, Any], shape: ModelShape) -> Mapping[str, Any]:
        """Megatron's fields for experts: the router in float32, no auxiliary loss unless the run file asks for one."""
        values: dict[str, Any] = {
            "moe_ffn_hidden_size": shape.expert_ffn,
            "num_moe_experts": shape.experts,
            "moe_router_topk": shape.experts_per_token,
            "moe_router_dtype": "fp32",
            "moe_router_load_balancing_type": "none",
            "moe_aux_loss_coeff": 0.0,
        }
        if shape.dense_layers:
            values["moe_layer_freq"] = [0] * shape.dense_layers + [1] * shape.expert_layers
        if shape.shared_ffn:
            values["moe_shared_expert_intermediate_size"] = shape.shared_ffn
        return values


def refuse_quantized(config: Mapping[str, Any]) -> None:
    """Raise ConfigError for a folder whose tensors are not plain numbers."""
    section = config.get("quantization_config")
    if section:
        method = section.get("quant_method", "?") if isinstance(section, Mapping) else "?"
        raise ConfigError(
            f"config.json has a quantization_config ({method}): the trainer reads plain bfloat16 or float32 tensors",
            fix="convert the folder to bfloat16 with the script that its publisher ships (DeepSeek: fp8_cast_bf16.py), and "
            "remove quantization_config from its config.json",
        )


def sigmoid_router(config: Mapping[str, Any], shape: ModelShape) -> dict[str, Any]:
    """Megatron's fields for a router of DeepSeek-V3's kind (arXiv:2412.19437): sigmoid scores, a bias that only selects.

    The bias keeps its values: `trainer.megatron.moe_router_bias_update_rate` lets it follow the load. Raises ConfigError for
    numbers with which megatron-core and the published router choose differently.
    """
    groups, kept = int(config.get("n_group") or 1), int(config.get("topk_group") or 1)
    values: dict[str, Any] = {
        "moe_router_score_function": "sigmoid",
        "moe_router_pre_softmax": False,
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.0,
        "moe_router_topk_scaling_factor": float(config.get("routed_scaling_factor", 1.0)),
    }
    if groups > 1:
        if shape.experts % groups or kept > groups or shape.experts_per_token // kept != 2:
            raise ConfigError(
                f"config.json: {shape.experts_per_token} of {shape.experts} experts, topk_group {kept} of n_group {groups}; "
                "megatron-core scores a group by its best num_experts_per_tok / topk_group experts, the published router by "
                "its best two",
                fix="use a model where num_experts_per_tok is twice topk_group, or without groups (n_group 1)",
            )
        values |= {"moe_router_num_groups": groups, "moe_router_group_topk": kept}
    return values


def shared_mixture(config: Mapping[str, Any]) -> Mixture:
    """Experts under the keys of GLM-4.5 and DeepSeek-V3. Raises ConfigError for numbers that do not fit."""
    key = (
        "num_local_experts" if config.get("n_routed_experts") is None and "num_local_experts" in config else "n_routed_experts"
    )
    experts, width, chosen = (
        require(config, key),
        require(config, "moe_intermediate_size"),
        require(config, "num_experts_per_tok"),
    )
    dense, layers = int(config.get("first_k_dense_replace") or 0), require(config, "num_hidden_layers")
    check_chosen(chosen, experts)
    if chosen == 1:
        raise ConfigError(
            "config.json: with num_experts_per_tok 1 megatron-core does not normalise the router's weight",
            fix="use a model with more experts per token",
        )
    if dense >= layers:
        raise ConfigError(f"config.json: first_k_dense_replace {dense} leaves none of {layers} layers to the experts")
    refuse(config, "norm_topk_prob", True)
    refuse(config, "moe_layer_freq", 1)
    return Mixture(experts, chosen, width, dense_layers=dense, shared=int(config.get("n_shared_experts") or 0) * width)


def check_chosen(chosen: int, experts: int) -> None:
    """Raise ConfigError unless there are as many experts as a token goes to."""
    if not 1 <= chosen <= experts:
        raise ConfigError(f"config.json: num_experts_per_tok {chosen} of {experts} experts")


def _scaling(kind: str, values: Mapping[str, Any], config: Mapping[str, Any]) -> Llama3Scaling | YarnScaling | None:
    if kind == "default":
        return None
    place = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    needed = ["factor", "original_max_position_embeddings"]
    needed += ["low_freq_factor", "high_freq_factor"] if kind == "llama3" else []
    for key in needed:
        if values.get(key) is None:
            raise ConfigError(f"config.json: {place} of type {kind} has no {key}", fix="use a complete Hugging Face folder")
    factor, positions = float(values["factor"]), int(values["original_max_position_embeddings"])
    if kind == "llama3":
        return Llama3Scaling(factor, float(values["low_freq_factor"]), float(values["high_freq_factor"]), positions)
    for key, only in (("attention_factor", None), ("truncate", True)):
        if values.get(key, only) not in (None, only):
            raise ConfigError(f"config.json: {place}.{key} {values[key]!r} is not supported", fix="use a model without it")
    scales = (float(values.get("mscale") or 0), float(values.get("mscale_all_dim") or 0))
    if not all(scales):
        raise ConfigError(
            f"config.json: {place} has mscale {scales[0]:g} and mscale_all_dim {scales[1]:g}; without both, trainer and engine "
            "scale attention differently",
            fix=f"set {place}.mscale and {place}.mscale_all_dim as the model was trained",
        )
    beta_fast, beta_slow = float(values.get("beta_fast") or 32), float(values.get("beta_slow") or 1)
    return YarnScaling(factor, positions, beta_fast, beta_slow, *scales)
