"""Core attention for packed sequences on torch's scaled dot-product attention."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from vime.errors import TrainerError


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring segments of one length: `tokens` rows of the pack, a multiple of `length`."""

    length: int
    tokens: int


def plan_runs(cu_seqlens: Tensor) -> tuple[Run, ...]:
    """Cut a pack into runs of equal lengths. cu_seqlens [segments + 1]: running sum of lengths, from 0.

    Packs are made with equal lengths next to each other, so there are about as many runs as lengths. Any order is right.
    """
    lengths = (end - start for start, end in pairwise(cu_seqlens.tolist()))
    return tuple(Run(length, length * len(list(same))) for length, same in groupby(lengths) if length > 0)


class HostCoreAttention(torch.nn.Module):
    """Causal attention with grouped queries over packed segments (THD); stands in for megatron-core's own.

    Neighbouring segments of equal length go through one kernel call, which gives the same bits as a call for each. The
    runs of a pack are kept on its `packed_seq_params`, so that all layers share them. Where ranks share sequences
    (`packed_seq_params.context`), keys and values are gathered first. Takes the arguments of megatron-core's
    `DotProductAttention`; dropout is not supported.
    """

    shares_prompts = True
    """Packs may hold one copy of a prompt for several responses (`packed_seq_params.shared_prompts`)."""
    splits_sequences = True
    """Ranks may share sequences (`packed_seq_params.context`)."""

    def __init__(self, config: Any, layer_number: int, *_args: Any, softmax_scale: float | None = None, **_kwargs: Any) -> None:
        super().__init__()
        self._scale = softmax_scale if softmax_scale is not None else 1.0 / math.sqrt(config.kv_channels)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *_args: Any, packed_seq_params: Any = None, **_kwargs: Any
    ) -> Tensor:
        """query [tokens, heads, dim], key and value [tokens, groups, dim] -> [tokens, heads * dim]."""
        if packed_seq_params is None:
            raise TrainerError("packed attention needs packed sequences", fix="pass packed_seq_params")
        context = getattr(packed_seq_params, "context", None)
        if context is not None:
            return self._attend_chunks(context, query, *context.gathered(key, value))
        shared = getattr(packed_seq_params, "shared_prompts", None)
        if shared is not None:
            return self._attend_shared(shared, query, key, value)
        runs: tuple[Run, ...] | None = getattr(packed_seq_params, "runs", None)
        if runs is None:
            runs = packed_seq_params.runs = plan_runs(packed_seq_params.cu_seqlens_q)
        sizes = [run.tokens for run in runs]
        parts = zip(runs, query.split(sizes), key.split(sizes), value.split(sizes), strict=True)
        outputs = [self._attend(run, q, k, v) for run, q, k, v in parts]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _attend_chunks(self, context: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Each chunk of this rank to its segment up to the chunk's end; see `trainer.megatron.context`."""
        parts = zip(
            query.split(context.query_lengths), key.split(context.key_lengths), value.split(context.key_lengths), strict=True
        )
        outputs = []
        for q, k, v in parts:
            seen = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
            q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
            out = functional.scaled_dot_product_attention(
                q, k, v, attn_mask=seen, scale=self._scale, enable_gqa=q.shape[1] != k.shape[1]
            )
            outputs.append(out[0].transpose(0, 1).flatten(1))
        return torch.cat(outputs)

    def _attend_shared(self, shared: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Prompts attend to themselves, responses to their prompt and themselves; see `trainer.megatron.shared_prompts`."""
        outputs, start = [], 0
        for run in shared.prompts:
            rows = slice(start, start + run.tokens)
            start += run.tokens
            outputs.append(self._attend(run, query[rows], key[rows], value[rows]))
        for run in shared.responses:
            rows = slice(run.start, run.start + run.count * run.length)
            outputs.append(self._attend_response(run, query[rows], (key, key[rows]), (value, value[rows])))
        if shared.padding:
            rows = slice(len(query) - shared.padding, len(query))
            outputs.append(self._attend(Run(shared.padding, shared.padding), query[rows], key[rows], value[rows]))
        return torch.cat(outputs)

    def _attend_response(self, run: Any, query: Tensor, key: tuple[Tensor, Tensor], value: tuple[Tensor, Tensor]) -> Tensor:
        """query [count * length, heads, dim]; key and value as (all rows, own rows)."""

        def whole(all_rows: Tensor, own: Tensor) -> Tensor:
            shape = all_rows.shape[1:]
            prompt = all_rows.index_select(0, run.prompt_rows).view(run.count, run.prompt_length, *shape)
            return torch.cat((prompt, own.view(run.count, run.length, *shape)), dim=1).transpose(1, 2)

        q = query.reshape(run.count, run.length, *query.shape[1:]).transpose(1, 2)
        k, v = whole(*key), whole(*value)
        seen = torch.ones(run.length, run.prompt_length + run.length, dtype=torch.bool).tril(run.prompt_length)
        out = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=seen, scale=self._scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        return out.transpose(1, 2).reshape(query.shape[0], -1)

    def _attend(self, run: Run, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        q, k, v = (x.reshape(-1, run.length, x.shape[1], x.shape[2]).transpose(1, 2) for x in (query, key, value))
        out = functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=self._scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        return out.transpose(1, 2).reshape(run.tokens, -1)
