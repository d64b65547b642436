"""Qwen2 and Qwen2.5, dense: grouped-query attention whose queries, keys and values have a bias."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vime.models.base import refuse, require
from vime.models.decoder import DENSE, PROJECTION, QKV, QKV_BIAS, Decoder, table


class Qwen2(Decoder):
    """The family's answers; see `vime.models.base.Family`."""

    name = "qwen2"
    architectures = ("Qwen2ForCausalLM",)
    table = table(QKV, QKV_BIAS, PROJECTION, *DENSE)

    def has_qkv_bias(self, config: Mapping[str, Any]) -> bool:
        """Always, in this family."""
        return True

    def check(self, config: Mapping[str, Any]) -> None:
        """See `Decoder.check`."""
        super().check(config)
        refuse(config, "use_sliding_window", False)
        # vLLM does not look at head_dim in this family.
        refuse(config, "head_dim", require(config, "hidden_size") // require(config, "num_attention_heads"))


FAMILY = Qwen2()
