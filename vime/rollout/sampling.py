"""Sampling parameters as the engine takes them, and the seeds that make a run repeatable."""

from __future__ import annotations

import hashlib
from typing import Any

from vime.config.schema import SamplingSection
from vime.facts.engine import EXPERTS_KEY

_ATTEMPTS = 64
_SEED_LIMIT = 2**62


def sampling_params(section: SamplingSection, *, experts: bool = False) -> dict[str, Any]:
    """The engine's `sampling_params` for token-in, token-out requests that report the sampled tokens' log-probs, with
    `experts` also the experts of every token.

    `n`, `seed` and, for resumed samples, a smaller `max_tokens` are the request's own.
    """
    params: dict[str, Any] = {
        "temperature": section.temperature,
        "top_p": section.top_p,
        "top_k": section.top_k,
        "max_tokens": section.max_response_tokens,
        "logprobs": 0,
        "detokenize": False,
    }
    if section.stop_token_ids:
        params["stop_token_ids"] = list(section.stop_token_ids)
    if experts:
        params["extra_args"] = {EXPERTS_KEY: True}
    return params


def seed_for(run_seed: int, group: int, attempt: int = 0, *, group_size: int) -> int:
    """The seed of one request; its response j is sampled with this seed + j.

    Seeds of different (group, attempt) of a run are at least `group_size` apart, so that no two responses share a random
    stream. They count upwards from a number derived from `run_seed`, because host generators use only the low 32 bits:
    counting keeps these apart too, for 2^26 / (`group_size` rounded up to a power of two) groups. The 65th attempt uses
    the first one's seed again. The result is in [0, 2^62), inside the engine's range of signed 64-bit seeds.
    """
    if group < 0 or attempt < 0 or group_size < 1:
        raise ValueError(f"group {group}, attempt {attempt} and group_size {group_size} must not be negative, nor 0 responses")
    stride = 1 << (group_size - 1).bit_length()
    start = int.from_bytes(hashlib.sha256(f"vime sampling {run_seed}".encode()).digest()[:4], "big")
    slot = group * _ATTEMPTS + attempt % _ATTEMPTS
    return (start + slot * stride) % _SEED_LIMIT
