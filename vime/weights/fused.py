"""Which Hugging Face tensors an engine keeps in one fused parameter."""

from __future__ import annotations

import re

_FUSED = (
    (re.compile(r"^(.*)\.(?:q_proj|k_proj|v_proj)\.([^.]+)$"), "qkv_proj"),
    (re.compile(r"^(.*)\.(?:gate_proj|up_proj)\.([^.]+)$"), "gate_up_proj"),
)


def fused_key(name: str) -> str:
    """The fused parameter that a tensor goes into, or its own name where it stands alone.

    Experts are fused one by one: `experts.3.gate_proj` with `experts.3.up_proj`.
    """
    for pattern, fused in _FUSED:
        if match := pattern.match(name):
            return f"{match[1]}.{fused}.{match[2]}"
    return name
