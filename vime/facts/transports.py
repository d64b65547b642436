"""Weight transfer: an edge, and the half offers that two platforms make for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from vime.facts.process import Factory, RoleRequest


class Side(StrEnum):
    """Which end of an edge."""

    TRAINER = "trainer"
    ENGINE = "engine"


class Relation(StrEnum):
    """How near the two ends are, at their farthest pair of ranks."""

    SAME_DEVICE = "same_device"
    SAME_NODE = "same_node"
    SAME_DOMAIN = "same_domain"
    NETWORK = "network"


@dataclass(frozen=True, slots=True)
class Edge:
    """One weight flow. `num_bytes` is the size of a full set of weights."""

    trainer: RoleRequest
    engine: RoleRequest
    relation: Relation
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Precondition:
    """A fact that must hold. `holds` is decided by the hook; `reason` is what a rejection prints."""

    holds: bool
    reason: str


@dataclass(frozen=True, slots=True)
class TransferCost:
    """Seconds = fixed_s + chunks * per_chunk_s + bytes / bytes_per_s. None is unknown."""

    bytes_per_s: float | None
    fixed_s: float = 0.0
    per_chunk_s: float = 0.0
    provenance: str = "unknown"


@dataclass(frozen=True, slots=True)
class TransportOffer:
    """Half of a transport: the core pairs equal `protocol` ids of the two sides.

    The trainer's factory builds a `vime.weights.transports.base.TrainerHalf`, the engine's a
    `vime.weights.transports.base.EngineHalf` (in the engine's worker process).
    """

    protocol: str
    side: Side
    factory: Factory
    cost: TransferCost
    preconditions: tuple[Precondition, ...] = ()
    options: Mapping[str, object] = field(default_factory=dict)
