"""The half offers of weight transports: what this side can do, at what cost, and what must hold.

The code of `acme_link` is in `link`. An A1 holds CPU tensors, so the core's halves over a host's memory serve as they are:
they are also the way between an A1 and another platform of the same machine.
"""

from __future__ import annotations

from collections.abc import Mapping

from vime.facts.process import Factory
from vime.facts.transports import Edge, Precondition, Side, TransferCost, TransportOffer

PROTOCOL = "acme_link"

_HALVES: Mapping[str, Mapping[Side, Factory]] = {
    PROTOCOL: {
        Side.TRAINER: Factory("acme_accelerator.link:LinkTrainer"),
        Side.ENGINE: Factory("acme_accelerator.link:LinkEngine"),
    },
    "host_shm": {
        Side.TRAINER: Factory("vime.weights.transports.host_shm:HostShmTrainer"),
        Side.ENGINE: Factory("vime.weights.transports.host_shm:HostShmEngine"),
    },
}
_COSTS = {
    # 64 MiB of float32 weights to one receiver between two processes of a two-core x86-64 machine, rounded down.
    PROTOCOL: TransferCost(bytes_per_s=1.0e9, fixed_s=0.010, provenance="measured"),
    "host_shm": TransferCost(bytes_per_s=None),
}


def offers(edge: Edge, side: Side) -> tuple[TransportOffer, ...]:
    """Offered even where it cannot work, with the reason, so that the plan can print it. `disk` comes from `base`."""
    # An engine of unpacked weights copies straight into its parameters.
    options = {"in_place": True} if side is Side.ENGINE else {}
    return tuple(
        TransportOffer(protocol, side, halves[side], _COSTS[protocol], preconditions=_needs(protocol, edge), options=options)
        for protocol, halves in _HALVES.items()
    )


def _needs(protocol: str, edge: Edge) -> tuple[Precondition, ...]:
    if protocol != PROTOCOL:
        return (Precondition(edge.on_one_host, "trainer and engine must run on one node to share its memory"),)
    ours = {request.inventories[0].platform for request in (edge.trainer, edge.engine)}
    return (
        Precondition(edge.on_one_host, "a link is a socket of one node; trainer and engine are on several"),
        Precondition(ours == {"acme"}, f"both ends of a link must be acme devices, here they are {', '.join(sorted(ours))}"),
    )
