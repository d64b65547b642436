"""Computes the prompt of sibling requests once per step. Runs inside vLLM's engine core on a host.

The siblings of a group enter the engine together with the same prompt, and vLLM's prefix cache shares whole blocks only
(32 tokens or more on a host), so a short prompt, or the rest of a long one, is computed once for every sibling. Where
requests of a step continue the same cached blocks with the same tokens, all their rows are equal in every layer: the model
therefore runs on one row of each set, and rows are spread out again where attention writes every request's own cache, and
at the end. Bits do not change, because a row's result does not depend on the other rows of its batch (see
`vllm_plugin.keep_linear_weights`).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

MIN_SAVED_ROWS = 8


@dataclass(frozen=True)
class SharedRows:
    """`keep[u]` is the full row that computed row u stands for; `spread[r]` is the computed row that full row r takes."""

    keep: Any
    spread: Any


_active: SharedRows | None = None


def share_rows(token_ids: Any, positions: Any, starts: Any, blocks: Any, block_size: int) -> tuple[list[int], list[int]] | None:
    """Find requests of one step that continue the same cached blocks (or nothing) with the same tokens.

    Args:
        token_ids: [num_tokens] numpy array, the step's requests one after another.
        positions: [num_tokens] numpy array.
        starts: [num_requests + 1] numpy array of the requests' first rows.
        blocks: [num_requests, max_blocks] numpy array: the cache blocks of each request.
        block_size: tokens in a block.

    Returns:
        (keep, spread) as described in `SharedRows`, or None when fewer than `MIN_SAVED_ROWS` rows would be saved.
    """
    keep: list[int] = []
    spread: list[int] = []
    first: dict[tuple[bytes, bytes], int] = {}
    bounds, computed = starts.tolist(), positions[starts[:-1]].tolist()
    for request, (start, end) in enumerate(itertools.pairwise(bounds)):
        known = len(keep)
        if computed[request] % block_size == 0:
            context = blocks[request, : computed[request] // block_size].tobytes()
            known = first.setdefault((context, token_ids[start:end].tobytes()), known)
        if known == len(keep):
            keep.extend(range(start, end))
        spread.extend(range(known, known + end - start))
    return (keep, spread) if len(spread) - len(keep) >= MIN_SAVED_ROWS else None


def make_model_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the runner's `_model_forward`: shrink the rows, run the model, spread the hidden states."""
    import torch

    @functools.wraps(original)
    def _model_forward(self: Any, *args: Any, **named: Any) -> Any:
        global _active
        token_ids: Any = named.get("input_ids")
        positions: Any = named.get("positions")
        if args or token_ids is None or not _suitable(self, token_ids, positions, named):
            return original(self, *args, **named)
        starts = self.query_start_loc.np[: self.input_batch.num_reqs + 1]
        if starts[-1] != token_ids.shape[0]:
            return original(self, **named)
        table = self.input_batch.block_table[0]
        rows = share_rows(
            token_ids.numpy(), positions.numpy(), starts, table.get_numpy_array(), self.vllm_config.cache_config.block_size
        )
        if rows is None:
            return original(self, **named)
        shared = SharedRows(torch.tensor(rows[0]), torch.tensor(rows[1]))
        _active = shared
        try:
            hidden = original(self, **{**named, "input_ids": token_ids[shared.keep], "positions": positions[shared.keep]})
        finally:
            _active = None
        return hidden.index_select(0, shared.spread)

    return _model_forward


def make_attention_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the attention layer: every request sees its own rows, the layers around it the computed ones."""
    import torch

    @functools.wraps(original)
    def forward(self: Any, query: Any, key: Any, value: Any, output_shape: Any = None, output_dtype: Any = None) -> Any:
        if _active is None:
            return original(self, query, key, value, output_shape, output_dtype)
        spread = _active.spread
        query, key, value = (None if t is None else t.index_select(0, spread) for t in (query, key, value))
        if output_shape is not None:
            output_shape = torch.Size((spread.shape[0], *output_shape[1:]))
        return original(self, query, key, value, output_shape, output_dtype).index_select(0, _active.keep)

    return forward


def _suitable(runner: Any, token_ids: Any, positions: Any, named: dict[str, Any]) -> bool:
    """Plain decoder steps only: no embeddings given, no adapters, no pipeline or data parallelism, no expert capture."""
    config = runner.vllm_config
    return (
        named.get("inputs_embeds") is None
        and named.get("intermediate_tensors") is None
        and getattr(positions, "dim", lambda: 0)() == 1
        and positions.shape == token_ids.shape
        and config.lora_config is None
        and config.speculative_config is None
        and config.parallel_config.data_parallel_size == 1
        and config.parallel_config.pipeline_parallel_size == 1
        and not config.aux_output_config.enable_return_routed_experts
        and not runner.model_config.is_encoder_decoder
        and len(runner.input_batch.block_table.block_tables) == 1
        and _attention_only(runner)
    )


@functools.lru_cache(maxsize=1)
def _attention_only(runner: Any) -> bool:
    """Every layer that keeps a cache is plain decoder attention (no recurrent state, no latent attention)."""
    from vllm.model_executor.layers.attention.attention import Attention

    layers = runner.compilation_config.static_forward_context.values()
    return bool(layers) and all(type(layer) is Attention and layer.attn_type == "decoder" for layer in layers)
