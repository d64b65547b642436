"""The conformance kit over the fake tool; with `--device` also over the hardware of the machine that runs it."""

from __future__ import annotations

from vime.testing.conformance import PlatformConformance
from vime.testing.conformance.machine import plain_host
from vime_ascend.testing.machines import FOREIGN, MACHINES


class TestAscend(PlatformConformance):
    platform = "ascend"
    machines = MACHINES
    foreign = (plain_host(), *FOREIGN)
