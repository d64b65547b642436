"""From NVML's facts to an inventory, and the nominal devices for plans without a machine."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from vime.errors import PluginError
from vime.facts.diagnosis import ProbeContext, RecordedFixture
from vime.facts.inventory import Device, DeviceProfile, Link, NodeInventory
from vime.platforms.host import host_from
from vime_cuda import probe

ORIGIN_VARIABLE = "VIME_FIXTURE_ORIGIN"
"""Set by a fake of the hardware: what a recording made on it is."""

PRODUCTS = ("A100", "A800", "H20", "H100", "H200", "H800", "GH200", "B200", "B300", "GB200", "GB300")
ARCH_OF_PRODUCT = {
    "A100": "sm80",
    "A800": "sm80",
    "H20": "sm90",
    "H100": "sm90",
    "H200": "sm90",
    "H800": "sm90",
    "GH200": "sm90",
    "B200": "sm100",
    "GB200": "sm100",
    "B300": "sm103",
    "GB300": "sm103",
}

_GB, _GIB = 10**9, 2**30
_NVLINK_BYTES_PER_S = {5: 25e9, 6: 25e9, 7: 50e9}
"""Line rate of one link in one direction, by NVML's version code (NVLink 3, 4 and 5)."""

_PCIE_LANE_BYTES_PER_S = {3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}


def words(name: str) -> frozenset[str]:
    """The whole words of a device name: `NVIDIA GH200 480GB` holds GH200 and not H200."""
    return frozenset(re.split(r"[^A-Z0-9]+", name.upper())) - {""}


def product(name: str) -> str | None:
    """`H200` for `NVIDIA H200` and for the nominal `h200`; None for what is not listed."""
    return next((known for known in PRODUCTS if known in words(name)), None)


def on_a_card(name: str) -> bool:
    """The variants on PCIe cards share a product's name, not its memory, clocks or links."""
    return bool(words(name) & {"PCIE", "NVL"})


def arch_number(arch: str | None) -> int | None:
    """`sm90` -> 90."""
    found = re.fullmatch(r"sm(\d+)", arch or "")
    return int(found[1]) if found else None


def oldest_arch(devices: Iterable[Device]) -> int | None:
    """The instruction set that all usable devices run, as a number; None where one of them is unknown."""
    usable = [device for device in devices if device.health == "ok"]
    numbers = [arch_number(device.arch or ARCH_OF_PRODUCT.get(product(device.name) or "")) for device in usable]
    known = [number for number in numbers if number is not None]
    return min(known) if known and len(known) == len(numbers) else None


# ---- real machines


def read(ctx: ProbeContext) -> NodeInventory:
    """This machine's inventory, or that of the recording being replayed. Raises PluginError with the next step."""
    return from_facts(probe.read_machine() if ctx.recording is None else ctx.recording)


def from_facts(facts: Mapping[str, Any]) -> NodeInventory:
    """The inventory that follows from `probe.read_machine`'s facts.

    `fabric` stays empty: a completed fabric on one node does not prove that devices of another node can be reached.
    Raises PluginError when a fact is missing or of the wrong kind.
    """
    try:
        return _from_facts(facts)
    except (KeyError, TypeError, ValueError) as error:
        raise PluginError(
            f"the recording is not one of the cuda platform: {type(error).__name__}: {error}",
            fix="record it with `vime doctor --platform cuda --record FILE`",
        ) from error


def _from_facts(facts: Mapping[str, Any]) -> NodeInventory:
    if facts["schema"] != probe.SCHEMA:
        raise ValueError(f"schema {facts['schema']!r}, this version reads {probe.SCHEMA}")
    found = host_from(facts["host"])
    return NodeInventory(
        hostname=found.hostname,
        platform="cuda",
        arch=found.arch,
        devices=tuple(_device(device) for device in facts["devices"]),
        cpus=len(found.cpus),
        memory_bytes=found.memory_bytes,
        numa=found.numa,
        links=tuple(_links(facts)),
        driver=_driver(facts),
        software=found.software,
        vendor={name: value for name, value in facts.items() if name != "host"},
    )


