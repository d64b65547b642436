"""The host as a trainer's device."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import psutil
import torch

from vime.platforms.cpu import affinity, host_facade


class HostRuntime:
    """Implements `vime.trainer.runtime.DeviceRuntime`; building it makes megatron-core run on the host.

    Args:
        threads: host threads for computation.
        deterministic: the same bits in every run, or an error from the operation that cannot.
    """

    device_type = "cpu"

    def __init__(self, threads: int = 1, deterministic: bool = False) -> None:
        affinity.bind()
        torch.set_num_threads(threads)
        if deterministic:
            torch.use_deterministic_algorithms(True)
            # Otherwise every new tensor is filled first, which takes time and changes no result.
            settings: Any = torch.utils.deterministic
            settings.fill_uninitialized_memory = False
        host_facade.install()
        self._libc = _libc()

    def set_device(self, local_index: int) -> None:
        """A host is one device, whatever the index."""

    def seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def rng_state(self) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        torch.set_rng_state(state)

    def synchronize(self) -> None:
        """Work on a host is done when the call returns."""

    def memory(self) -> Mapping[str, int]:
        """Bytes: `allocated` is the process's resident set, `free` and `total` are the machine's."""
        machine = psutil.virtual_memory()
        resident = psutil.Process().memory_info().rss
        return {"allocated": resident, "reserved": resident, "free": machine.available, "total": machine.total}

    def empty_cache(self) -> None:
        """Give freed heap pages back to the system, where the C library can."""
        if self._libc is not None:
            self._libc.malloc_trim(0)


def _libc() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL(None)
        return library if hasattr(library, "malloc_trim") else None
    except (OSError, TypeError):
        return None
