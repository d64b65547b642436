"""Code that the sound platform's factories name, and faulty variants of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from vime.facts.memory import Tag
from vime.memory.storages import StorageMemory
from vime.weights.transports.disk import DiskEngine, DiskTrainer


class Runtime:
    """A device runtime on host tensors."""

    device_type = "cpu"

    def __init__(self, *, threads: int = 1) -> None:
        self.threads = threads

    def set_device(self, local_index: int) -> None:
        self.index = local_index

    def seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def rng_state(self) -> Any:
        return torch.get_rng_state()

    def set_rng_state(self, state: Any) -> None:
        torch.set_rng_state(state)

    def synchronize(self) -> None:
        self.synchronized = True

    def memory(self) -> Mapping[str, int]:
        return {"allocated": 0}

    def empty_cache(self) -> None:
        self.emptied = True


class RuntimeWithoutGenerator:
    device_type = "cpu"

    def set_device(self, local_index: int) -> None:
        self.index = local_index


class Memory(StorageMemory):
    """Parks storages."""


class ForgetfulMemory(Memory):
    """Comes back as zeros."""

    def restore(self, storage: torch.UntypedStorage, copy: torch.UntypedStorage) -> None:
        torch.empty(0, dtype=torch.uint8).set_(storage).zero_()


class HastyMemory(Memory):
    """Moves the first tag before it looks at the second."""

    def pause(self, tags: Iterable[Tag]) -> None:
        for tag in tags:
            super().pause([tag])


class IdleMemory(Memory):
    """Frees nothing."""

    def pause(self, tags: Iterable[Tag]) -> None:
        self._require(tags, *_present(), action="pause")

    def resume(self, tags: Iterable[Tag]) -> None:
        self._require(tags, *_present(), action="resume")


def _present() -> tuple[Any, ...]:
    from vime.memory.storages import _Place

    return (_Place.PRESENT,)


class LinkTrainer(DiskTrainer):
    """The trainer's half of a protocol of one's own, with a lane that both ends must agree on."""

    def __init__(self, *, lane: int = 0, **keywords: Any) -> None:
        super().__init__(**keywords)
        self.lane = lane


class LinkEngine(DiskEngine):
    """The engine's half of it."""

    def __init__(self, *, lane: int = 0) -> None:
        super().__init__()
        self.lane = lane


class LosingEngine(DiskEngine):
    """Leaves out the last tensor."""

    def receive(self, info: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
        return list(super().receive(info))[:-1]


class ChangingEngine(DiskEngine):
    """Changes what it delivers."""

    def receive(self, info: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
        return [(name, tensor + 1) for name, tensor in super().receive(info)]


class HalfWithoutReceive:
    def connect(self, info: Mapping[str, Any]) -> None:
        self.info = info

    def close(self) -> None:
        self.info = {}


class Norm:
    """A piece of a model."""
