"""Rates for the plan. None was measured by us: what no vendor states stays unknown."""

from __future__ import annotations

from vime.facts.inventory import NodeInventory
from vime.facts.perf import PerfTable, Provenance, Quantity
from vime_rocm.devices import common_kind

HOST_LINK = 50e9
_UNKNOWN = {
    "device_memory": "bytes/s",
    "host_link": "bytes/s",
    "scale_up": "bytes/s",
    "matmul": "FLOP/s",
}


def table(inventory: NodeInventory) -> PerfTable:
    """Rates by product. Pure: a look-up by the devices' name, no benchmark."""
    rest = {
        "network": Quantity(None, "bytes/s", Provenance.UNKNOWN, "depends on the machine"),
        "memcpy": Quantity(None, "bytes/s", Provenance.UNKNOWN, "depends on the host"),
    }
    kind = common_kind(inventory.devices)
    if kind is None or any(device.partition for device in inventory.devices):
        why = "the devices differ, are partitions, or are of a product without figures here"
        return PerfTable({name: Quantity(None, unit, Provenance.UNKNOWN, why) for name, unit in _UNKNOWN.items()} | rest)
    sheet = f"AMD's data sheet of the {kind.name.upper()}"
    return PerfTable(
        {
            "device_memory": Quantity(kind.memory_bandwidth, "bytes/s", Provenance.SPEC, f"peak, {sheet}"),
            "matmul": Quantity(kind.matmul, "FLOP/s", Provenance.SPEC, f"dense bfloat16 peak, {sheet}"),
            "scale_up": Quantity(
                kind.link, "bytes/s", Provenance.SPEC, f"one xGMI link, which is all that a pair of devices has; {sheet}"
            ),
            "host_link": Quantity(
                HOST_LINK, "bytes/s", Provenance.DERIVED, "PCIe 5 x16 has 64e9 on the line; four fifths are planned with"
            ),
        }
        | rest
    )
