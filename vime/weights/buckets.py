"""Cutting a manifest into buckets that travel as one flat message each. Pure and torch-free: both halves compute it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from vime.weights.fused import fused_key
from vime.weights.transports.base import TensorSpec


@dataclass(frozen=True, slots=True)
class Bucket:
    """Neighbours in the manifest. `start` and `end` are bytes of the flat segment; a tensor lies at its own offset."""

    tensors: tuple[TensorSpec, ...]
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.start


def plan_buckets(tensors: Sequence[TensorSpec], bucket_bytes: int) -> tuple[Bucket, ...]:
    """Cut at `bucket_bytes`, never inside a fused group: a group larger than the limit makes a larger bucket.

    Every tensor is in exactly one bucket, in manifest order. No tensors give no buckets. Raises ValueError for a limit
    below 1.
    """
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes must be at least 1, got {bucket_bytes}")
    buckets: list[Bucket] = []
    current: list[TensorSpec] = []
    for _, members in groupby(tensors, key=lambda t: fused_key(t.name)):
        group = list(members)
        if current and _end(group) - current[0].offset > bucket_bytes:
            buckets.append(_bucket(current))
            current = []
        current += group
    if current:
        buckets.append(_bucket(current))
    return tuple(buckets)


def _end(tensors: Sequence[TensorSpec]) -> int:
    return tensors[-1].offset + tensors[-1].nbytes


def _bucket(tensors: Sequence[TensorSpec]) -> Bucket:
    return Bucket(tensors=tuple(tensors), start=tensors[0].offset, end=_end(tensors))
