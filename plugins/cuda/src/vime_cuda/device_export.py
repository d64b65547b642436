"""Device memory that another process of the node opens: CUDA IPC through torch's storages, with JSON handles.

torch has the calls (`UntypedStorage._share_cuda_`, `_new_shared_cuda`) and uses them to pickle tensors between processes of
one program; `torch/multiprocessing/reductions.py` documents the fields. Here they travel as JSON, and the device by UUID: an
ordinal counts what its own process sees, and two processes may see different devices.

**Reference counter.** Each `_share_cuda_` takes a counter in a shared file, set to one; a process that frees what it opened
takes one off. The exporter frees a storage for good when its counter is down. Here one handle is opened by several workers
and by restarted ones, so the counter says nothing; instead the buffers live as long as the trainer's half, which engines do
not outlive in a run. torch frees what was opened without complaint when the counter's file is gone.

**Event.** A handle carries an event that was recorded when it was made, and an opener waits for it on its stream. It orders
nothing later: for that the sender waits for its device before it counts a piece, and a receiver before it counts one taken.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Mapping, Sequence
from typing import Any

from vime.errors import WeightSyncError
from vime.weights.transports.flat import host_buffer

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")

FIELDS = (
    "device",
    "handle",
    "storage_bytes",
    "storage_offset",
    "counter_handle",
    "counter_offset",
    "event_handle",
    "event_sync",
)
"""What `_share_cuda_` returns, in its order; `_new_shared_cuda` takes the same."""

_EXPANDABLE = b"e"
"""Second byte of a storage handle that torch made from an expandable segment; `c` for plain device memory."""

_PLAIN_HANDLE_BYTES = 64
"""A bare cudaIpcMemHandle, from releases of torch that put no version and kind in front of it."""


class CudaExporter:
    """Implements `vime.weights.transports.exporters.Exporter` on the current CUDA device."""

    def __init__(self, *, name: str = "") -> None:
        self._name = name

    def identity(self) -> str:
        """The GPU's UUID."""
        import torch

        return _uuid(torch.cuda.current_device())

    def allocate(self, nbytes: int) -> Any:
        """Plain device memory. Raises WeightSyncError where the allocator is set to expandable segments."""
        refuse_expandable(os.environ)
        return self.empty(nbytes)

    def export(self, tensor: Any) -> Mapping[str, Any]:
        fields = tensor.untyped_storage()._share_cuda_()
        refuse_expandable_handle(fields[FIELDS.index("handle")])
        place = {"uuid": _uuid(tensor.device.index), "offset": tensor.storage_offset(), "nbytes": tensor.numel()}
        return {**to_json(fields), **place}

    def open(self, handle: Mapping[str, Any]) -> Any:
        import torch

        visible = [_uuid(index) for index in range(torch.cuda.device_count())]
        fields = from_json(handle, device=ordinal_of(handle["uuid"], visible))
        try:
            storage = torch.UntypedStorage._new_shared_cuda(*fields)
        except RuntimeError as error:
            raise WeightSyncError(
                f"cannot open the trainer's buffer on GPU {handle['uuid']}: {str(error).splitlines()[0]}",
                fix="run trainer and engine in one container, or at least in one IPC and PID namespace; otherwise choose the "
                "collective transport",
            ) from error
        view = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        return view[handle["offset"] : handle["offset"] + handle["nbytes"]]

    def empty(self, nbytes: int) -> Any:
        import torch

        return torch.empty(nbytes, dtype=torch.uint8, device="cuda")

    def host(self, nbytes: int) -> Any:
        return host_buffer(nbytes, page_locked=True)

    def synchronize(self) -> None:
        """A copy from another GPU runs on streams of both; the current stream of this device waits for it."""
        import torch

        torch.cuda.current_stream().synchronize()

    def close(self) -> None:
        """Device memory goes with its tensors."""


def to_json(fields: Sequence[Any]) -> dict[str, Any]:
    """The fields of `_share_cuda_` by name, bytes as base64; without the exporter's ordinal."""
    named = dict(zip(FIELDS, fields, strict=True))
    del named["device"]
    return {k: {"base64": base64.b64encode(v).decode("ascii")} if isinstance(v, bytes) else v for k, v in named.items()}


def from_json(handle: Mapping[str, Any], *, device: int) -> list[Any]:
    """The arguments of `_new_shared_cuda` in a process where the exporter's device has the number `device`."""
    values = {**handle, "device": device}
    return [base64.b64decode(v["base64"]) if isinstance(v := values[name], Mapping) else v for name in FIELDS]


def ordinal_of(uuid: str, visible: Sequence[str]) -> int:
    """The number of a device among those that this process sees. Raises WeightSyncError when it sees it not."""
    if uuid not in visible:
        raise WeightSyncError(
            f"the trainer's buffers lie on GPU {uuid}, which this engine worker does not see; it sees {', '.join(visible)}",
            fix="let the engine see that GPU as well (its own first), or choose the collective transport",
        )
    return visible.index(uuid)


def refuse_expandable(environment: Mapping[str, str]) -> None:
    """Raise WeightSyncError when torch's allocator is told to use expandable segments."""
    for variable in ALLOCATOR_VARIABLES:
        options = [option.strip().lower() for option in environment.get(variable, "").split(",")]
        if "expandable_segments:true" in [option.replace(" ", "") for option in options]:
            raise WeightSyncError(
                f"{variable} turns expandable segments on: their memory cannot be opened through CUDA IPC",
                fix=f"take expandable_segments:True out of {variable} for the trainer, or choose the collective transport",
            )


def refuse_expandable_handle(handle: bytes) -> None:
    """The same by what torch really did: settings can be changed from inside a process."""
    if len(handle) != _PLAIN_HANDLE_BYTES and handle[1:2] == _EXPANDABLE:
        raise WeightSyncError(
            "torch took the buffer from an expandable segment, whose memory cannot be opened through CUDA IPC",
            fix="turn expandable segments off for the trainer, or choose the collective transport",
        )


def _uuid(index: int) -> str:
    import torch

    return str(torch.cuda.get_device_properties(index).uuid)
