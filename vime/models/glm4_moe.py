"""GLM-4.5 and GLM-4.5-Air: a mixture of experts after some dense layers, with a shared expert and a sigmoid router.

Rotary positions turn half of a head. A layer for multi-token prediction stands behind the others in the folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vime.facts.model import ModelShape
from vime.models.decoder import (
    PROJECTION,
    QK_NORM,
    QKV,
    QKV_BIAS,
    SHARED_MIXTURE,
    Decoder,
    Mixture,
    shared_mixture,
    sigmoid_router,
    table,
)


class Glm4Moe(Decoder):
    """The family's answers; see `vime.models.base.Family`."""

    name = "glm4_moe"
    architectures = ("Glm4MoeForCausalLM",)
    table = table(*SHARED_MIXTURE, QKV, QKV_BIAS, *QK_NORM, PROJECTION)

    def has_qk_norm(self, config: Mapping[str, Any]) -> bool:
        """In GLM-4.5, not in GLM-4.5-Air."""
        return bool(config.get("use_qk_norm", False))

    def has_qkv_bias(self, config: Mapping[str, Any]) -> bool:
        """As `attention_bias` says; the output projection has none."""
        return bool(config.get("attention_bias", False))

    def rotary_percent(self, config: Mapping[str, Any], values: Mapping[str, Any]) -> float:
        """One half, unless the config says otherwise."""
        return float(values.get("partial_rotary_factor", config.get("partial_rotary_factor", 0.5)))

    def mixture(self, config: Mapping[str, Any]) -> Mixture:
        """See `shared_mixture`."""
        return shared_mixture(config)

    def mixture_values(self, config: Mapping[str, Any], shape: ModelShape) -> Mapping[str, Any]:
        """See `sigmoid_router`."""
        return {**super().mixture_values(config, shape), **sigmoid_router(config, shape)}


FAMILY = Glm4Moe()
