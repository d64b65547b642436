"""What a tray changes in cuda's transports: their rates, above all where the two ends are on different trays of one rack."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from vime.facts.transports import Edge, Relation, TransferCost, TransportOffer
from vime_gb200 import perf

SHARE_OF_RATE = 0.8
"""Many tensors of 20 MiB travel at this share of the rate of one of 1 GiB: NCCL broadcast between two H200, measured."""

FABRIC_BYTES_PER_S = SHARE_OF_RATE * perf.SCALE_UP_BYTES_PER_S
_START_S = 0.01

_OVER_FABRIC = {
    "collective": (Relation.SAME_NODE, Relation.SAME_DOMAIN),
    "device_ipc": (Relation.SAME_NODE,),
}
"""Where a transport's bytes take NVLink. Over a network the rate stays unknown."""


def amend(layers: Sequence[tuple[TransportOffer, ...]], edge: Edge) -> list[tuple[TransportOffer, ...]]:
    """The lineage's offers, leaf first, at this fabric's rate; who offers what and under which conditions stays."""
    return [tuple(_amended(offer, edge.relation) for offer in layer) for layer in layers]


def _amended(offer: TransportOffer, relation: Relation) -> TransportOffer:
    if relation not in _OVER_FABRIC.get(offer.protocol, ()):
        return offer
    fixed = max(offer.cost.fixed_s, _START_S)
    return replace(offer, cost=TransferCost(FABRIC_BYTES_PER_S, fixed, offer.cost.per_chunk_s, provenance="derived"))
