"""Expert ids of a sample: the engine's rows, aligned with tokens by absolute position.

An array of ids has the shape [rows, MoE layers, top_k]. Row p belongs to the token at position p, as input: it says where
each layer sent that token. The last sampled token was never an input of the engine, so n tokens have n - 1 rows.
"""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from vime.errors import RolloutError, TrainerError
from vime.facts.model import ModelShape

Ids: TypeAlias = NDArray[np.integer[Any]]

_WHERE = "routed_experts"


@dataclass(frozen=True, slots=True)
class Routing:
    """Where a model's tokens may go: `top_k` of `experts` in each of `moe_layers`, which are counted from 0."""

    moe_layers: tuple[int, ...]
    experts: int
    top_k: int

    @classmethod
    def of(cls, model: ModelShape) -> Routing:
        layers = range(model.dense_layers, model.layers) if model.experts else ()
        return cls(tuple(layers), model.experts, model.experts_per_token)

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's ids."""
        return len(self.moe_layers) * self.top_k * _dtype(self.experts).itemsize

    def align(self, ids: Ids, *, tokens: int) -> Ids:
        """An engine's rows as a sample carries them, see `align_ids`. Raises RolloutError for rows of something else."""
        if ids.shape[2] != self.top_k:
            raise RolloutError(f"{ids.shape[2]} experts for each token, but the model chooses {self.top_k}", where=_WHERE)
        try:
            return align_ids(ids, tokens=tokens, moe_layers=self.moe_layers, experts=self.experts)
        except TrainerError as error:
            raise RolloutError(error.what, where=_WHERE, fix=error.fix) from error


def decode_ids(text: str) -> Ids:
    """An engine's answer (base64 of an npy file) as [rows, layers, top_k]. Raises RolloutError for anything else."""
    try:
        found = np.load(io.BytesIO(base64.b64decode(text, validate=True)), allow_pickle=False)
    except (binascii.Error, ValueError, EOFError, OSError) as error:
        raise RolloutError(f"not an array of expert ids: {error}", where=_WHERE) from error
    if found.ndim != 3 or found.dtype.kind not in "iu":
        raise RolloutError(f"expert ids of shape {found.shape} and type {found.dtype}", where=_WHERE)
    return found


def cyclic_ids(count: int, *, layers: int, top_k: int, experts: int, start: int = 0) -> Ids:
    """Ids [count, layers, top_k] for rows without a token: distinct in each row, and spread evenly over the experts."""
    if not 0 < top_k <= experts:
        raise TrainerError(f"{top_k} of {experts} experts for each token", where=_WHERE)
    first = (np.arange(start, start + count) * top_k)[:, None] + np.arange(top_k)
    return np.repeat((first % experts).astype(_dtype(experts))[:, None, :], layers, axis=1)


def _dtype(experts: int) -> np.dtype[np.unsignedinteger[Any]]:
    """The smallest type of an expert's number."""
    return np.dtype(np.uint8 if experts <= 256 else np.uint16)


def check_ids(ids: Ids, *, experts: int) -> None:
    """Raise TrainerError where an id is no expert, or a row names one twice (its weight would be lost without a word)."""
    if ids.size and (int(ids.min()) < 0 or int(ids.max()) >= experts):
        raise TrainerError(f"expert ids from {int(ids.min())} to {int(ids.max())}, but {experts} experts", where=_WHERE)
    ordered = np.sort(ids, axis=-1)
    if (ordered[..., 1:] == ordered[..., :-1]).any():
        raise TrainerError(
            "a token is routed to one expert twice", where=_WHERE, fix="rows of layers without experts must be left out"
        )


def align_ids(ids: Ids, *, tokens: int, moe_layers: Sequence[int], experts: int) -> Ids:
    """Ids [tokens, MoE layers, top_k] of a sample of `tokens` tokens, from the engine's rows [tokens - 1, all layers, top_k].

    `moe_layers` are the layers with experts, counted from 0; the engine leaves zeros in the others. The last token's row,
    which nobody predicts from, is a cyclic one. The result has the smallest type that holds an id. Raises TrainerError for
    another number of rows or for ids that cannot be.
    """
    if len(ids) != tokens - 1:
        raise TrainerError(f"{len(ids)} rows of expert ids for {tokens} tokens, not {tokens - 1}", where=_WHERE)
    if moe_layers and max(moe_layers) >= ids.shape[1]:
        raise TrainerError(f"expert ids of {ids.shape[1]} layers, but layer {max(moe_layers)} has experts", where=_WHERE)
    kept = ids[:, list(moe_layers)]
    check_ids(kept, experts=experts)
    last = cyclic_ids(1, layers=len(moe_layers), top_k=ids.shape[2], experts=experts, start=tokens - 1)
    return np.concatenate([kept.astype(last.dtype, copy=False), last])


def continue_ids(earlier: Ids | None, later: Ids, *, start: int = 0) -> Ids:
    """Rows of a sample whose later part came with another answer, `later` beginning at position `start`.

    Where both have a row, `earlier` keeps it: its token was sampled under those experts. `later` has the row of the token
    that ended `earlier`. Raises TrainerError when rows between them are missing.
    """
    known = 0 if earlier is None else len(earlier)
    if start > known:
        raise TrainerError(f"expert ids end at position {known} and go on at {start}", where=_WHERE)
    if earlier is None:
        return later
    return np.concatenate([earlier, later[known - start :]])
