"""A trainer's accelerator through torch's device-neutral modules."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from vime.errors import TrainerError


class TorchDeviceRuntime:
    """Implements `vime.trainer.runtime.DeviceRuntime` over `torch.get_device_module(device_type)`.

    Platforms derive from it to set what their libraries read at start, before or after `super().__init__`.

    Args:
        device_type: torch's name of the device.
        threads: host threads for computation.
        numa_cpus: for each device of the node, in the inventory's order, the processors next to it. `bind_host` binds the
            process to those of its device before anything is allocated; page-locked memory then lies next to it too.
    """

    def __init__(self, device_type: str, threads: int = 1, numa_cpus: Sequence[Sequence[int]] = ()) -> None:
        self.device_type = device_type
        self._numa_cpus = tuple(tuple(cpus) for cpus in numa_cpus)
        torch.set_num_threads(threads)
        self._device = self.load_device()
        if not self._device.is_available():
            raise TrainerError(
                f"torch {torch.__version__} sees no {device_type} device in this process",
                fix="check the driver, the installed torch build and the visible-device variables (`vime doctor`)",
            )

    def load_device(self) -> Any:
        """The device's module of torch."""
        try:
            return torch.get_device_module(self.device_type)
        except RuntimeError as error:
            raise TrainerError(
                f"this torch ({torch.__version__}) knows no device type {self.device_type}: {error}",
                fix="install the torch build or extension of this platform",
            ) from error

    def set_device(self, local_index: int) -> None:
        """Make a device current. A process that sees one device alone uses that one, whatever the index.

        Raises TrainerError when it sees several and not this one.
        """
        count = self._device.device_count()
        index = 0 if count == 1 else local_index
        if index >= count:
            raise TrainerError(
                f"this process sees {count} devices and is to use number {local_index}",
                fix="let a trainer process see its own device alone, or all devices of its node",
            )
        self._device.set_device(index)

    def bind_host(self, node_device: int) -> None:
        """See `vime.trainer.runtime.BindsHost`."""
        if node_device < len(self._numa_cpus):
            bind_numa(self._numa_cpus[node_device])

    def seed(self, seed: int) -> None:
        self._device.manual_seed_all(seed)

    def rng_state(self) -> torch.Tensor:
        """The current device's generator; a host tensor."""
        return self._device.get_rng_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        self._device.set_rng_state(state)

    def synchronize(self) -> None:
        self._device.synchronize()

    def memory(self) -> Mapping[str, int]:
        """Bytes: `allocated` in tensors and `reserved` by torch of this process, `free` and `total` of the whole device."""
        free, total = self._device.mem_get_info()
        return {
            "allocated": self._device.memory_allocated(),
            "reserved": self._device.memory_reserved(),
            "free": free,
            "total": total,
        }

    def empty_cache(self) -> None:
        self._device.empty_cache()


def bind_numa(cpus: Iterable[int]) -> tuple[int, ...]:
    """Bind this process to those of `cpus` that it may use at all -> the processors it then has.

    With none of them allowed (a container with other processors) nothing changes. Memory comes from the node of the
    processor that touches it first, so call this before the first allocation.
    """
    if not hasattr(os, "sched_setaffinity"):
        return ()
    chosen = set(cpus) & os.sched_getaffinity(0)
    if chosen:
        os.sched_setaffinity(0, chosen)
    return tuple(sorted(os.sched_getaffinity(0)))
