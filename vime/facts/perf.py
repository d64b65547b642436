"""Numbers for the plan, each with where it comes from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Provenance(StrEnum):
    """spec: the vendor says so. measured: seen on such a machine. derived: our arithmetic. yours: the user measured it."""

    SPEC = "spec"
    MEASURED = "measured"
    DERIVED = "derived"
    YOURS = "yours"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Quantity:
    """A number with its unit and source; `value` None is unknown and stays unknown."""

    value: float | None
    unit: str
    provenance: Provenance
    source: str = ""


UNITS: Mapping[str, str] = {
    "device_memory": "bytes/s",
    "host_link": "bytes/s",
    "host_memory": "bytes/s",
    "scale_up": "bytes/s",
    "network": "bytes/s",
    "memcpy": "bytes/s",
    "matmul": "FLOP/s",
    "parking": "bytes/s",
    "engine_load": "bytes/s",
    "engine_update": "s",
    "gather": "bytes/s",
    "process": "bytes",
    "trainer_libraries": "bytes",
    "engine_rest": "bytes",
    "engine_work": "bytes",
    "engine_graph_layer": "bytes",
    "memory_share": "share",
    "matmul_share": "share",
    "trainer_share": "share",
    "prefill_share": "share",
    "eager_layer": "s",
    "step_rest": "s",
}
"""The unit of every name that is known; `PerfTable` says what each is. A plan reads all but `memcpy`."""


@dataclass(frozen=True, slots=True)
class PerfTable:
    """By name: `device_memory`, `host_link`, `scale_up`, `network` (bytes/s), `matmul` (FLOP/s), `memcpy` (bytes/s).

    `host_link` is one device's, alone and in one direction; `host_memory` is what the devices of one memory node share.
    `parking` (bytes/s) is the rate at which trainer state moves, where it is known to be lower. `engine_load` (bytes/s) and
    `engine_update` (s) are what an engine needs for a full set of weights beside the transport. `gather` (bytes/s) is the
    rate at which a trainer rank receives what the others hold of the weights, to put them together for engines; it belongs here
    only where the rates of transports leave that out. Without it an update's estimate has no such term.

    Shares that a step reaches: `memory_share` of `device_memory`, `matmul_share` of a data sheet's `matmul` by one large
    product, `trainer_share` and `prefill_share` of that. In seconds: `eager_layer` (of a decode step without captured graphs,
    beside its reads), `step_rest` (a step beside sampling, training, update and switches).

    In bytes, beside tensors: `process` (of any process), `trainer_libraries`, `engine_rest` (asleep too), `engine_work` (while
    it serves), `engine_graph_layer` (captured graphs of one layer).
    """

    quantities: Mapping[str, Quantity] = field(default_factory=dict)

    def get(self, name: str) -> Quantity:
        """The quantity, or an explicit unknown."""
        return self.quantities.get(name, Quantity(None, "", Provenance.UNKNOWN))
