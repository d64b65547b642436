"""What hardware there is: devices, nodes, nominal profiles."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Tri(StrEnum):
    """A fact that may be unknown. Unknown is never read as yes or no."""

    YES = "yes"
    NO = "no"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator, or one virtual slot of a host.

    `index` is the vendor's number on this node, before any mask. `arch` is the instruction set (as compilers name it).
    `partition` says of which part of a chip this is, None for a whole one: training refuses partitions and prints the text.
    `health` other than `ok` is why no role may use the device.
    """

    index: int
    uuid: str
    name: str
    memory_bytes: int
    numa_node: int | None = None
    pci_bus: str | None = None
    partition: str | None = None
    health: str = "ok"
    arch: str | None = None


@dataclass(frozen=True, slots=True)
class NumaNode:
    """A host memory node and the processors next to it."""

    index: int
    cpus: tuple[int, ...]
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Link:
    """A direct path between two devices of a node, bytes per second in one direction."""

    source: int
    target: int
    kind: str
    bytes_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class FabricDomain:
    """Devices of several nodes that reach each other at scale-up speed."""

    id: str
    clique: str
    usable: Tri
    reason: str


@dataclass(frozen=True, slots=True)
class NodeInventory:
    """One node. `software` maps a process role (trainer, engine, router) to its packages and versions.

    `vendor` holds further facts as JSON values, for the platform that read them and its children; the core never reads it.
    """

    hostname: str
    platform: str
    arch: str
    devices: tuple[Device, ...]
    cpus: int
    memory_bytes: int
    numa: tuple[NumaNode, ...] = ()
    links: tuple[Link, ...] = ()
    fabric: FabricDomain | None = None
    driver: str | None = None
    software: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    virtual: bool = False
    """The devices are slots that a topology creates, not hardware: any number of them may be asked for."""
    vendor: Mapping[str, Any] = field(default_factory=dict)


def domain_of(node: NodeInventory) -> tuple[str, str] | None:
    """Name and clique of the fabric domain that a node can use; None outside one."""
    fabric = node.fabric
    return (fabric.id, fabric.clique) if fabric is not None and fabric.usable is Tri.YES else None


def in_one_domain(nodes: Iterable[NodeInventory]) -> bool:
    """Whether nodes reach each other over one fabric."""
    domains = {domain_of(node) for node in nodes}
    return len(domains) == 1 and None not in domains


def near_cpus(nodes: Sequence[NodeInventory]) -> tuple[tuple[int, ...], ...]:
    """For each device of a node, in the inventory's order, the processors of its memory node: what `bind_host` needs.

    Empty where a node has one memory node, a device's is unknown, or the nodes differ: a role has one answer for all of them.
    """
    layouts = {tuple(_cpus_of(node, device.numa_node) for device in node.devices) for node in nodes}
    layout = layouts.pop() if len(layouts) == 1 else ()
    populated = max((sum(1 for home in node.numa if home.cpus) for node in nodes), default=0)
    return layout if populated > 1 and all(layout) else ()


def _cpus_of(node: NodeInventory, index: int | None) -> tuple[int, ...]:
    return next((home.cpus for home in node.numa if home.index == index), ())


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """A nominal device, so that a plan needs no machine. `devices_per_node` is None where the topology decides.

    `arch` is the host's processor, `device_arch` the device's instruction set. `numa_nodes` of a node share its devices
    evenly. `domain_devices` reach each other at scale-up speed; more of them than a node has make a fabric over nodes.
    """

    name: str
    platform: str
    memory_bytes: int
    devices_per_node: int | None
    arch: str
    node_memory_bytes: int
    domain_devices: int | None = None
    virtual: bool = False
    provenance: str = "spec"
    device_arch: str | None = None
    numa_nodes: int = 1
