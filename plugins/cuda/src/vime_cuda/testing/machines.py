"""Machines for the conformance kit, and for the plugins of other vendors as machines that are not theirs."""

from __future__ import annotations

import functools

from vime.testing.conformance import Machine
from vime_cuda.testing import fake_nvml


def _machine(name: str, *, devices: int, matches: bool = True, readable: bool = True) -> Machine:
    profile = fake_nvml.load_profile(name)
    install = functools.partial(fake_nvml.machine, name)
    return Machine(name, profile["origin"], install, devices, matches, readable, note=str(profile.get("note", "")))


MACHINES = (
    _machine("h200x8", devices=8),
    _machine("h200-vm", devices=1),
    _machine("h200x2-vm", devices=2),
    _machine("a100x8", devices=8),
    _machine("b200x8", devices=8),
    _machine("gb200-tray", devices=4),
    _machine("gb200-broken-fabric", devices=4),
    _machine("gb300-tray", devices=4),
    _machine("gh200", devices=1),
    _machine("hopper-claims-fabric", devices=8),
    _machine("mig-on", devices=2),
    _machine("mixed-devices", devices=2),
    _machine("lost-device", devices=8),
    _machine("mixed-drivers", devices=0, matches=False, readable=False),
    _machine("driver-not-loaded", devices=0, matches=False, readable=False),
    _machine("nvml-missing", devices=0, matches=False, readable=False),
)
"""Machines that the cuda platform must recognise, read, or refuse with the reason."""

FOREIGN = (_machine("nvml-missing", devices=0, matches=False, readable=False), _machine("v100", devices=1, matches=False))
"""Machines that are not the platform's: without a driver, and with a device that is too old."""
