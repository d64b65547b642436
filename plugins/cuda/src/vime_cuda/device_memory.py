"""The trainer's memory on a GPU: parked in page-locked host memory."""

from __future__ import annotations

from vime.memory.pinned import BLOCK_BYTES, PinnedStorageMemory


class DeviceMemory(PinnedStorageMemory):
    """Implements `vime.memory.protocol.TrainerMemory` for CUDA storages.

    Freed storages go back to the driver when a call ends, so that the engine on the same GPU can map them. Memory of other
    pools (communicators, graphs, the CUDA context itself) stays.
    """

    def __init__(self, *, block_bytes: int = BLOCK_BYTES) -> None:
        super().__init__("cuda", block_bytes=block_bytes)
