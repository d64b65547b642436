"""Trainer memory by storages: frees those behind a tag's tensors and keeps every view of them valid."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

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
    copies: list[Any] = field(default_factory=list)
    """What `keep` returned, None for a storage whose content was discarded."""

    def unique_storages(self) -> list[torch.UntypedStorage]:
        found: dict[int, torch.UntypedStorage] = {}
        for tensor in self.tensors():
            storage = tensor.untyped_storage()
            found.setdefault(storage._cdata, storage)
        return list(found.values())


class StorageMemory:
    """Implements `vime.memory.protocol.TrainerMemory` for any device whose storages torch can resize.

    Tensors that share a storage are freed together: parameters, gradient views and optimizer shards that alias one
    buffer stay aliases of it. Every wrong transition, and running out of memory on the way, raises MemoryStateError and
    changes nothing.

    Platforms derive from it and override, as they need: `keep` and `restore` (one storage to its copy and back; both may
    return before the bytes have moved), `settle` (wait until all of them have), `forget` (a copy is not needed any more)
    and `released` (device memory was freed). A copy is any object with `nbytes()`.
    """

    def __init__(self) -> None:
        self._regions: dict[Tag, _Region] = {}

    def region(self, tag: Tag, tensors: Storages) -> None:
        self._regions[tag] = _Region(tensors)

    def pause(self, tags: Iterable[Tag]) -> None:
        regions = self._require(tags, _Place.PRESENT, action="pause")
        found = [region.unique_storages() for region in regions]
        copies: list[list[Any]] = [[] for _ in regions]
        with _nothing_lost("pause", lambda: self._forget_all(copies)):
            for storages, kept in zip(found, copies, strict=True):
                for storage in storages:
                    kept.append(self.keep(storage))
            self.settle()
        for region, storages, kept in zip(regions, found, copies, strict=True):
            self._free(region, storages, kept, place=_Place.PAUSED)
        self.released()

    def discard(self, tags: Iterable[Tag]) -> None:
        for region in self._require(tags, _Place.PRESENT, action="discard"):
            storages = region.unique_storages()
            self._free(region, storages, [None] * len(storages), place=_Place.DISCARDED)
        self.released()

    def resume(self, tags: Iterable[Tag]) -> None:
        regions = self._require(tags, _Place.PAUSED, _Place.DISCARDED, action="resume")
        pairs = [pair for region in regions for pair in zip(region.storages, region.copies, strict=True)]

        def undo() -> None:
            self.settle()
            self._empty(storage for (storage, _), _ in pairs)

        with _nothing_lost("resume", undo):
            for (storage, nbytes), _ in pairs:
                storage.resize_(nbytes)
            for (storage, _), copy in pairs:
                if copy is None:
                    bytes_of(storage).zero_()
                else:
                    self.restore(storage, copy)
            self.settle()
        self._forget_all([region.copies for region in regions])
        for region in regions:
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

    def keep(self, storage: torch.UntypedStorage) -> Any:
        """A copy on the host."""
        copy = torch.UntypedStorage(storage.nbytes())
        copy.copy_(storage, non_blocking=False)
        return copy

    def restore(self, storage: torch.UntypedStorage, copy: Any) -> None:
        """Fill a storage, already of its size, from the copy that `keep` made."""
        storage.copy_(copy, non_blocking=False)

    def settle(self) -> None:
        """Called once a call, after every `keep` or `restore`: return when all bytes have moved."""

    def forget(self, copy: Any) -> None:
        """Called for every copy that is not needed any more."""

    def released(self) -> None:
        """Called after storages were freed: give cached memory back where an allocator holds it."""

    def _free(self, region: _Region, storages: list[torch.UntypedStorage], copies: list[Any], *, place: _Place) -> None:
        region.storages, region.copies, region.place = [(s, s.nbytes()) for s in storages], copies, place
        self._empty(storages)

    def _empty(self, storages: Iterable[torch.UntypedStorage]) -> None:
        for storage in storages:
            storage.resize_(0)

    def _forget_all(self, copies: Iterable[Iterable[Any]]) -> None:
        for copy in (copy for kept in copies for copy in kept if copy is not None):
            self.forget(copy)


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """A storage as a uint8 tensor on its device; no copy."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


@contextmanager
def _nothing_lost(action: str, undo: Callable[[], None]) -> Iterator[None]:
    """Undo a transition that memory does not allow. torch reports it as a RuntimeError (device) or MemoryError (host)."""
    try:
        yield
    except MemoryStateError:
        undo()
        raise
    except (RuntimeError, MemoryError) as error:
        undo()
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise MemoryStateError(
            f"cannot {action}: {first}; everything is where it was", fix="free memory on the host or device, then try again"
        ) from error
