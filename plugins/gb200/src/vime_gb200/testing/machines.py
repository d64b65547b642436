"""Machines for the conformance kit: trays of `vime_cuda.testing`, and what can be wrong with them. All are synthetic."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from vime.testing.conformance import Machine
from vime_cuda.testing import fake_nvml
from vime_gb200 import inventory

Change = Callable[[dict[str, Any]], None]


def as_is(profile: dict[str, Any]) -> None:
    """No change."""


def no_channel(profile: dict[str, Any]) -> None:
    profile["imex_channels"] = []


def two_cliques(profile: dict[str, Any]) -> None:
    """The second Grace's devices are in another clique, as after half a repair."""
    for device in profile["devices"][2:]:
        device["FabricV"] = {**device["FabricV"], "cliqueId": 1}


def other_clique(profile: dict[str, Any]) -> None:
    """A tray of the other rack of an NVL36x2 pair: the same cluster, another clique."""
    profile["host"]["hostname"] = "gb200-other-rack"
    for device in profile["devices"]:
        device["FabricV"] = {**device["FabricV"], "cliqueId": 1}


def no_fabric_functions(profile: dict[str, Any]) -> None:
    """A driver that cannot be asked about the fabric."""
    profile["absent"] = ["nvmlDeviceGetGpuFabricInfoV", "nvmlDeviceGetGpuFabricInfo"]


def device_memory_apart(profile: dict[str, Any]) -> None:
    """CDMM: the driver keeps device memory out of the host's memory nodes."""
    profile["host"]["numa"] = [node for node in profile["host"]["numa"] if node["cpus"]]
    for device in profile["devices"]:
        del device["NumaNodeId"]


def lost_device(profile: dict[str, Any]) -> None:
    profile["devices"][3]["Handle"] = "ERR GPU_IS_LOST"


def two_devices(profile: dict[str, Any]) -> None:
    """A container that was given one Grace's devices."""
    del profile["devices"][2:]


@contextmanager
def tray(name: str, change: Change = as_is) -> Iterator[Mapping[str, str]]:
    """A changed profile of `vime_cuda.testing` as this machine, with numactl; yields the environment to probe with."""
    profile = copy.deepcopy(fake_nvml.load_profile(name))
    change(profile)
    before = inventory.find_program
    inventory.find_program = lambda program: f"/usr/bin/{program}"
    try:
        with fake_nvml.machine(name) as env, fake_nvml.installed(profile):
            yield env
    finally:
        inventory.find_program = before


def _tray(name: str, change: Change, *, like: str = "gb200-tray", devices: int = 4) -> Machine:
    note = (change.__doc__ or change.__name__.replace("_", " ")).strip()
    return Machine(name, "synthetic", functools.partial(tray, like, change), devices, note=note)


def _other(name: str) -> Machine:
    machine = functools.partial(fake_nvml.machine, name)
    return Machine(name, fake_nvml.load_profile(name)["origin"], machine, devices=0, matches=False, readable=False)


MACHINES = (
    _tray("gb200-tray", as_is),
    _tray("gb300-tray", as_is, like="gb300-tray"),
    _tray("gb200-broken-fabric", as_is, like="gb200-broken-fabric"),
    _tray("gb200-old-driver", no_fabric_functions),
    _tray("gb200-lost-device", lost_device),
    _other("h200x8"),
    _other("b200x8"),
    _other("gh200"),
    _other("hopper-claims-fabric"),
    _other("mixed-drivers"),
    _other("nvml-missing"),
)
"""Trays, and machines of the parent on which the probe says no and the inventory refuses."""

FOREIGN = tuple(machine for machine in MACHINES if not machine.matches)
"""Machines that are not the platform's: without Grace, without Blackwell, or without a driver."""
