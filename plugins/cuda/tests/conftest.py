"""Machines and requests for the tests of the cuda plugin."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from vime.facts.inventory import Device, NodeInventory, NumaNode
from vime.facts.process import Parallel, RoleKind, RolePlacement, RoleRequest, Slot
from vime_cuda import inventory, probe, process
from vime_cuda.testing.fake_nvml import installed, load_profile


@pytest.fixture(scope="session")
def facts_of() -> Callable[..., dict[str, Any]]:
    """Facts that the probe reads on a profile's machine, some of its entries changed."""

    def read(name: str, **changed: Any) -> dict[str, Any]:
        with installed({**load_profile(name), **changed}):
            return probe.read_machine()

    return read


@pytest.fixture(scope="session")
def node_of(facts_of: Callable[..., dict[str, Any]]) -> Callable[..., NodeInventory]:
    """The inventory of a profile's machine."""
    return lambda name, **changed: inventory.from_facts(facts_of(name, **changed))


@pytest.fixture(scope="session")
def nominal() -> Callable[..., NodeInventory]:
    """A node of nominal devices, as planning makes it."""

    def make(name: str, arch: str | None = None, count: int = 8, host: str = "x86_64") -> NodeInventory:
        devices = tuple(Device(i, f"pool-0:{i}", name, 80 * 10**9, numa_node=2 * i // count, arch=arch) for i in range(count))
        numa = tuple(NumaNode(home, (), 2**40) for home in range(2))
        return NodeInventory("pool-0", "cuda", host, devices, cpus=0, memory_bytes=2**41, numa=numa)

    return make


@pytest.fixture(scope="session")
def request_for() -> Callable[..., RoleRequest]:
    """One role's request on a node; keywords change fields."""

    def make(node: NodeInventory, kind: str = "trainer", devices: tuple[int, ...] = (0,), **changed: Any) -> RoleRequest:
        found = RoleRequest(
            role="actor" if kind == "trainer" else "rollout",
            kind=RoleKind(kind),
            placement=RolePlacement(kind, tuple(Slot(0, device) for device in devices)),
            inventories=(node,),
            capabilities=process.capabilities(node),
            parallel=Parallel(),
            dtype="bfloat16",
            software=node.software.get(kind, {}),
        )
        return replace(found, **changed)

    return make
