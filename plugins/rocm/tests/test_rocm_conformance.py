"""The contract of every platform, on machines that are fakes."""

from __future__ import annotations

from vime.testing.conformance import PlatformConformance
from vime_rocm.testing.machines import FOREIGN, MACHINES


class TestRocm(PlatformConformance):
    platform = "rocm"
    machines = MACHINES
    foreign = FOREIGN
