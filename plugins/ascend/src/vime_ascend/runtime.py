"""The NPU as a trainer's device. No line of this module has run on hardware."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from vime.trainer.device_runtime import TorchDeviceRuntime
from vime_ascend import bootstrap

SOCKETS_VARIABLE = "HCCL_SOCKET_IFNAME"


class NpuRuntime(TorchDeviceRuntime):
    """Implements `vime.trainer.runtime.DeviceRuntime`, `BindsHost` and `BindsSockets`.

    Building it prepares the process for megatron-core.

    Args:
        threads: host threads for computation.
        deterministic: ask torch for repeatable kernels; those without such a variant warn and run all the same.
        numa_cpus: see `TorchDeviceRuntime`.
    """

    def __init__(self, threads: int = 1, deterministic: bool = False, numa_cpus: Sequence[Sequence[int]] = ()) -> None:
        self.steps = bootstrap.run()
        super().__init__("npu", threads, numa_cpus)
        if deterministic:
            torch.use_deterministic_algorithms(True, warn_only=True)

    def bind_sockets(self, interface: str) -> None:
        """See `vime.trainer.runtime.BindsSockets`. HCCL's hosts meet over sockets, of itself on an outside interface; a leading
        `=` asks for this name and none that begins with it."""
        os.environ.setdefault(SOCKETS_VARIABLE, f"={interface}")
