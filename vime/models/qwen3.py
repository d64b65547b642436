"""Qwen3, dense: grouped-query attention with normalised queries and keys, gated MLP, rotary positions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vime.models.base import refuse
from vime.models.decoder import DENSE, PROJECTION, QK_NORM, QKV, Decoder, table


class Qwen3(Decoder):
    """The family's answers; see `vime.models.base.Family`."""

    name = "qwen3"
    architectures = ("Qwen3ForCausalLM",)
    table = table(QKV, *QK_NORM, PROJECTION, *DENSE)

    def has_qk_norm(self, config: Mapping[str, Any]) -> bool:
        """Always, in this family."""
        return True

    def check(self, config: Mapping[str, Any]) -> None:
        """See `Decoder.check`."""
        super().check(config)
        refuse(config, "attention_bias", False)
        refuse(config, "use_sliding_window", False)


FAMILY = Qwen3()
