"""Process groups: what a group is for and which backend carries it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """`purpose` is `trainer` or `weight_sync`; `world` counts all ranks."""

    purpose: str
    world: int


@dataclass(frozen=True, slots=True)
class CollectiveSpec:
    """`backend` is torch's string (`gloo`, or `cpu:gloo,device:other`). `object_backend` carries Python objects.

    `options` are keywords for the backend; `limits` are known faults, as `condition -> what happens`. `domain_ranks`: how many
    ranks of one fabric domain a communicator may hold, None where no bound is known.
    """

    backend: str
    timeout_s: float
    reduce_ops: tuple[str, ...]
    object_backend: str = "gloo"
    options: Mapping[str, object] = field(default_factory=dict)
    limits: Mapping[str, str] = field(default_factory=dict)
    domain_ranks: int | None = None
