"""The accelerators that this plugin knows, by the device id and the name that their driver gives them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from vime.facts.inventory import Device, DeviceProfile

VENDOR_ID = "0x1002"
GFX942, GFX950 = "gfx942", "gfx950"
SUPPORTED = (GFX942, GFX950)

_TERA = 1e12
_GIB = 2**30


@dataclass(frozen=True, slots=True)
class Kind:
    """One product. Rates are the vendor's, per device and direction: bytes per second, dense bfloat16 FLOP per second.

    `link` is one xGMI link. `ray_type` is the value Ray gives its accelerator-type label.
    """

    name: str
    arch: str
    memory_bytes: int
    memory_bandwidth: float
    link: float
    matmul: float
    ray_type: str

    @property
    def market_name(self) -> str:
        return f"AMD Instinct {self.name.upper()}"


# Memory sizes are sold as 192, 256 and 288 GB but counted in stacks of binary gigabytes, which is what the driver reports.
KINDS = {
    kind.name: kind
    for kind in (
        Kind("mi300x", GFX942, 192 * _GIB, 5.3 * _TERA, 64e9, 1307.4 * _TERA, "AMD-Instinct-MI300X-OAM"),
        Kind("mi325x", GFX942, 256 * _GIB, 6.0 * _TERA, 64e9, 1307.4 * _TERA, "AMD-Instinct-MI325X-OAM"),
        Kind("mi350x", GFX950, 288 * _GIB, 8.0 * _TERA, 76.8e9, 2300 * _TERA, "AMD-Instinct-MI350X-OAM"),
        Kind("mi355x", GFX950, 288 * _GIB, 8.0 * _TERA, 76.8e9, 2500 * _TERA, "AMD-Instinct-MI355X-OAM"),
    )
}

DEVICE_IDS = {"0x74a1": "mi300x", "0x74a9": "mi300x", "0x74a5": "mi325x", "0x75a0": "mi350x", "0x75a3": "mi355x"}
"""PCI device ids of the products above."""

NODE_MEMORY_BYTES = 1536 * _GIB
"""Nominal host memory of an eight-device server."""


def kind_named(name: str) -> Kind | None:
    """The product that a device's name holds as a whole word: `mi300x`, `AMD Instinct MI300X`. None for others."""
    words = re.split(r"[^a-z0-9]+", name.lower())
    return next((KINDS[word] for word in words if word in KINDS), None)


def kind_with(device_id: str | None) -> Kind | None:
    """The product with a PCI device id (`0x74a1`)."""
    name = DEVICE_IDS.get((device_id or "").lower())
    return KINDS[name] if name else None


def common_kind(devices: Iterable[Device]) -> Kind | None:
    """The product of all devices; None where they differ or one is unknown."""
    kinds = {kind_named(device.name) for device in devices}
    return kinds.pop() if len(kinds) == 1 else None


def link_rate(arch: str | None) -> float | None:
    """Bytes per second of one xGMI link, which is what a pair of devices has between them."""
    return {GFX942: 64e9, GFX950: 76.8e9}.get(arch or "")


def profiles() -> tuple[DeviceProfile, ...]:
    """Nominal devices: eight to a node, all-to-all over xGMI, on two-socket x86-64 hosts."""
    return tuple(
        DeviceProfile(
            name=kind.name,
            platform="rocm",
            memory_bytes=kind.memory_bytes,
            devices_per_node=8,
            arch="x86_64",
            node_memory_bytes=NODE_MEMORY_BYTES,
            domain_devices=8,
            provenance="spec",
            device_arch=kind.arch,
            numa_nodes=2,
        )
        for kind in KINDS.values()
        if kind.name != "mi350x"
    )
