"""The cache of an engine that shares its device with a trainer, from what is left there."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vime.errors import PlanError
from vime.facts.memory import Tag
from vime.facts.model import ModelShape
from vime.facts.process import Parallel
from vime.planning.amounts import MAX_SEQUENCES, given, token_bytes
from vime.planning.memory import SERVING, Occupant, PoolSpace, is_there, room_for_cache
from vime.planning.needs import PlanNeeds
from vime.planning.units import in_units

STEP = 64 * 2**20
"""Sizes are rounded down to a multiple, so that a few bytes more or less do not show."""


@dataclass(frozen=True, slots=True)
class Cache:
    """Engine arguments, and the arithmetic."""

    args: Mapping[str, Any]
    how: str


def choose_cache(
    space: PoolSpace,
    occupants: Sequence[Occupant],
    shape: tuple[ModelShape, str, Parallel],
    needs: PlanNeeds,
    *,
    engines: int,
    useful: bool,
) -> Cache:
    """All that is left beside the others. `shape`: model, type and parallel sizes of an engine.

    Raises:
        PlanError: E251 where not one sequence of full length fits; with `useful`, where the sequences that an engine runs at
            once do not fit, so that they would wait for each other.
    """
    engine = next(o for o in occupants if o.role.kind == "rollout")
    left, how = room_for_cache(space, occupants, engine)
    left = left // STEP * STEP
    model, each = shape[0], token_bytes(*shape)
    longest, count = _longest(model, needs), _sequences(needs, engines) if useful else 1
    tokens = min(longest, 2 * needs.max_response_tokens) if useful and needs.max_prompt_tokens is None else longest
    needed = count * tokens * each
    if left < needed:
        what = f"{in_units(needed)} of cache for {count} x {tokens} tokens are not left: {how}"
        fix = "smaller trainer.max_tokens_per_micro_batch, shorter sequences, or set rollout.vllm.kv_cache_memory_bytes"
        raise PlanError(f"E251 pools.{space.name}: {what}", where=space.where, fix=fix)
    return Cache({"kv_cache_memory_bytes": left}, f"chosen by the plan: {how}")


def _longest(model: ModelShape, needs: PlanNeeds) -> int:
    """Tokens of the longest sequence that an engine accepts."""
    if needs.max_prompt_tokens is None:
        return model.max_positions
    return min(model.max_positions, needs.max_prompt_tokens + needs.max_response_tokens)


def _sequences(needs: PlanNeeds, engines: int) -> int:
    """How many sequences of a batch an engine runs at once."""
    bound = given(needs.vllm, "max_num_seqs")
    return min(-(-needs.batch_size * needs.group_size // engines), bound if isinstance(bound, int) else MAX_SEQUENCES)


def start_share(space: PoolSpace, engine: Occupant, args: Mapping[str, Any]) -> dict[str, Any]:
    """`gpu_memory_utilization` for a cache that is bounded in bytes; nothing where the user sets it or bounds no bytes.

    vLLM then takes its cache from the bytes alone, but refuses to start where less than this share of the device is free.
    """
    if given(args, "kv_cache_memory_bytes") is None or any(n.replace("-", "_") == "gpu_memory_utilization" for n in args):
        return {}
    tags = (a for a in engine.amounts if a.tag is Tag.KV or is_there(engine, a.tag, SERVING))
    taken = sum(a.num_bytes for a in tags)
    return {"gpu_memory_utilization": min(1.0, math.ceil(100 * taken / space.device_bytes) / 100)}