def _device(facts: Mapping[str, Any]) -> Device:
    capability = facts["capability"]
    return Device(
        index=int(facts["index"]),
        uuid=str(facts["uuid"]),
        name=str(facts["name"]),
        memory_bytes=int(facts["memory_bytes"]),
        numa_node=facts["numa_node"],
        pci_bus=facts["pci_bus"],
        partition=_partition(facts["mig"]),
        health=_health(str(facts["health"]), capability),
        arch=None if capability is None else f"sm{capability[0]}{capability[1]}",
    )


def _partition(mig: Mapping[str, bool] | None) -> str | None:
    if mig is None or not mig["current"]:
        return None
    return "MIG mode is on: the device is split into instances, which cannot open each other's memory or form groups"


def _health(health: str, capability: Sequence[int] | None) -> str:
    if health == "ok" and capability is not None and tuple(capability) < probe.OLDEST:
        return f"compute capability {capability[0]}.{capability[1]} is below 8.0: no bfloat16"
    return health


def _driver(facts: Mapping[str, Any]) -> str | None:
    driver, cuda = facts["driver"], facts["cuda_driver"]
    if driver is None:
        return None
    return str(driver) if cuda is None else f"{driver} (CUDA {cuda[0]}.{cuda[1]})"


def _links(facts: Mapping[str, Any]) -> Iterator[Link]:
    """Paths that NVML calls usable: NVLink where there is one, else PCIe where devices read each other's memory."""
    devices, nvlink, read = facts["devices"], facts["p2p_nvlink"], facts["p2p_read"]
    for a, first in enumerate(devices):
        for b, second in enumerate(devices):
            if a == b:
                continue
            if nvlink[a][b]:
                yield Link(a, b, "nvlink", _slower(_nvlink_rate(first["nvlinks"]), _nvlink_rate(second["nvlinks"])))
            elif read[a][b]:
                yield Link(a, b, "pcie", _slower(_pcie_rate(first["pcie"]), _pcie_rate(second["pcie"])))


def _slower(first: float | None, second: float | None) -> float | None:
    return None if first is None or second is None else min(first, second)


def _nvlink_rate(links: Mapping[str, Any] | None) -> float | None:
    """Line rate of all active links together: through a switch any pair may use them all."""
    each = None if links is None else _NVLINK_BYTES_PER_S.get(links["version"])
    return None if links is None or each is None else links["active"] * each


def _pcie_rate(pcie: Mapping[str, Any] | None) -> float | None:
    """Line rate. An idle link may rest at a lower generation, so that the highest one counts where it is known."""
    if pcie is None:
        return None
    lane = _PCIE_LANE_BYTES_PER_S.get(pcie["max_generation"] or pcie["generation"])
    return None if lane is None or pcie["width"] is None else lane * pcie["width"]


def fixture(ctx: ProbeContext) -> RecordedFixture:
    """A recording of this machine, or the one that is being replayed."""
    data = dict(ctx.recording) if ctx.recording is not None else probe.read_machine()
    origin = ctx.env.get(ORIGIN_VARIABLE, "recorded")
    return RecordedFixture("cuda", origin, datetime.datetime.now(tz=datetime.UTC).date().isoformat(), data)


# ---- nominal devices


def _profile(name: str, arch: str, memory_gb: int, node_gib: int) -> DeviceProfile:
    """Eight devices behind a switch, two processors. The vendor's gigabytes are read as 10^9 bytes, the careful way."""
    return DeviceProfile(
        name=name,
        platform="cuda",
        memory_bytes=memory_gb * _GB,
        devices_per_node=8,
        arch="x86_64",
        node_memory_bytes=node_gib * _GIB,
        domain_devices=8,
        provenance="spec",
        device_arch=arch,
        numa_nodes=2,
    )


PROFILES = (
    _profile("a100-40g", "sm80", 40, 1024),
    _profile("a100-80g", "sm80", 80, 2048),
    _profile("h100", "sm90", 80, 2048),
    _profile("h200", "sm90", 141, 2048),
    _profile("b200", "sm100", 180, 2048),
)
"""Devices by the vendor's data sheets, nodes by its eight-device systems (their host memory as usually sold)."""
