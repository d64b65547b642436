"""The conformance kit on trays of every condition, reached by the entry point."""

from vime.testing.conformance import PlatformConformance
from vime_gb200.testing.machines import FOREIGN, MACHINES


class TestGb200(PlatformConformance):
    platform = "gb200"
    machines = MACHINES
    foreign = FOREIGN
