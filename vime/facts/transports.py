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


_IN_A_NODE = (Relation.SAME_DEVICE, Relation.SAME_NODE)


class Hosts(StrEnum):
    """Which hosts an edge spans, for what passes memory of a host: a machine whose processes share their memory."""

    ONE = "one"
    """All ranks and all engines are on one."""
    EACH = "each"
    """They are on several; every engine is on one of them, beside a rank."""
    APART = "apart"
    """Some engine has no rank on its host, or is on several hosts itself."""


@dataclass(frozen=True, slots=True)
class Edge:
    """One weight flow. `num_bytes` is the size of a full set of weights.

    `engine` is the first engine's request. `relation` and `hosts` hold for all engines; roles that share devices are
    `SAME_DEVICE` also over several hosts. `hosts` None: one host where `relation` is inside a node, else apart.
    """

    trainer: RoleRequest
    engine: RoleRequest
    relation: Relation
    num_bytes: int
    hosts: Hosts | None = None

    @property
    def on_one_host(self) -> bool:
        """Everybody shares one host's memory: what a sender needs that puts everything into one file or socket."""
        return self.hosts is Hosts.ONE if self.hosts is not None else self.relation in _IN_A_NODE

    @property
    def rank_beside_engines(self) -> bool:
        """Every engine has a rank on its own host: what a sender needs that sends from every rank."""
        return self.hosts is not Hosts.APART if self.hosts is not None else self.relation in _IN_A_NODE


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
