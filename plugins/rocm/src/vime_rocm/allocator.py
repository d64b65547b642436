"""torch's allocator settings, which three variables can hold on HIP."""

from __future__ import annotations

from collections.abc import Mapping

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""In the order in which vLLM looks for them; torch reads the first that is set."""

SEGMENTS = "expandable_segments"


def growing(env: Mapping[str, str]) -> tuple[str, ...]:
    """The variables that turn expandable segments on."""
    return tuple(name for name in VARIABLES if _options(env.get(name, "")).get(SEGMENTS, "").lower() == "true")


def _options(text: str) -> dict[str, str]:
    pairs = (part.partition(":") for part in text.split(","))
    return {name.strip(): value.strip() for name, _, value in pairs}
