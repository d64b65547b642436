"""A HIP device as a trainer's device. Torch calls it cuda."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from vime.errors import TrainerError
from vime.trainer.device_runtime import TorchDeviceRuntime

SOCKETS_VARIABLE = "NCCL_SOCKET_IFNAME"
"""RCCL reads NCCL's name."""


class RocmRuntime(TorchDeviceRuntime):
    """Implements `vime.trainer.runtime.DeviceRuntime`, `BindsHost` and `BindsSockets` on a HIP device.

    The rank's mask lists its own device first and the node's others after it, because importers of device memory must see
    the whole node: the rank's device is number 0, which the core hands to `set_device`.

    Args:
        threads: host threads for computation.
        numa_cpus: see `TorchDeviceRuntime`.

    Raises TrainerError where torch was built for another kind of device, before it looks for one.
    """

    def __init__(self, threads: int = 1, numa_cpus: Sequence[Sequence[int]] = ()) -> None:
        if self.hip_version() is None:
            raise TrainerError(
                f"torch {torch.__version__} is not built for HIP, although it may know a device type cuda",
                fix="install torch from the ROCm wheel index, or use ROCm's image",
            )
        super().__init__("cuda", threads, numa_cpus)

    def hip_version(self) -> str | None:
        """The HIP release that torch was built with."""
        return torch.version.hip

    def bind_sockets(self, interface: str) -> None:
        """See `vime.trainer.runtime.BindsSockets`. RCCL exchanges addresses over sockets, of itself on an outside interface."""
        os.environ.setdefault(SOCKETS_VARIABLE, interface)
