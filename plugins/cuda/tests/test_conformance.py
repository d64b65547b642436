"""The cuda platform keeps the contract of every hook, on a fake NVML beneath the real wrapper."""

from vime.testing.conformance import PlatformConformance
from vime_cuda.testing.machines import FOREIGN, MACHINES


class TestCuda(PlatformConformance):
    platform = "cuda"
    machines = MACHINES
    foreign = FOREIGN
