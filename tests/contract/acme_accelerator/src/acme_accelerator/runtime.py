"""An A1 as a trainer's device. Imported in trainer processes only."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from vime.errors import PluginError
from vime.facts.process import Factory

HOST_RUNTIME = Factory("vime.platforms.cpu.trainer_runtime:HostRuntime")
"""Makes megatron-core run on CPU tensors."""


class AcmeRuntime:
    """Implements `vime.trainer.runtime.DeviceRuntime`: the host's runtime, and what a discrete device adds to it.

    Args:
        threads: host threads for computation.
        memory_bytes: memory of one device.
        num_devices: devices of the node.
        mask: the variable that says which of them this process sees.
    """

    device_type = "cpu"

    def __init__(self, *, threads: int, memory_bytes: int, num_devices: int, mask: str) -> None:
        self._host: Any = HOST_RUNTIME.build(threads=threads)
        self._memory_bytes = memory_bytes
        self._devices = num_devices
        self._mask = mask
        text = os.environ.get(mask)
        self._visible = num_devices if text is None else len([word for word in text.split(",") if word.strip()])

    def set_device(self, local_index: int) -> None:
        """Choose the device of the node with this number. A process that sees one device alone uses that one.

        Raises PluginError for a device that the node has not, or that the mask hides.
        """
        index = 0 if self._visible == 1 else local_index
        if not 0 <= local_index < self._devices or index >= self._visible:
            raise PluginError(
                f"device {local_index} of {self._devices} was asked for, this process sees {self._visible}",
                where=f"acme, {self._mask}={os.environ.get(self._mask)}",
                fix="start the process on the devices of the plan",
            )
        self._host.set_device(index)

    def seed(self, seed: int) -> None:
        self._host.seed(seed)

    def rng_state(self) -> Any:
        return self._host.rng_state()

    def set_rng_state(self, state: Any) -> None:
        self._host.set_rng_state(state)

    def synchronize(self) -> None:
        self._host.synchronize()

    def memory(self) -> Mapping[str, int]:
        """Bytes: the process's resident set stands for what it holds on its device."""
        held = int(self._host.memory()["allocated"])
        return {
            "allocated": held,
            "reserved": held,
            "free": max(0, self._memory_bytes - held),
            "total": self._memory_bytes,
        }

    def empty_cache(self) -> None:
        self._host.empty_cache()
