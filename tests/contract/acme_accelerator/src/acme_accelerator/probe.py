"""Is this machine ours? Asked in a child process with a time limit, of every installed plugin that may load."""

from __future__ import annotations

from acme_accelerator import driver
from vime.facts.diagnosis import Match, ProbeContext

SPECIFICITY = 10
"""Above the host, which answers 0. A child platform for one model of the device would answer more."""


def match(ctx: ProbeContext) -> Match | None:
    """A match when the driver lists a device. No driver is an ordinary no; a driver that fails raises."""
    if not driver.is_present(ctx.env):
        return None
    devices = driver.list_devices(ctx.env)["devices"]
    return Match("acme", SPECIFICITY, f"the driver lists {len(devices)} ACME devices") if devices else None
