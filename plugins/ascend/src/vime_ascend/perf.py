"""Rates for the plan. Little has been published with a way to check it; the rest stays unknown and is to be measured."""

from __future__ import annotations

from vime.facts.inventory import NodeInventory
from vime.facts.perf import UNITS, PerfTable, Provenance, Quantity
from vime_ascend.chips import A2, A3, generation_of_device

_UNMEASURED = "no measurement with a stated method is known for this chip"

_KNOWN = {
    A2.arch: {},
    A3.arch: {
        "device_memory": Quantity(1.6e12, "bytes/s", Provenance.SPEC, "press figure of 3.2 TB/s for a package of two dies"),
        "scale_up": Quantity(
            196e9, "bytes/s", Provenance.SPEC, "392 GB/s of UB links for a package of two dies, one direction"
        ),
    },
}


def table(inventory: NodeInventory) -> PerfTable:
    """Rates by name. Pure: a look-up by instruction set, no benchmark."""
    generation = next((g for device in inventory.devices if (g := generation_of_device(device))), None)
    known = _KNOWN[generation.arch] if generation else {}
    unknown = {name: Quantity(None, unit, Provenance.UNKNOWN, _UNMEASURED) for name, unit in UNITS.items()}
    return PerfTable(unknown | known)
