"""Llama 3, 3.1 and 3.2, dense: grouped-query attention without biases and norms, and a rotary scaling of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vime.models.base import refuse
from vime.models.decoder import DENSE, PROJECTION, QKV, Decoder, table


class Llama(Decoder):
    """The family's answers; see `vime.models.base.Family`."""

    name = "llama"
    architectures = ("LlamaForCausalLM",)
    table = table(QKV, PROJECTION, *DENSE)
    rotary_kinds = ("default", "llama3")

    def check(self, config: Mapping[str, Any]) -> None:
        """See `Decoder.check`."""
        super().check(config)
        refuse(config, "attention_bias", False)
        refuse(config, "pretraining_tp", 1)


FAMILY = Llama()
