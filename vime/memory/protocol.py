"""The trainer's memory backend as a platform provides it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from vime.facts.memory import Tag

Storages = Callable[[], Iterable[Any]]
"""Gives the torch tensors whose storages make up a tag, afresh at each call."""


class TrainerMemory(Protocol):
    """Built by the factory that `vime_memory_backend` names, in a trainer rank."""

    def region(self, tag: Tag, tensors: Storages) -> None:
        """Register what a tag owns."""
        ...

    def pause(self, tags: Iterable[Tag]) -> None:
        """Free the tags' device storage and keep the content on the host."""
        ...

    def resume(self, tags: Iterable[Tag]) -> None:
        """Bring paused tags back, content intact; discarded tags come back as zeros."""
        ...

    def discard(self, tags: Iterable[Tag]) -> None:
        """Free the tags' device storage and lose the content."""
        ...

    def device_bytes(self) -> Mapping[Tag, int]: ...

    def host_bytes(self) -> Mapping[Tag, int]: ...
