"""The host's halves of weight transports. Rates were measured on two x86-64 cores with a model of 0.4 GB in float32."""

from __future__ import annotations

from vime.facts.process import Factory
from vime.facts.transports import Edge, Precondition, Side, TransferCost, TransportOffer

_MEASURED = "measured"

_HALVES: dict[str, dict[Side, Factory]] = {
    "host_shm": {
        Side.TRAINER: Factory("vime.weights.transports.host_shm:HostShmTrainer"),
        Side.ENGINE: Factory("vime.weights.transports.host_shm:HostShmEngine"),
    },
    "collective": {
        Side.TRAINER: Factory("vime.weights.transports.collective:CollectiveTrainer"),
        Side.ENGINE: Factory("vime.weights.transports.collective:CollectiveEngine"),
    },
    "disk": {
        Side.TRAINER: Factory("vime.weights.transports.disk:DiskTrainer"),
        Side.ENGINE: Factory("vime.weights.transports.disk:DiskEngine"),
    },
}

COSTS = {
    "host_shm": TransferCost(bytes_per_s=5.0e9, fixed_s=0.010, provenance=_MEASURED),
    "collective": TransferCost(bytes_per_s=7.0e8, fixed_s=0.012, provenance=_MEASURED),
    "disk": TransferCost(bytes_per_s=2.0e8, fixed_s=0.015, provenance=_MEASURED),
}

# Without packed weights the live tensors have the checkpoint's layout, so an engine copies straight into them.
_OPTIONS: dict[Side, dict[str, object]] = {Side.TRAINER: {}, Side.ENGINE: {"in_place": True}}


def offers(edge: Edge, side: Side) -> tuple[TransportOffer, ...]:
    """This side's half of every transport, with what it needs of the edge."""
    return tuple(
        TransportOffer(
            protocol,
            side,
            halves[side],
            COSTS[protocol],
            preconditions=_preconditions(protocol, edge, side),
            options=_OPTIONS[side],
        )
        for protocol, halves in _HALVES.items()
    )


def _preconditions(protocol: str, edge: Edge, side: Side) -> tuple[Precondition, ...]:
    if protocol == "host_shm":
        return (Precondition(edge.on_one_host, "trainer and engine must run on one node to share its memory"),)
    if protocol == "collective":
        # The trainer's library is the group's, so a trainer here needs an engine that speaks it.
        asked = {"engine": edge.engine} if side is Side.ENGINE else {"trainer": edge.trainer, "engine": edge.engine}
        able = {name: request.capabilities.collectives for name, request in asked.items()}
        return tuple(
            Precondition("gloo" in spoken, f"the {name} side must speak gloo; it has {spoken or 'none'}")
            for name, spoken in able.items()
        )
    return ()
