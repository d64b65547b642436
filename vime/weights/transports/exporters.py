"""Memory that another process of the node can open: what `device_ipc` needs of a platform, and the host's own kind."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from vime.errors import WeightSyncError
from vime.facts.process import Factory
from vime.weights.transports.flat import host_buffer

SHARED_MEMORY = Path("/dev/shm")
HOST = "host"
"""The identity of the host's memory, which every process of a node has as its own."""


class Exporter(Protocol):
    """One per process and half. Built as `callable(name=...)`: `name` begins whatever it must name on the machine.

    Both halves of an edge use the same exporter. Nothing is pickled: a handle is JSON.
    """

    def identity(self) -> str:
        """This process's device: equal in all processes of the node that have it as their own, and in no others."""
        ...

    def allocate(self, nbytes: int) -> Any:
        """A uint8 tensor [nbytes] on this process's device whose memory can be exported."""
        ...

    def export(self, tensor: Any) -> Mapping[str, Any]:
        """A handle to what `allocate` returned; good while the tensor lives, for any number of processes."""
        ...

    def open(self, handle: Mapping[str, Any]) -> Any:
        """The same bytes in another process. Raises WeightSyncError saying why this process cannot reach them."""
        ...

    def empty(self, nbytes: int) -> Any:
        """A uint8 tensor [nbytes] in ordinary memory of this process's device."""
        ...

    def host(self, nbytes: int) -> Any:
        """A uint8 tensor [nbytes] on the host, page-locked where that makes copies faster."""
        ...

    def synchronize(self) -> None:
        """Return when all copies asked for so far are done."""
        ...

    def close(self) -> None:
        """Give up what was allocated; opened memory goes with its tensors."""
        ...


def build_exporter(target: str, *, name: str) -> Exporter:
    """`module:callable` -> exporter. Raises WeightSyncError when it cannot be imported."""
    try:
        return Factory(target).build(name=name)
    except (ImportError, AttributeError) as error:
        raise WeightSyncError(
            f"cannot build the exporter {target}: {error}", fix="install the platform's plugin beside trainer and engine"
        ) from error


class HostExporter:
    """Host memory in files that both processes map. `name` is `vime-<run>`; its owner's process id is in the file's name."""

    def __init__(self, *, name: str = "vime-host", directory: Path | str = SHARED_MEMORY) -> None:
        self._stem = Path(directory) / name
        self._paths: dict[int, Path] = {}
        self._count = 0

    def identity(self) -> str:
        return HOST

    def allocate(self, nbytes: int) -> Any:
        path = self._stem.with_name(f"{self._stem.name}-b{self._count}-{os.getpid()}-w")
        self._count += 1
        try:
            handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
            try:
                os.posix_fallocate(handle, 0, max(nbytes, 1))
            finally:
                os.close(handle)
        except OSError as error:
            raise WeightSyncError(
                f"cannot reserve {nbytes} bytes as {path}: {error.strerror}", fix="free shared memory (`df -h /dev/shm`)"
            ) from None
        tensor = _mapped(path, nbytes)
        self._paths[tensor.data_ptr()] = path
        return tensor

    def export(self, tensor: Any) -> Mapping[str, Any]:
        return {"path": str(self._paths[tensor.data_ptr()]), "nbytes": tensor.numel()}

    def open(self, handle: Mapping[str, Any]) -> Any:
        path = Path(handle["path"])
        if not path.is_file():
            raise WeightSyncError(f"there is no {path} here", fix="trainer and engine must run on one host")
        return _mapped(path, int(handle["nbytes"]))

    def empty(self, nbytes: int) -> Any:
        return host_buffer(nbytes, page_locked=False)

    def host(self, nbytes: int) -> Any:
        return self.empty(nbytes)

    def synchronize(self) -> None:
        """Copies on a host are done when the call returns."""

    def close(self) -> None:
        for path in self._paths.values():
            path.unlink(missing_ok=True)
        self._paths.clear()


def _mapped(path: Path, nbytes: int) -> Any:
    import torch

    return torch.from_file(str(path), shared=True, size=max(nbytes, 1), dtype=torch.uint8)[:nbytes]
