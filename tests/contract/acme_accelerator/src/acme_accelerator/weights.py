"""The half offers of weight transports: what this side can do, at what cost, and what must hold. The code is in `link`."""

from __future__ import annotations

from vime.facts.process import Factory
from vime.facts.transports import Edge, Precondition, Relation, Side, TransferCost, TransportOffer

PROTOCOL = "acme_link"

_HALVES = {
    Side.TRAINER: Factory("acme_accelerator.link:LinkTrainer"),
    Side.ENGINE: Factory("acme_accelerator.link:LinkEngine"),
}
_COST = TransferCost(bytes_per_s=1.0e9, fixed_s=0.010, provenance="measured")
"""64 MiB of float32 weights to one receiver between two processes of a two-core x86-64 machine, rounded down."""


def offers(edge: Edge, side: Side) -> tuple[TransportOffer, ...]:
    """Offered even where it cannot work, with the reason, so that the plan can print it. `disk` comes from `base`."""
    near = edge.relation in (Relation.SAME_DEVICE, Relation.SAME_NODE)
    ours = {request.inventories[0].platform for request in (edge.trainer, edge.engine)}
    preconditions = (
        Precondition(near, "a link is a socket of one node; trainer and engine are on several"),
        Precondition(ours == {"acme"}, f"both ends of a link must be acme devices, here they are {', '.join(sorted(ours))}"),
    )
    # An engine of unpacked weights copies straight into its parameters.
    options = {"in_place": True} if side is Side.ENGINE else {}
    return (TransportOffer(PROTOCOL, side, _HALVES[side], _COST, preconditions=preconditions, options=options),)
