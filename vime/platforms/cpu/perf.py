"""Rates of a host for the plan. What was measured says on what; everything else stays unknown."""

from __future__ import annotations

from vime.facts.inventory import NodeInventory
from vime.facts.perf import PerfTable, Provenance, Quantity

_MACHINE = "one thread of a two-core x86-64 virtual machine with AVX-512, torch 2.13"
_MEMCPY_BYTES_PER_S = 14.0e9
_MATMUL_FLOP_PER_S = 90.0e9


def table(inventory: NodeInventory) -> PerfTable:
    """Rates by name. Pure: a look-up by architecture, no benchmark."""
    if inventory.arch != "x86_64":
        unknown = {"memcpy": "bytes/s", "matmul": "FLOP/s", "host_link": "bytes/s", "network": "bytes/s"}
        why = f"not measured on {inventory.arch}"
        return PerfTable({name: Quantity(None, unit, Provenance.UNKNOWN, why) for name, unit in unknown.items()})
    return PerfTable(
        {
            "memcpy": Quantity(_MEMCPY_BYTES_PER_S, "bytes/s", Provenance.MEASURED, f"copy of 256 MiB, {_MACHINE}"),
            "matmul": Quantity(_MATMUL_FLOP_PER_S, "FLOP/s", Provenance.MEASURED, f"float32, 1024 x 1024, {_MACHINE}"),
            "host_link": Quantity(
                _MEMCPY_BYTES_PER_S, "bytes/s", Provenance.DERIVED, "device and host memory are one: a move is a memcpy"
            ),
            "network": Quantity(None, "bytes/s", Provenance.UNKNOWN, "depends on the machine"),
        }
    )
