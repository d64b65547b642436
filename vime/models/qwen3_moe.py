"""Qwen3 with a mixture of experts in every layer: a router chooses some of the experts for each token.

Attention, norms, embeddings and rotary positions are those of the dense family.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vime.errors import ConfigError
from vime.facts.model import ModelShape
from vime.models.base import refuse, require
from vime.models.decoder import EXPERTS, PROJECTION, QK_NORM, QKV, ROUTER, Mixture, check_chosen, table
from vime.models.qwen3 import Qwen3


class Qwen3Moe(Qwen3):
    """The family's answers; see `vime.models.base.Family`."""

    name = "qwen3_moe"
    architectures = ("Qwen3MoeForCausalLM",)
    table = table(*EXPERTS, ROUTER, QKV, *QK_NORM, PROJECTION)

    def mixture(self, config: Mapping[str, Any]) -> Mixture:
        """In every layer: `ffn` of the shape is 0, because no layer is dense."""
        # transformers 5 writes the count under the second name.
        key = "num_local_experts" if config.get("num_experts") is None and "num_local_experts" in config else "num_experts"
        experts, width = require(config, key), require(config, "moe_intermediate_size")
        chosen = require(config, "num_experts_per_tok")
        check_chosen(chosen, experts)
        if chosen == 1 and config.get("norm_topk_prob", False):
            raise ConfigError(
                "config.json: with num_experts_per_tok 1 and norm_topk_prob the router's weight is always 1",
                fix="use a model with more experts per token, or without norm_topk_prob",
            )
        return Mixture(experts, chosen, width)

    def mixture_values(self, config: Mapping[str, Any], shape: ModelShape) -> Mapping[str, Any]:
        """The published router takes the softmax over all experts, then the highest; with `norm_topk_prob` it divides by
        their sum, which is the softmax over the chosen ones alone.
        """
        return {
            **super().mixture_values(config, shape),
            "moe_router_pre_softmax": not config.get("norm_topk_prob", False),
            "moe_router_score_function": "softmax",
        }

    def check(self, config: Mapping[str, Any]) -> None:
        """See `Decoder.check`."""
        super().check(config)
        refuse(config, "decoder_sparse_step", 1)
        refuse(config, "mlp_only_layers", [])


FAMILY = Qwen3Moe()
