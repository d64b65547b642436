"""Qwen3 with a mixture of experts in every layer: a router chooses some of the experts for each token.

Attention, norms, embeddings and rotary positions are those of the dense family.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vime.errors import ConfigError
from vime.facts.model import ModelShape
from vime.models import qwen3
from vime.models.base import Join, NameRow, NameTable, refuse, require

_LAYER = "decoder.layers.{layer}.mlp."
_EXPERT = _LAYER + "experts.local_experts.{expert}."
_HF = "model.layers.{layer}.mlp."
_HF_EXPERT = _HF + "experts.{expert}."

_TABLE = NameTable(
    rows=(
        # Nearly all parameters are experts', and a table is searched from its beginning.
        NameRow(
            _EXPERT + "linear_fc1.weight",
            (_HF_EXPERT + "gate_proj.weight", _HF_EXPERT + "up_proj.weight"),
            Join.GATE_UP,
            tp_dim=0,
        ),
        NameRow(_EXPERT + "linear_fc2.weight", (_HF_EXPERT + "down_proj.weight",), tp_dim=1),
        NameRow(_LAYER + "router.weight", (_HF + "gate.weight",)),
        *(row for row in qwen3.FAMILY.table.rows if not row.megatron.startswith(_LAYER)),
    ),
    tied=qwen3.FAMILY.table.tied,
)


class Qwen3Moe(qwen3.Qwen3):
    """The family's answers; see `vime.models.base.Family`."""

    name = "qwen3_moe"
    architectures = ("Qwen3MoeForCausalLM",)
    table = _TABLE

    def shape(self, config: Mapping[str, Any]) -> ModelShape:
        """Sizes, with the parameter count in closed form; `ffn` is 0, because no layer is dense."""
        self._check(config)
        # transformers 5 writes the count under the second name.
        key = "num_local_experts" if config.get("num_experts") is None and "num_local_experts" in config else "num_experts"
        experts, width = require(config, key), require(config, "moe_intermediate_size")
        chosen = require(config, "num_experts_per_tok")
        if not 1 <= chosen <= experts:
            raise ConfigError(f"config.json: num_experts_per_tok {chosen} of {experts} experts")
        if chosen == 1 and config.get("norm_topk_prob", False):
            raise ConfigError(
                "config.json: with num_experts_per_tok 1 and norm_topk_prob the router's weight is always 1",
                fix="use a model with more experts per token, or without norm_topk_prob",
            )
        return self._sizes(config, ffn=0, mlp=experts * (3 * width + 1), experts=(experts, chosen, width))

    def transformer_values(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """Megatron's fields: no auxiliary loss, the router in float32, weights over the chosen experts.

        The published router takes the softmax over all experts, then the highest; with `norm_topk_prob` it divides by their
        sum, which is the softmax over the chosen ones alone.
        """
        shape = self.shape(config)
        return {
            **super().transformer_values(config),
            "ffn_hidden_size": shape.expert_ffn,
            "moe_ffn_hidden_size": shape.expert_ffn,
            "num_moe_experts": shape.experts,
            "moe_router_topk": shape.experts_per_token,
            "moe_router_pre_softmax": not config.get("norm_topk_prob", False),
            "moe_router_score_function": "softmax",
            "moe_router_dtype": "fp32",
            "moe_router_load_balancing_type": "none",
            "moe_aux_loss_coeff": 0.0,
        }

    def _check(self, config: Mapping[str, Any]) -> None:
        super()._check(config)
        refuse(config, "decoder_sparse_step", 1)
        refuse(config, "mlp_only_layers", [])


FAMILY = Qwen3Moe()
