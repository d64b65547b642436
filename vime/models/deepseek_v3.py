"""DeepSeek-V3 and models of its kind (Moonlight, Kimi K2): latent attention and a mixture of experts with groups.

Rotary positions turn neighbouring entries of a head's rotary part; YaRN may stretch them. A layer for multi-token prediction
stands behind the others in the folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vime.errors import ConfigError
from vime.facts.model import Latent, ModelShape
from vime.models.base import YarnScaling, refuse, require
from vime.models.decoder import LATENT_ATTENTION, SHARED_MIXTURE, Decoder, Mixture, shared_mixture, sigmoid_router, table

ENGINE_KEYS = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
"""What vLLM reads the kind of router from; transformers has no such fields and leaves them out of a config of its own."""


class DeepseekV3(Decoder):
    """The family's answers; see `vime.models.base.Family`."""

    name = "deepseek_v3"
    architectures = ("DeepseekV3ForCausalLM",)
    table = table(*SHARED_MIXTURE, *LATENT_ATTENTION)
    rotary_kinds = ("default", "yarn")

    def latent(self, config: Mapping[str, Any]) -> Latent:
        """`q_lora_rank` is null where queries are not compressed."""
        return Latent(
            kv_rank=require(config, "kv_lora_rank"),
            q_rank=config.get("q_lora_rank") or 0,
            plain=require(config, "qk_nope_head_dim"),
            rotary=require(config, "qk_rope_head_dim"),
            value=require(config, "v_head_dim"),
        )

    def mixture(self, config: Mapping[str, Any]) -> Mixture:
        """See `shared_mixture`."""
        return shared_mixture(config)

    def mixture_values(self, config: Mapping[str, Any], shape: ModelShape) -> Mapping[str, Any]:
        """See `sigmoid_router`."""
        return {**super().mixture_values(config, shape), **sigmoid_router(config, shape)}

    def transformer_values(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """Fields of Megatron's config for latent attention: rotary positions belong to the layers there."""
        shape, rotary = self.shape(config), self.rotary(config)
        assert shape.latent is not None
        values: dict[str, Any] = {
            **super().transformer_values(config),
            "multi_latent_attention": True,
            "qk_layernorm": True,
            "q_lora_rank": shape.latent.q_rank or None,
            "kv_lora_rank": shape.latent.kv_rank,
            "qk_head_dim": shape.latent.plain,
            "qk_pos_emb_head_dim": shape.latent.rotary,
            "v_head_dim": shape.latent.value,
            "rope_type": "rope",
            "rotary_base": rotary.base,
            "rotary_scaling_factor": 1.0,
        }
        if isinstance(rotary.scaling, YarnScaling):
            values |= {
                "rope_type": "yarn",
                "rotary_scaling_factor": rotary.scaling.factor,
                "original_max_position_embeddings": rotary.scaling.positions,
                "beta_fast": rotary.scaling.beta_fast,
                "beta_slow": rotary.scaling.beta_slow,
                "mscale": rotary.scaling.mscale,
                "mscale_all_dim": rotary.scaling.mscale_all_dim,
            }
        return values

    def check(self, config: Mapping[str, Any]) -> None:
        """See `Decoder.check`."""
        super().check(config)
        refuse(config, "attention_bias", False)
        refuse(config, "rope_interleave", True)
        for key, value in ENGINE_KEYS.items():
            if key not in config:
                raise ConfigError(
                    f"config.json has no {key}, from which vLLM reads the router's kind", fix=f'add "{key}": "{value}" to it'
                )
            refuse(config, key, value)
        heads = require(config, "num_attention_heads")
        refuse(config, "num_key_value_heads", heads)


FAMILY = DeepseekV3()
