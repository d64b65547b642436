"""Machines for the conformance kit: what the platform must recognise, what it must refuse, and what is not its own."""

from __future__ import annotations

from functools import partial

from vime.testing.conformance import Machine
from vime_ascend.testing.fake_npu_smi import installed


def _machine(profile: str, devices: int, *, matches: bool = True, readable: bool = True, note: str = "") -> Machine:
    return Machine(profile, "synthetic", partial(installed, profile), devices, matches=matches, readable=readable, note=note)


MACHINES = (
    _machine("atlas-a2x8", 8, note="driver 25.5.1; one chip a card"),
    _machine("atlas-a3x16", 16, note="driver 25.5.1; two dies a package, in a super pod"),
    _machine("atlas-a2-zh", 8, note="driver 25.5.1; the tool answers in Chinese"),
    _machine("atlas-a2-sick", 8, note="driver 24.1.rc3.7; one chip with an alarm, two questions refused"),
    _machine("npu-smi-missing", 0, matches=False, readable=False, note="no tool on PATH"),
    _machine("npu-smi-broken", 0, matches=False, readable=False, note="the tool is there, the driver does not answer"),
)

FOREIGN = (_machine("ascend-910x8", 8, matches=False, note="the vendor's first 910, which the platform does not know"),)
"""Beside it, the machines of other platforms: their tools are not `npu-smi`."""
