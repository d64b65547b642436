"""The trainer's memory on a HIP device: parked in page-locked host memory."""

from __future__ import annotations

from vime.memory.pinned import BLOCK_BYTES, PinnedStorageMemory


class RocmMemory(PinnedStorageMemory):
    """Implements `vime.memory.protocol.TrainerMemory` for HIP storages, which torch calls cuda.

    Memory of other pools (RCCL's buffers, graphs, the HIP context) stays on the device.
    """

    def __init__(self, *, block_bytes: int = BLOCK_BYTES) -> None:
        super().__init__("cuda", block_bytes=block_bytes)
