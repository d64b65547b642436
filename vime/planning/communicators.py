"""Whether one communicator would hold more ranks of a fabric domain than the platform knows to work (W223)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from vime.facts.inventory import NodeInventory, domain_of
from vime.facts.process import RoleRequest
from vime.planning.plan import TrainerPlan, TransportPlan

COLLECTIVE = "collective"
"""The protocol whose group holds the trainer's first rank and every engine worker."""


def crowded_domains(
    trainers: Sequence[TrainerPlan], engines: Sequence[RoleRequest], transport: TransportPlan | None
) -> tuple[str, ...]:
    """W223 for the group of all ranks of each training role, and for that of a publication. `trainers` begin with the actor."""
    found: list[str] = []
    for trainer in trainers:
        found += _crowded(trainer, f"roles.{trainer.request.role}: the group of its ranks", _members(trainer.request))
    if transport is not None and transport.protocol == COLLECTIVE:
        actor = trainers[0]
        workers = (member for engine in engines for member in _members(engine))
        group = [*list(_members(actor.request))[:1], *workers]
        found += _crowded(actor, f"weights to {transport.edge.engine.role}: the group of rank 0 and the engines", group)
    return tuple(found)


def _members(request: RoleRequest) -> Iterator[NodeInventory]:
    """The node of every rank or worker."""
    return (request.inventories[slot.node] for slot in request.placement.slots)


def _crowded(trainer: TrainerPlan, what: str, members: Iterable[NodeInventory]) -> Iterator[str]:
    limit = trainer.collective.domain_ranks
    if limit is None:
        return
    counts = Counter(domain for node in members if (domain := domain_of(node)) is not None)
    for (name, clique), count in counts.items():
        if count > limit:
            yield (
                f"W223 {what} has {count} members in the fabric domain {name}/{clique}, of which {limit} are known to work; "
                "read `limit` of the role in `vime plan`, or use fewer devices of a domain"
            )
