"""The generations that this platform knows, and how a chip is recognised."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from vime.facts.inventory import Device, DeviceProfile

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Generation:
    """`arch` is the instruction set as inventories name it; `build` is vllm-ascend's word for it."""

    name: str
    arch: str
    build: str


A2 = Generation("Atlas A2", "ascend910b", "A2")
A3 = Generation("Atlas A3", "ascend910c", "A3")
GENERATIONS: Mapping[str, Generation] = {g.arch: g for g in (A2, A3)}

_A2_NAME = re.compile(r"910B\d?", re.IGNORECASE)
_A3_NAME = re.compile(r"910_93\d\d|910C", re.IGNORECASE)
_PLAIN_NAME = re.compile(r"(?:Ascend)?\s*910$", re.IGNORECASE)

_NODE_MEMORY = 1536 * GIB
"""Nominal: a published A2 node has 24 modules of 64 GB. What a node has is read where there is one."""

PROFILES = (
    DeviceProfile(
        name="atlas-a2",
        platform="ascend",
        memory_bytes=64 * GIB,
        devices_per_node=8,
        arch="aarch64",
        node_memory_bytes=_NODE_MEMORY,
        domain_devices=8,
        provenance="spec",
        device_arch=A2.arch,
        # Eight memory nodes, of which four have a pair of chips each.
        numa_nodes=4,
    ),
    DeviceProfile(
        name="atlas-a3",
        platform="ascend",
        memory_bytes=64 * GIB,
        devices_per_node=16,
        arch="aarch64",
        node_memory_bytes=_NODE_MEMORY,
        domain_devices=16,
        provenance="spec",
        device_arch=A3.arch,
        # Every memory node is about equally far from every die, so binding to one gains nothing.
        numa_nodes=1,
    ),
    DeviceProfile(
        name="atlas-a3-pod",
        platform="ascend",
        memory_bytes=64 * GIB,
        devices_per_node=16,
        arch="aarch64",
        node_memory_bytes=_NODE_MEMORY,
        domain_devices=768,
        provenance="spec",
        device_arch=A3.arch,
        numa_nodes=1,
    ),
)
"""`atlas-a3` is a server by itself. In a pod of 384 packages (48 servers) 768 dies share one fabric."""


def generation_of(name: str, has_physical_id: bool) -> Generation | None:
    """The generation of a chip by the name that `npu-smi` prints, None for one that the platform does not know.

    Drivers of Atlas A3 print plain `Ascend910`, as those of the first 910 did; only A3 has a column of physical ids.
    """
    if _A2_NAME.search(name):
        return A2
    if _A3_NAME.search(name) or (has_physical_id and _PLAIN_NAME.search(name.strip())):
        return A3
    return None


def generation_of_device(device: Device) -> Generation | None:
    """The generation of a device of an inventory, real or nominal."""
    return GENERATIONS.get(device.arch or "")
