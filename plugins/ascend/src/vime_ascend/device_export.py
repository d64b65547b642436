"""Device memory that another process can open, by torch_npu's storage sharing. No line of this module has run on hardware.

torch_npu shares a storage as eight fields, in the order of torch's own device sharing: device, memory handle, size and
offset in bytes, handle and offset of a reference counter, event handle, whether to wait for the event. Events cannot be
sent (the handle is empty), so the sender waits for its copies before it lets anyone read. Only memory in ND layout can be
shared, which flat bytes always are, and only inside one node. Facts: torch_npu's guide to sharing memory, CANN 8.3.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from vime.errors import WeightSyncError
from vime_ascend.process import VISIBLE

FIELDS = (
    *("device", "memory", "size_bytes", "offset_bytes"),
    *("counter", "counter_offset", "event", "event_wait"),
)
_BOOT = Path("/proc/sys/kernel/random/boot_id")

Share = Callable[[torch.UntypedStorage], Sequence[Any]]
Rebuild = Callable[..., torch.UntypedStorage]


class NpuExporter:
    """Implements `vime.weights.transports.exporters.Exporter`; both halves of a transport build one.

    The node is known by its kernel's boot id, which is the same in all its containers, unlike host names and addresses
    behind NAT. An opened handle is kept: opening one twice releases torch_npu's reference counter once too often.

    Args:
        name: not used, nothing has to be named on the machine.
        share, rebuild: torch_npu's `_share_npu_` and `_new_shared_npu`.
        device: torch's module of the device; `torch.npu` by default.
        node: what tells this node from others.
    """

    device_type = "npu"

    def __init__(
        self,
        name: str = "",
        *,
        share: Share | None = None,
        rebuild: Rebuild | None = None,
        device: Any = None,
        node: str | None = None,
    ) -> None:
        self._share = share or _share_npu
        self._rebuild = rebuild or _new_shared_npu
        self._device = _npu() if device is None else device
        self._node = node if node is not None else boot_id()
        self._opened: dict[tuple[Any, ...], torch.Tensor] = {}

    def identity(self) -> str:
        """The node and the chip's logical id, which the mask lists: a device's number counts inside the mask."""
        number = int(self._device.current_device())
        masked = [entry.strip() for entry in os.environ.get(VISIBLE, "").split(",") if entry.strip()]
        return f"{self._node}/{masked[number] if number < len(masked) else number}"

    def allocate(self, nbytes: int) -> torch.Tensor:
        return self.empty(nbytes)

    def export(self, tensor: torch.Tensor) -> Mapping[str, Any]:
        fields = self._share(tensor.untyped_storage())
        return {"node": self._node, "nbytes": tensor.nbytes, "start": tensor.storage_offset(), "fields": to_json(fields)}

    def open(self, handle: Mapping[str, Any]) -> torch.Tensor:
        """The exporter's bytes, mapped onto this process's current device. Raises WeightSyncError for another node's."""
        if handle["node"] != self._node:
            raise WeightSyncError(
                f"the buffer is of another node (boot id {handle['node']}, here {self._node})",
                fix="device memory is shared inside one node: place trainer and engine there, or choose another transport",
            )
        fields = from_json(handle["fields"])
        if fields not in self._opened:
            # The exporter's device number counts in its own mask; the memory is mapped onto the reader's device instead.
            storage = self._rebuild(self._device.current_device(), *fields[1:])
            self._opened[fields] = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        start = int(handle["start"])
        return self._opened[fields][start : start + int(handle["nbytes"])]

    def empty(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device_type)

    def host(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=self.device_type != "cpu")

    def synchronize(self) -> None:
        self._device.synchronize()

    def close(self) -> None:
        self._opened.clear()


def to_json(fields: Sequence[Any]) -> dict[str, Any]:
    """The shared fields by name; bytes as base64. Raises WeightSyncError for a torch_npu that shares otherwise."""
    if len(fields) != len(FIELDS):
        raise WeightSyncError(
            f"torch_npu shares a storage as {len(fields)} fields, {len(FIELDS)} are known",
            fix="choose the collective or host_shm transport with this torch_npu",
        )
    packed = {name: _packed(value) for name, value in zip(FIELDS, fields, strict=True)}
    return {**packed, "device": None}


def from_json(fields: Mapping[str, Any]) -> tuple[Any, ...]:
    """The inverse of `to_json`, but for the device."""
    return tuple(_unpacked(fields[name]) for name in FIELDS)


def _packed(value: Any) -> Any:
    return {"base64": base64.b64encode(bytes(value)).decode()} if isinstance(value, bytes | bytearray) else value


def _unpacked(value: Any) -> Any:
    return base64.b64decode(value["base64"]) if isinstance(value, Mapping) else value


def boot_id() -> str:
    """The identity of the running kernel. Raises WeightSyncError where there is none to read."""
    try:
        return _BOOT.read_text().strip()
    except OSError as error:
        raise WeightSyncError(
            f"cannot read {_BOOT}: {error.strerror}, so it is not known who is on this node",
            fix="mount /proc in the container, or choose another transport",
        ) from error


def _npu() -> Any:
    import torch_npu  # noqa: F401  # pyright: ignore[reportMissingImports]  registers the device and the sharing of storages

    return torch.get_device_module("npu")


def _share_npu(storage: torch.UntypedStorage) -> Sequence[Any]:
    shared: Any = storage
    return shared._share_npu_()


def _new_shared_npu(*fields: Any) -> torch.UntypedStorage:
    kind: Any = torch.UntypedStorage
    return kind._new_shared_npu(*fields)
