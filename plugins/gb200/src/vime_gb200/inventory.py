"""What a tray adds to cuda's inventory: its fabric domain, and the Grace that each device hangs on."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace

from vime.errors import PluginError
from vime.facts.diagnosis import ProbeContext, RecordedFixture
from vime.facts.inventory import Device, DeviceProfile, NodeInventory, Tri
from vime_gb200 import fabric

PLATFORM = "gb200"
DEVICES_PER_TRAY = 4
DOMAIN_DEVICES = 72
_GRACE_MEMORY = 480 * 10**9

GB200 = DeviceProfile(
    name="gb200",
    platform=PLATFORM,
    memory_bytes=186 * 10**9,
    devices_per_node=DEVICES_PER_TRAY,
    arch=fabric.HOST_ARCH,
    node_memory_bytes=2 * _GRACE_MEMORY,
    domain_devices=DOMAIN_DEVICES,
    device_arch="sm100",
    numa_nodes=2,
)
"""Specification of the NVL72 rack: 13.4 TB of device memory over 72 devices (192 GB of chips, 186 GB usable), 18 trays of two
Grace with up to 480 GB each."""

GB300 = replace(GB200, name="gb300", memory_bytes=277 * 10**9, device_arch="sm103")
"""Specification of the NVL72 rack: 20 TB of device memory over 72 devices (288 GB of chips)."""

PROFILES = (GB200, GB300)

NUMACTL = "numactl"
"""Fact that this plugin adds to cuda's: whether the program `numactl`, which vLLM binds its workers with, is installed."""


find_program: Callable[[str], str | None] = shutil.which
"""Where a program is, None where it is not. Tests put a machine of their own here."""


def amend(inventory: NodeInventory, ctx: ProbeContext) -> NodeInventory:
    """cuda's inventory of a tray, with fabric domain and memory nodes set right.

    Raises PluginError where the machine is not Grace-Blackwell.
    """
    devices = inventory.vendor.get("devices", ())
    if fabric.is_grace_blackwell(inventory.arch, devices) is Tri.NO:
        archs = ", ".join(sorted({str(fabric.arch_of(device)) for device in devices})) or "no device"
        raise PluginError(
            f"this is no Grace-Blackwell tray: host {inventory.arch}, {archs}; the platform needs a host of "
            f"{fabric.HOST_ARCH} and devices of {' or '.join(fabric.ARCHITECTURES)} with the chip-to-chip link in use",
            fix="use --platform cuda",
        )
    near = tuple(node for node in inventory.numa if node.cpus) or inventory.numa
    return replace(
        inventory,
        platform=PLATFORM,
        devices=tuple(_homed(device, inventory) for device in inventory.devices),
        # Device memory is a memory node without processors unless the driver manages it apart (CDMM): it is no host memory.
        numa=near,
        memory_bytes=min(inventory.memory_bytes, sum(node.memory_bytes for node in near) or inventory.memory_bytes),
        fabric=fabric.judge(devices, inventory.vendor.get("imex_channels")),
        vendor={**inventory.vendor, NUMACTL: has_numactl(ctx)},
    )


def _homed(device: Device, inventory: NodeInventory) -> Device:
    """The device at the memory node of its Grace; None where that is not told (its own memory node is no answer)."""
    graces = {node.index for node in inventory.numa if node.cpus}
    return device if device.numa_node in graces else replace(device, numa_node=None)


def has_numactl(ctx: ProbeContext) -> bool | None:
    """Whether `numactl` can be run on this node; None where a recording does not say."""
    if ctx.recording is None:
        return find_program("numactl") is not None
    found = ctx.recording.get(NUMACTL)
    return found if isinstance(found, bool) else None


def amend_fixture(fixture: RecordedFixture, ctx: ProbeContext) -> RecordedFixture:
    """cuda's recording under this platform's name, with the fact that it does not read."""
    data: Mapping[str, object] = {**fixture.data, NUMACTL: has_numactl(ctx)}
    return replace(fixture, platform=PLATFORM, data=data)
