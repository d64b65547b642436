"""Trainer memory that leaves the device with a checksum. Imported in trainer processes only."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch

from vime.errors import MemoryStateError
from vime.memory.storages import StorageMemory, bytes_of


@dataclass(frozen=True)
class Parked:
    """Bytes on the host and what they added up to when they left."""

    storage: torch.UntypedStorage
    checksum: int

    def nbytes(self) -> int:
        return self.storage.nbytes()


class AcmeMemory(StorageMemory):
    """Parks storages on the host; bytes that changed there are refused when they come back."""

    def keep(self, storage: torch.UntypedStorage) -> Parked:
        copy = super().keep(storage)
        return Parked(copy, _checksum(copy))

    def restore(self, storage: torch.UntypedStorage, copy: Parked) -> None:
        """Raises MemoryStateError when the parked bytes are not those that left."""
        if _checksum(copy.storage) != copy.checksum:
            raise MemoryStateError(
                f"{copy.nbytes()} parked bytes changed on the host",
                where="acme",
                fix="end the run, look for what writes into the trainer's memory, and resume from the last checkpoint",
            )
        super().restore(storage, copy.storage)


def _checksum(storage: torch.UntypedStorage) -> int:
    return zlib.crc32(bytes_of(storage).numpy().data)
