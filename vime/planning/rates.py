"""Rates that the user measured (`pools.X.rates`), over those that a platform knows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from vime.errors import PlanError
from vime.facts.perf import UNITS, PerfTable, Provenance, Quantity
from vime.facts.transports import TransportOffer
from vime.planning.plan import TransportPlan
from vime.topology.load import LoadedTopology


def with_yours(table: PerfTable, rates: Mapping[str, float]) -> PerfTable:
    """A platform's table with the user's numbers. What is no rate of a plan is one of a transport, in bytes/s."""
    yours = {
        name: Quantity(value, UNITS.get(name, "bytes/s"), Provenance.YOURS, "rates of the pool")
        for name, value in rates.items()
    }
    return PerfTable({**table.quantities, **yours})


def at_rates(offers: Sequence[TransportOffer], table: PerfTable) -> tuple[TransportOffer, ...]:
    """Offers at the user's rates, where he names their transports."""
    found = []
    for offer in offers:
        rate = table.get(offer.protocol)
        if rate.value is not None:
            offer = replace(offer, cost=replace(offer.cost, bytes_per_s=rate.value, provenance=str(rate.provenance)))
        found.append(offer)
    return tuple(found)


def check_yours(loaded: LoadedTopology, transport: TransportPlan | None) -> None:
    """Raise PlanError E104 for a name that is neither a rate of a plan nor a transport that a side offers.

    A run that publishes no weights asks nobody for transports, so that no name can be told from one.
    """
    if transport is None:
        return
    known = {*UNITS, transport.protocol, *(one.protocol for one in transport.rejected)}
    for pool, section in loaded.topology.pools.items():
        for name in section.rates:
            if name not in known:
                raise PlanError(
                    f"E104 pools.{pool}.rates: no rate and no transport is called {name!r}",
                    where=loaded.where("pools", pool, "rates", name),
                    fix=f"use one of {', '.join(sorted(known))}",
                )
