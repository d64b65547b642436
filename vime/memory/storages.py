"""Trainer memory by storages: frees those behind a tag's tensors and keeps every view of them valid."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import torch

from vime.errors import MemoryStateError
from vime.facts.memory import Tag
from vime.memory.protocol import Storages


class _Place(StrEnum):
    PRESENT = "present"
    PAUSED = "paused"
    DISCARDED = "discarded"


@dataclass
class _Region:
    tensors: Storages
    place: _Place = _Place.PRESENT
    storages: list[tuple[torch.UntypedStorage, int]] = field(default_factory=list)
    copies: list[torch.UntypedStorage | None] = field(default_factory=list)

    def unique_storages(self) -> list[torch.UntypedStorage]:
        found: dict[int, torch.UntypedStorage] = {}
        for tensor in self.tensors():
            storage = tensor.untyped_storage()
            found.setdefault(storage._cdata, storage)
        return list(found.values())


class StorageMemory:
    """Implements `vime.memory.protocol.TrainerMemory` for any device whose storages torch can resize.

    Platforms derive from it where bytes are kept (`keep`) and how freed memory goes back to the driver (`released`).
    Tensors that share a storage are freed together: parameters, gradient views and optimizer shards that alias one
    buffer stay aliases of it. Every wrong transition raises MemoryStateError and changes nothing.
    """

    def __init__(self) -> None:
        self._regions: dict[Tag, _Region] = {}

    def region(self, tag: Tag, tensors: Storages) -> None:
        self._regions[tag] = _Region(tensors)

    def pause(self, tags: Iterable[Tag]) -> None:
        for region in self._require(tags, _Place.PRESENT, action="pause"):
            self._free(region, keep=True)
            region.place = _Place.PAUSED
        self.released()

    def discard(self, tags: Iterable[Tag]) -> None:
        for region in self._require(tags, _Place.PRESENT, action="discard"):
            self._free(region, keep=False)
            region.place = _Place.DISCARDED
        self.released()

    def resume(self, tags: Iterable[Tag]) -> None:
        for region in self._require(tags, _Place.PAUSED, _Place.DISCARDED, action="resume"):
            for (storage, nbytes), copy in zip(region.storages, region.copies, strict=True):
                storage.resize_(nbytes)
                if copy is None:
                    torch.empty(0, dtype=torch.uint8).set_(storage).zero_()
                else:
                    self.restore(storage, copy)
            region.storages, region.copies, region.place = [], [], _Place.PRESENT

    def device_bytes(self) -> Mapping[Tag, int]:
        """Bytes by tag; a storage that two tags share counts for the tag registered first."""
        counted: set[int] = set()
        sizes: dict[Tag, int] = {}
        for tag, region in self._regions.items():
            fresh = [s for s in region.unique_storages() if s._cdata not in counted]
            counted.update(s._cdata for s in fresh)
            sizes[tag] = sum(s.nbytes() for s in fresh)
        return sizes

    def host_bytes(self) -> Mapping[Tag, int]:
        return {tag: sum(c.nbytes() for c in region.copies if c is not None) for tag, region in self._regions.items()}

    def _require(self, tags: Iterable[Tag], *places: _Place, action: str) -> list[_Region]:
        asked = list(dict.fromkeys(tags))
        for tag in asked:
            if tag not in self._regions:
                raise MemoryStateError(f"cannot {action} {tag}: nothing is registered under it")
            if (place := self._regions[tag].place) not in places:
                raise MemoryStateError(f"cannot {action} {tag}: it is {place}")
            if action != "resume" and not all(s.resizable() for s in self._regions[tag].unique_storages()):
                raise MemoryStateError(
                    f"cannot {action} {tag}: a storage is shared with an array outside torch",
                    fix="copy a tensor before taking a numpy view of it",
                )
        return [self._regions[tag] for tag in asked]

    def keep(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        """A copy on the host."""
        copy = torch.UntypedStorage(storage.nbytes())
        copy.copy_(storage, non_blocking=False)
        return copy

    def restore(self, storage: torch.UntypedStorage, copy: torch.UntypedStorage) -> None:
        """Fill a storage, already of its size, from the copy that `keep` made."""
        storage.copy_(copy, non_blocking=False)

    def released(self) -> None:
        """Called after storages were freed: give cached memory back where an allocator holds it."""

    def _free(self, region: _Region, *, keep: bool) -> None:
        for storage in region.unique_storages():
            region.storages.append((storage, storage.nbytes()))
            region.copies.append(self.keep(storage) if keep else None)
            storage.resize_(0)
