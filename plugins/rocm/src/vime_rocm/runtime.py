"""A HIP device as a trainer's device. Torch calls it cuda."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import torch

from vime.errors import TrainerError
from vime.trainer.device_runtime import TorchDeviceRuntime, bind_numa
from vime_rocm.masks import HIP, entries_of


class RocmRuntime(TorchDeviceRuntime):
    """Implements `vime.trainer.runtime.DeviceRuntime` on a HIP device.

    Args:
        threads: host threads for computation.
        numa_cpus: by a device's entry in a mask, the processors next to it.

    Raises TrainerError where torch was built for another kind of device, before it looks for one.
    """

    def __init__(self, threads: int = 1, numa_cpus: Mapping[str, Sequence[int]] | None = None) -> None:
        if self.hip_version() is None:
            raise TrainerError(
                f"torch {torch.__version__} is not built for HIP, although it may know a device type cuda",
                fix="install torch from the ROCm wheel index, or use ROCm's image",
            )
        self._near = dict(numa_cpus or {})
        super().__init__("cuda", threads)

    def hip_version(self) -> str | None:
        """The HIP release that torch was built with."""
        return torch.version.hip

    def set_device(self, local_index: int) -> None:
        """Bind to the processors next to the rank's device and make it current.

        The rank's mask lists its own device first and the node's others after it, because importers of device memory must
        see the whole node: whatever its place on the node, the rank's device is number 0.
        """
        own = entries_of(os.environ.get(HIP, ""))[:1]
        if own and own[0] in self._near:
            bind_numa(self._near[own[0]])
        self._device.set_device(0)
