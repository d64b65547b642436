"""Rates and sizes for the plan, by product. Spec: the data sheet; measured: named machine; derived: arithmetic given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from vime.facts.inventory import NodeInventory
from vime.facts.perf import UNITS, PerfTable, Provenance, Quantity
from vime_cuda.inventory import on_a_card, product, words

_SHEET = "NVIDIA's data sheet"
_DENSE = f"{_SHEET}, bfloat16 without sparsity"
_ONE_H200 = "one H200 in a virtual machine, separate script"
_TWO_H200 = "two H200 of one host in a virtual machine, separate script"
_PCIE5 = "PCIe 5 x16 has a line rate of 63 GB/s; copies reach about 80 % of it (55.4 GB/s were measured on an H200)"


def _spec(value: float, unit: str, source: str) -> Quantity:
    return Quantity(value, unit, Provenance.SPEC, source)


def _measured(value: float, unit: str, source: str) -> Quantity:
    return Quantity(value, unit, Provenance.MEASURED, source)


def _derived(value: float, unit: str, source: str) -> Quantity:
    return Quantity(value, unit, Provenance.DERIVED, source)


_RUN_4B = "one H200 in a virtual machine, GRPO with vime on a model of 4 billion parameters"
_RUN_TINY = "one H200 in a virtual machine, GRPO with vime on a model of 4 layers"
_GIB = 2**30
_SIZES: Mapping[str, tuple[float, str]] = {
    "process": (0.51 * _GIB, f"memory in use by NVML when the first process opens the device; {_RUN_4B}"),
    "trainer_libraries": (0.26 * _GIB, f"left by a parked trainer of one rank beside its context; {_RUN_4B}"),
    "engine_rest": (1.44 * _GIB, f"left by a sleeping vLLM 0.26 beside its context, after an update; {_RUN_4B}"),
    "engine_work": (1.61 * _GIB, f"taken by vLLM 0.26 while it serves 128 sequences, beside weights and cache; {_RUN_4B}"),
    "engine_graph_layer": (0.13 * _GIB / 4, f"0.13 GiB of graphs for 4 layers, vLLM 0.26; {_RUN_TINY}"),
}
"""What processes take beside tensors."""

_H200_RUN: Mapping[str, Quantity] = {
    "parking": Quantity(50e9, "bytes/s", Provenance.MEASURED, f"48 to 52e9 both ways, once memory is page-locked; {_RUN_4B}"),
    "engine_load": Quantity(
        48e9,
        "bytes/s",
        Provenance.MEASURED,
        f"at least: 8.04 GB from the host's copy, vLLM 0.26 that reloads layer by layer; {_RUN_4B}",
    ),
    "engine_update": Quantity(0.02, "s", Provenance.MEASURED, f"an update of 6 MB, median of 6; {_RUN_TINY}"),
}


_BENCH_4B = "vime bench on one H200 in a virtual machine, a model of 4 billion parameters"
_STEP: Mapping[str, Quantity] = {
    "memory_share": Quantity(
        0.68, "share", Provenance.MEASURED, f"8.04 GB copied on the device in 4.9 ms, of 4.8e12 bytes/s; {_BENCH_4B}"
    ),
    "matmul_share": Quantity(0.80, "share", Provenance.DERIVED, f"790e12 of the data sheet's 989e12 FLOP/s; {_ONE_H200}"),
    "trainer_share": Quantity(
        0.40,
        "share",
        Provenance.MEASURED,
        f"312 of 778 TFLOP/s in packs of 8192 tokens, attention counted and optimizer included; {_BENCH_4B}",
    ),
    "prefill_share": Quantity(0.40, "share", Provenance.DERIVED, "as the trainer's: both are products of whole packs"),
    "eager_layer": Quantity(
        0.8e-3, "s", Provenance.MEASURED, f"0.66 to 1.2 ms for 36 layers of 32 sequences, eager vLLM 0.26; {_RUN_4B}"
    ),
    "step_rest": Quantity(0.4, "s", Provenance.MEASURED, f"0.43 s of a parked run's publications; {_RUN_4B}"),
}
"""What a step reaches of the rates, and what it takes beside them."""


def _sizes(provenance: Provenance, note: str = "") -> dict[str, Quantity]:
    """`_SIZES` and `_STEP` for a product, the latter as measured only where they are."""
    sizes = {name: Quantity(round(size), "bytes", provenance, note + how) for name, (size, how) in _SIZES.items()}
    return sizes | {name: replace(q, provenance=provenance, source=note + q.source) if note else q for name, q in _STEP.items()}


def _nvlink(links: int, each: float) -> Quantity:
    what = f"{links} links x {each / 1e9:g} GB/s, the rate that NCCL plans with for one link"
    return _derived(links * each, "bytes/s", what)


_TABLES: Mapping[str, Mapping[str, Quantity]] = {
    "A100": {
        "host_link": _measured(24.8e9, "bytes/s", "PCIe 4 x16, reported by a user in the vendor's forum"),
        "scale_up": _nvlink(12, 20.0e9),
        "matmul": _spec(312e12, "FLOP/s", _DENSE),
    },
    "H100": {
        "device_memory": _spec(3.35e12, "bytes/s", _SHEET),
        "host_link": _derived(50e9, "bytes/s", _PCIE5),
        "scale_up": _nvlink(18, 20.6e9),
        "matmul": _spec(989e12, "FLOP/s", _DENSE),
    },
    "H200": {
        "device_memory": _spec(4.8e12, "bytes/s", _SHEET),
        "host_link": _measured(55.4e9, "bytes/s", f"page-locked host to device, {_ONE_H200}; 55.3e9 the other way"),
        "scale_up": _measured(370e9, "bytes/s", f"peer copy, {_TWO_H200}; NCCL broadcast of 1 GiB 368e9"),
        "matmul": _measured(790e12, "FLOP/s", f"bfloat16, {_ONE_H200}"),
    },
    "GH200": {"matmul": _spec(989e12, "FLOP/s", _DENSE)},
    "B200": {
        "device_memory": _spec(8e12, "bytes/s", _SHEET),
        "host_link": _derived(50e9, "bytes/s", _PCIE5),
        "scale_up": _nvlink(18, 40.1e9),
        "matmul": _spec(2.25e15, "FLOP/s", _DENSE),
    },
    "GB200": {
        "device_memory": _spec(8e12, "bytes/s", _SHEET),
        "scale_up": _nvlink(18, 40.1e9),
        "matmul": _spec(2.5e15, "FLOP/s", _DENSE),
    },
    "GB300": {"device_memory": _spec(8e12, "bytes/s", _SHEET), "scale_up": _nvlink(18, 40.1e9)},
}


def table(inventory: NodeInventory) -> PerfTable:
    """Rates of the node's product. Pure: a look-up by name; what is not listed, mixed or on a card is unknown."""
    names = {device.name for device in inventory.devices if device.health == "ok"}
    kinds = {product(name) for name in names}
    kind = kinds.pop() if len(kinds) == 1 else None
    known = dict(_TABLES.get(kind or "", {}))
    if known:
        on_h200 = kind == "H200"
        told = (Provenance.MEASURED, "") if on_h200 else (Provenance.DERIVED, "taken from another product: ")
        known |= {**_sizes(*told), **(_H200_RUN if on_h200 else {})}
    if any(on_a_card(name) for name in names):
        known, why = {}, "the variants on PCIe cards differ from the data sheet's product"
    elif not names or kind is None:
        why = "the devices are mixed or not listed"
    else:
        why = f"not known for {kind}"
    if known and kind == "A100":
        known["device_memory"] = _a100_memory(names)
    unknown = {name: Quantity(None, unit, Provenance.UNKNOWN, why) for name, unit in UNITS.items()}
    unknown["network"] = Quantity(None, "bytes/s", Provenance.UNKNOWN, "depends on the machine's network cards")
    return PerfTable(unknown | known)


def _a100_memory(names: set[str]) -> Quantity:
    """The two sizes have memories of different speed."""
    small = all(words(name) & {"40GB", "40G"} for name in names)
    return _spec(1.555e12 if small else 2.0e12, "bytes/s", f"{_SHEET}, {40 if small else 80} GB")
