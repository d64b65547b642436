"""Device memory that another process of the node opens, over torch's sharing of storages.

A HIP memory handle names its device by the exporter's number, and HIP looks that number up among the devices that the
importer sees. So both processes must see the exporter's device under one number. Masks put a process's own devices first and
then the rest of the node, which makes that number 0 for a trainer rank and for the engine whose first device is the same one.
`HipExporter.open` compares the devices' UUIDs and refuses instead of reading another device's memory.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Mapping
from typing import Any

import torch

from vime.errors import WeightSyncError
from vime_rocm import allocator

_BYTES = ("handle", "ref_counter_handle", "event_handle")
_FIELDS = (
    "device",
    "handle",
    "storage_bytes",
    "storage_offset",
    "ref_counter_handle",
    "ref_counter_offset",
    "event_handle",
    "event_sync_required",
)
"""What torch's `_share_cuda_` returns and `_new_shared_cuda` takes, in order."""


class HipExporter:
    """Implements `vime.weights.transports.exporters.Exporter`. A handle is JSON; nothing is pickled.

    Torch counts the processes that hold a shared storage in a file of its own; the exporter keeps its buffers, and the
    importer what it opened, until `close`, so that the count never decides about a buffer in use. The event of a handle is of
    the moment of export only: `synchronize` on both sides orders later contents.

    Args:
        name: begins what an exporter names on the machine; this one names nothing.
    """

    def __init__(self, *, name: str = "") -> None:
        self._device = self.load_device()
        self._allocated: list[torch.Tensor] = []
        self._opened: dict[str, torch.Tensor] = {}

    def load_device(self) -> Any:
        """The device's module of torch."""
        return torch.cuda

    def identity(self) -> str:
        """The UUID of this process's device."""
        return self._uuid(self._device.current_device())

    def empty(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device="cuda")

    def host(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def allocate(self, nbytes: int) -> torch.Tensor:
        """A uint8 tensor [nbytes]. Raises WeightSyncError where torch's allocator makes memory that HIP cannot export."""
        if names := allocator.growing(os.environ):
            raise WeightSyncError(
                f"{' and '.join(names)} turns expandable segments on, whose memory has no HIP handle",
                fix=f"take {allocator.SEGMENTS} out of {' and '.join(names)}, or forbid device_ipc in the topology's sync",
            )
        tensor = self.empty(nbytes)
        self._allocated.append(tensor)
        return tensor

    def export(self, tensor: torch.Tensor) -> Mapping[str, Any]:
        """Raises WeightSyncError when HIP gives no handle."""
        try:
            values = self.share(tensor.untyped_storage())
        except RuntimeError as error:
            raise WeightSyncError(
                f"HIP exports no memory here: {_first_line(error)}",
                fix="unset HSA_ENABLE_IPC_MODE_LEGACY and see `vime doctor`, or forbid device_ipc in the topology's sync",
            ) from error
        handle = dict(zip(_FIELDS, values, strict=True))
        encoded = {name: base64.b64encode(handle[name]).decode() for name in _BYTES}
        offset = tensor.storage_offset() * tensor.element_size()
        return {**handle, **encoded, "uuid": self._uuid(handle["device"]), "offset": offset, "nbytes": tensor.numel()}

    def open(self, handle: Mapping[str, Any]) -> torch.Tensor:
        """Raises WeightSyncError unless this process sees the exporter's device under the exporter's number."""
        number, uuid = int(handle["device"]), str(handle["uuid"])
        seen = [self._uuid(i) for i in range(self._device.device_count())]
        if number >= len(seen) or seen[number] != uuid:
            here = f"here that is {seen[number]}" if number < len(seen) else f"{len(seen)} devices are visible here"
            raise WeightSyncError(
                f"the trainer exports memory of device {uuid} as its number {number}; {here}, and HIP would look there",
                fix="list the trainer's device at the same place in both HIP_VISIBLE_DEVICES, then the node's others",
            )
        key = f"{handle['handle']}+{handle['storage_offset']}"
        if key not in self._opened:
            values = {name: base64.b64decode(handle[name]) if name in _BYTES else handle[name] for name in _FIELDS}
            try:
                storage = self.rebuild(*(values[name] for name in _FIELDS))
            except RuntimeError as error:
                raise WeightSyncError(
                    f"HIP cannot open memory of device {uuid}: {_first_line(error)}",
                    fix="see `vime doctor`, or forbid device_ipc in the topology's sync",
                ) from error
            self._opened[key] = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        start = int(handle["offset"])
        return self._opened[key][start : start + int(handle["nbytes"])]

    def synchronize(self) -> None:
        self._device.synchronize()

    def close(self) -> None:
        self._opened.clear()
        self._allocated.clear()

    def share(self, storage: torch.UntypedStorage) -> tuple[Any, ...]:
        """The values of `_FIELDS`."""
        shared: Any = storage
        return shared._share_cuda_()

    def rebuild(self, *values: Any) -> torch.UntypedStorage:
        """The storage behind the values of `_FIELDS`."""
        self._device._lazy_init()
        return torch.UntypedStorage._new_shared_cuda(*values)

    def _uuid(self, number: int) -> str:
        return str(self._device.get_device_properties(number).uuid)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
