"""The NPU as a trainer's device. No line of this module has run on hardware."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vime.trainer.device_runtime import TorchDeviceRuntime
from vime_ascend import bootstrap


class NpuRuntime(TorchDeviceRuntime):
    """Implements `vime.trainer.runtime.DeviceRuntime`; building it prepares the process for megatron-core.

    Args:
        threads: host threads for computation.
        deterministic: ask torch for repeatable kernels; those without such a variant warn and run all the same.
        numa_cpus: processors next to the device of each local rank, where the node tells them.
    """

    def __init__(self, threads: int = 1, deterministic: bool = False, numa_cpus: Sequence[Sequence[int]] = ()) -> None:
        self.steps = bootstrap.run()
        super().__init__("npu", threads, numa_cpus)
        if deterministic:
            torch.use_deterministic_algorithms(True, warn_only=True)
