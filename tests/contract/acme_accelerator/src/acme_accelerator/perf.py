"""Rates for the plan, each with where it comes from. What nobody knows stays unknown."""

from __future__ import annotations

from vime.facts.perf import PerfTable, Provenance, Quantity

_SHEET = "the imaginary data sheet of the A1"

TABLE = PerfTable(
    {
        "device_memory": Quantity(2.0e10, "bytes/s", Provenance.SPEC, _SHEET),
        "host_link": Quantity(8.0e9, "bytes/s", Provenance.SPEC, _SHEET),
        "scale_up": Quantity(4.0e9, "bytes/s", Provenance.DERIVED, "half of the host link: two devices share it"),
        "matmul": Quantity(None, "FLOP/s", Provenance.UNKNOWN, "the data sheet is silent"),
    }
)
