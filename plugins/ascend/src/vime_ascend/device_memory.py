"""Parks a trainer's storages in pinned host memory. No line of this module has run on hardware."""

from __future__ import annotations

from typing import Any

import torch

from vime.memory.storages import StorageMemory, bytes_of


class NpuMemory(StorageMemory):
    """Copies without blocking and waits once a call.

    Args:
        pluggable_allocator: the trainer allocates through an allocator of its own. Emptying torch's cache fails under such
            a one, so it is left out: freed memory then stays with this process.
        device: torch's module of the device; `torch.npu` by default.
        pin: keep copies in page-locked memory, without which no copy overlaps another.
    """

    def __init__(self, pluggable_allocator: bool = False, *, device: Any = None, pin: bool = True) -> None:
        super().__init__()
        self._pluggable = pluggable_allocator
        self._device = torch.get_device_module("npu") if device is None else device
        self._pin = pin

    def keep(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        copy = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=self._pin)
        copy.copy_(bytes_of(storage), non_blocking=True)
        return copy.untyped_storage()

    def restore(self, storage: torch.UntypedStorage, copy: torch.UntypedStorage) -> None:
        bytes_of(storage).copy_(bytes_of(copy), non_blocking=True)

    def settle(self) -> None:
        self._device.synchronize()

    def released(self) -> None:
        if not self._pluggable:
            self._device.empty_cache()
