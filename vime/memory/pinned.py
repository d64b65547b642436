"""Trainer memory on an accelerator: storages parked in page-locked host memory, which stays for the next time."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psutil
import torch

from vime.errors import MemoryStateError
from vime.memory.storages import StorageMemory, bytes_of

BLOCK_BYTES = 64 * 2**20
"""A power of two: torch's page-locked allocator rounds every request up to one."""

_ALIGNMENT = 512


@dataclass(frozen=True, slots=True)
class Parcel:
    """One storage's bytes on the host, in order, in parts of blocks."""

    pieces: tuple[torch.Tensor, ...]
    blocks: tuple[int, ...]

    def nbytes(self) -> int:
        return sum(piece.numel() for piece in self.pieces)


class BlockPool:
    """Host memory in blocks of one size, handed out front to back and used again once everything in a block is returned.

    Blocks are never given back, because page-locking memory is slow and the next park needs as much.
    """

    def __init__(self, block_bytes: int = BLOCK_BYTES, *, page_locked: bool = True) -> None:
        self._block_bytes = block_bytes
        self._page_locked = page_locked
        self._blocks: list[torch.Tensor] = []
        self._users: Counter[int] = Counter()
        self._open: int | None = None
        self._used = 0

    @property
    def nbytes(self) -> int:
        """Host bytes held, in use or not."""
        return len(self._blocks) * self._block_bytes

    def take(self, nbytes: int) -> Parcel:
        """Room for `nbytes`. Raises MemoryStateError when the host has none; nothing is taken then."""
        pieces: list[torch.Tensor] = []
        blocks: list[int] = []
        try:
            while nbytes:
                block = self._block_with_room()
                size = min(nbytes, self._block_bytes - self._used)
                pieces.append(self._blocks[block][self._used : self._used + size])
                blocks.append(block)
                self._users[block] += 1
                self._used = min(self._block_bytes, self._used + -(-size // _ALIGNMENT) * _ALIGNMENT)
                nbytes -= size
        except MemoryStateError:
            self.give_back(Parcel(tuple(pieces), tuple(blocks)))
            raise
        return Parcel(tuple(pieces), tuple(blocks))

    def give_back(self, parcel: Parcel) -> None:
        self._users.subtract(parcel.blocks)
        if self._open is not None and not self._users[self._open]:
            self._used = 0

    def _block_with_room(self) -> int:
        if self._open is not None and self._used < self._block_bytes:
            return self._open
        free = next((i for i in range(len(self._blocks)) if not self._users[i]), None)
        if free is None:
            self._blocks.append(self._new_block())
            free = len(self._blocks) - 1
        self._open, self._used = free, 0
        return free

    def _new_block(self) -> torch.Tensor:
        if self._page_locked:
            try:
                return torch.empty(self._block_bytes, dtype=torch.uint8, pin_memory=True)
            except RuntimeError as error:
                self._page_locked = False
                reason = str(error).splitlines()[0]
                warnings.warn(f"parking in pageable memory, which is slower: none to page-lock ({reason})", stacklevel=2)
        # The kernel promises pageable memory that it does not have and ends a process later, so look first.
        if (available := psutil.virtual_memory().available) < self._block_bytes:
            raise MemoryStateError(
                f"the host has {available} bytes left, parking needs {self._block_bytes} more",
                fix="use residency: resident, or fewer trainer ranks per host",
            )
        return torch.empty(self._block_bytes, dtype=torch.uint8)


class PinnedStorageMemory(StorageMemory):
    """Parks storages of an accelerator that torch knows as `device_type`.

    All copies of a call run on a stream of their own behind the work queued before them, with one wait at the end. Host
    blocks are kept from one park to the next. Where page-locked memory runs out, pageable memory takes its place with one
    warning; where the host has none at all, the call raises MemoryStateError and everything stays on the device.
    """

    def __init__(self, device_type: str, *, block_bytes: int = BLOCK_BYTES) -> None:
        super().__init__()
        self._device = self.load_device(device_type)
        self._pool = self.host_blocks(block_bytes)
        self._stream: Any = None
        self._is_copying = False

    def load_device(self, device_type: str) -> Any:
        """The device's module of torch: streams and the caching allocator."""
        return torch.get_device_module(device_type)

    def host_blocks(self, block_bytes: int) -> BlockPool:
        """Where copies go."""
        return BlockPool(block_bytes)

    @property
    def held_bytes(self) -> int:
        """Host bytes that stay allocated between parks; `host_bytes` counts what is parked now."""
        return self._pool.nbytes

    def keep(self, storage: torch.UntypedStorage) -> Parcel:
        parcel = self._pool.take(storage.nbytes())
        with self._device.stream(self._copying()):
            for piece, part in _paired(parcel, storage):
                piece.copy_(part, non_blocking=True)
        return parcel

    def restore(self, storage: torch.UntypedStorage, copy: Parcel) -> None:
        with self._device.stream(self._copying()):
            for piece, part in _paired(copy, storage):
                part.copy_(piece, non_blocking=True)

    def settle(self) -> None:
        if self._is_copying:
            self._stream.synchronize()
            self._is_copying = False

    def forget(self, copy: Parcel) -> None:
        self.settle()
        self._pool.give_back(copy)

    def released(self) -> None:
        """Freed storages are in the caching allocator still; the engine needs them at the driver."""
        self._device.empty_cache()

    def _copying(self) -> Any:
        """The copy stream, behind everything that the current stream was given so far."""
        if self._stream is None:
            self._stream = self._device.Stream()
        self._stream.wait_stream(self._device.current_stream())
        self._is_copying = True
        return self._stream


def _paired(parcel: Parcel, storage: torch.UntypedStorage) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(host piece, the storage's bytes that belong to it)."""
    device_bytes, start = bytes_of(storage), 0
    for piece in parcel.pieces:
        yield piece, device_bytes[start : start + piece.numel()]
        start += piece.numel()
