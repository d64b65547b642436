"""Whether this machine is a Grace-Blackwell tray.

Processor, instruction set and chip-to-chip link decide. A product name does not, and neither does the fabric: a Hopper may
report a completed registration with a valid UUID, and a tray whose fabric is down is a tray still, with four devices, two
Grace and rules of its own for a broken fabric.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vime.errors import PluginError
from vime.facts.diagnosis import Match, ProbeContext
from vime.facts.inventory import Tri
from vime_gb200 import fabric
from vime_gb200.inventory import PLATFORM

SPECIFICITY = 20
"""cuda answers 10 on the same machine."""


def match(ctx: ProbeContext) -> Match | None:
    """The match, or None on every other machine and where the driver cannot be asked."""
    from vime_cuda import probe

    try:
        facts = probe.read_machine() if ctx.recording is None else ctx.recording
    except PluginError:
        return None
    return match_facts(facts)


def match_facts(facts: Mapping[str, Any]) -> Match | None:
    """The same from facts of `vime_cuda.probe`."""
    devices: Sequence[fabric.Facts] = facts.get("devices") or ()
    host: Mapping[str, Any] = facts.get("host") or {}
    # Unknown is not enough to choose by: cuda runs on the machine too, and the user may name this platform.
    if fabric.is_grace_blackwell(str(host.get("arch")), devices) is not Tri.YES:
        return None
    domain = fabric.judge(devices, facts.get("imex_channels"))
    kind = " and ".join(sorted({arch for device in devices if (arch := fabric.arch_of(device))}))
    return Match(PLATFORM, SPECIFICITY, f"{len(devices)} devices of {kind} on Grace; fabric usable: {domain.usable}")
