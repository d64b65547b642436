"""A GPU as a trainer's device."""

from __future__ import annotations

import os
from collections.abc import MutableMapping, Sequence

import torch

from vime.errors import TrainerError
from vime.trainer.device_runtime import TorchDeviceRuntime

SOCKETS_VARIABLE = "NCCL_SOCKET_IFNAME"
WORKSPACE_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
REPRODUCIBLE_WORKSPACES = (":4096:8", ":16:8")
"""cuBLAS documents these two as giving the same bits when several streams share a handle."""


class CudaRuntime(TorchDeviceRuntime):
    """Implements `vime.trainer.runtime.DeviceRuntime` on a CUDA device.

    Args:
        threads: host threads for computation.
        numa_cpus: see `TorchDeviceRuntime`.
        tf32: let float32 products round their inputs to 10 bits of mantissa. Off by default: a run that asks for float32
            is compared with an engine's float32.
        deterministic: the same bits in every run, or an error from the operation that cannot.
    """

    def __init__(
        self,
        threads: int = 1,
        numa_cpus: Sequence[Sequence[int]] = (),
        *,
        tf32: bool = False,
        deterministic: bool = False,
    ) -> None:
        if deterministic:
            # cuBLAS reads it once, when its first handle is made.
            require_reproducible_workspace(os.environ)
        super().__init__("cuda", threads, numa_cpus)
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
        if deterministic:
            torch.backends.cudnn.benchmark = False
            torch.use_deterministic_algorithms(True)

    def bind_sockets(self, interface: str) -> None:
        """See `vime.trainer.runtime.BindsSockets`. NCCL exchanges addresses over sockets, of itself on an outside interface."""
        os.environ.setdefault(SOCKETS_VARIABLE, interface)


def require_reproducible_workspace(environment: MutableMapping[str, str]) -> None:
    """Set cuBLAS's workspace for determinism. Raises TrainerError when the user chose one that is not reproducible."""
    chosen = environment.setdefault(WORKSPACE_VARIABLE, REPRODUCIBLE_WORKSPACES[0])
    if chosen not in REPRODUCIBLE_WORKSPACES:
        raise TrainerError(
            f"{WORKSPACE_VARIABLE}={chosen} does not give the same bits in every run",
            fix=f"unset it, or set it to one of {', '.join(REPRODUCIBLE_WORKSPACES)}",
        )
