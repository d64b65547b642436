"""Seconds of an update and of a switch, with where the rate comes from. What is unknown stays unknown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vime.facts.inventory import NodeInventory
from vime.facts.perf import PerfTable, Provenance
from vime.facts.transports import TransferCost
from vime.planning.units import decimal

_UNKNOWN = "unknown"
_TRUST = ("measured", "derived", "spec", "nominal", "assumed", "yours", _UNKNOWN)


@dataclass(frozen=True, slots=True)
class Estimate:
    """`seconds` None is unknown. `provenance` is that of the least certain number in it; `how` is the arithmetic."""

    seconds: float | None
    provenance: str
    how: str


def least_certain(provenances: Sequence[str]) -> str:
    """The weakest of several sources; an unheard-of one counts as unknown."""
    return max((p if p in _TRUST else _UNKNOWN for p in provenances), key=_TRUST.index, default=_UNKNOWN)


NOT_COUNTED = Estimate(0.0, "measured", "")
"""Adds nothing to another estimate."""


def loading(num_bytes: int, perf: PerfTable, *, in_place: bool) -> Estimate:
    """What an engine takes to put a full set of weights into its model, beside the transport: fixed + bytes / rate.

    Weights that are written into live parameters are loaded as they arrive, so that only the fixed part counts.
    `NOT_COUNTED` where the platform has no rate for it.
    """
    rate, fixed = perf.get("engine_load"), perf.get("engine_update")
    if in_place and fixed.value:
        return Estimate(fixed.value, str(fixed.provenance), f"the engine's own {fixed.value:g} s")
    if in_place or not rate.value:
        return NOT_COUNTED
    start = fixed.value or 0.0
    told = [str(quantity.provenance) for quantity in (rate, fixed) if quantity.value]
    how = f"the engine's own {start:g} s + {decimal(num_bytes, 'B')} / {decimal(rate.value, 'B/s')}"
    return Estimate(start + num_bytes / rate.value, least_certain(told), how)


def gathering(num_bytes: int, perf: PerfTable) -> Estimate:
    """What a trainer rank needs to receive the `num_bytes` of the weights that other ranks hold: bytes / rate.

    `NOT_COUNTED` where the platform has no rate for it.
    """
    rate = perf.get("gather")
    if num_bytes == 0 or not rate.value:
        return NOT_COUNTED
    how = f"{decimal(num_bytes, 'B')} of other ranks / {decimal(rate.value, 'B/s')}"
    return Estimate(num_bytes / rate.value, str(rate.provenance), how)


def together(*estimates: Estimate) -> Estimate:
    """The sum of estimates that are known, `NOT_COUNTED` ones left out."""
    counted = [one for one in estimates if one != NOT_COUNTED]
    if not counted:
        return NOT_COUNTED
    seconds = sum(one.seconds or 0.0 for one in counted)
    return Estimate(seconds, least_certain([one.provenance for one in counted]), " + ".join(one.how for one in counted))


def transfer(
    trainer: TransferCost, engine: TransferCost, *, num_bytes: int, buffer_bytes: int, load: Estimate = NOT_COUNTED
) -> Estimate:
    """fixed + chunks x per chunk + bytes / rate, with the slower half's number for each term, and `load`: what comes with any
    transport.
    """
    chunks = max(1, -(-num_bytes // buffer_bytes))
    fixed = max(trainer.fixed_s, engine.fixed_s)
    per_chunk = max(trainer.per_chunk_s, engine.per_chunk_s)
    provenance = least_certain((trainer.provenance, engine.provenance, load.provenance))
    if not trainer.bytes_per_s or not engine.bytes_per_s:
        side = "trainer" if not trainer.bytes_per_s else "engine"
        return Estimate(None, _UNKNOWN, f"the {side} side's rate is unknown")
    rate = min(trainer.bytes_per_s, engine.bytes_per_s)
    how = f"{fixed:g} s + {chunks} x {per_chunk:g} s + {decimal(num_bytes, 'B')} / {decimal(rate, 'B/s')}"
    seconds = fixed + chunks * per_chunk + num_bytes / rate + (load.seconds or 0.0)
    return Estimate(seconds, provenance, f"{how} + {load.how}" if load.how else how)


def switch(num_bytes: int, perf: PerfTable, node: NodeInventory) -> Estimate:
    """Moving a device's bytes to or from the host, while the other devices of its memory node do the same.

    Every device has a link of its own; where the platform names the rate of a memory node, its devices share that. Parking
    is slower than the link where the platform has measured it (`parking`).
    """
    link, memory = perf.get("parking"), perf.get("host_memory")
    link = link if link.value else perf.get("host_link")
    if num_bytes == 0:
        return Estimate(0.0, str(Provenance.DERIVED), "nothing moves")
    if not link.value:
        return Estimate(None, _UNKNOWN, "the host link's rate is unknown")
    if not memory.value:
        how = f"{decimal(num_bytes, 'B')} / {decimal(link.value, 'B/s')}"
        return Estimate(num_bytes / link.value, str(link.provenance), how)
    busy = _devices_per_memory_node(node)
    rate = min(link.value, memory.value / busy)
    shared = f"{decimal(memory.value, 'B/s')} / {busy} devices of one memory node"
    how = f"{decimal(num_bytes, 'B')} / min({decimal(link.value, 'B/s')}, {shared})"
    return Estimate(num_bytes / rate, least_certain((str(link.provenance), str(memory.provenance))), how)


def _devices_per_memory_node(node: NodeInventory) -> int:
    homes = [device.numa_node for device in node.devices]
    if not homes or None in homes:
        return max(1, len(homes))
    return max(homes.count(home) for home in set(homes))
