"""vime's conformance kit on the acme platform."""

from __future__ import annotations

from acme_accelerator.testing.machines import FOREIGN, MACHINES
from vime.testing.conformance import PlatformConformance


class TestAcme(PlatformConformance):
    platform = "acme"
    machines = MACHINES
    foreign = FOREIGN
