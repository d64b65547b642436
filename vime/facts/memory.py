"""Who can leave a device and how: trainer memory by tag, engine sleep."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from vime.facts.process import EnvValue, Factory


class Tag(StrEnum):
    """What occupies a device."""

    PARAMS = "params"
    GRADS = "grads"
    OPTIMIZER = "optimizer"
    ACTIVATIONS = "activations"
    ENGINE_WEIGHTS = "engine_weights"
    KV = "kv"
    GRAPHS = "graphs"
    COMMUNICATORS = "communicators"


@dataclass(frozen=True, slots=True)
class TagSemantics:
    """What pause, resume and discard really do to a tag: free device memory, keep the content on the host or lose it."""

    frees: bool
    preserves: bool
    why: str = ""


@dataclass(frozen=True, slots=True)
class MemoryBackend:
    """Trainer side. `factory` builds an object with `region, pause, resume, discard, host_bytes` by tag."""

    factory: Factory
    tags: Mapping[Tag, TagSemantics]
    env: Mapping[str, EnvValue] = field(default_factory=dict)
    pinned_host: bool = False
    communicators: str = "keep"
    exclusions: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class NullMemory:
    """Nothing can leave the device, and why: time sharing then needs everything resident."""

    reason: str


@dataclass(frozen=True, slots=True)
class EngineSleep:
    """Engine side. `level` is vLLM's sleep level, 0 = pause only. `tags` says what each wake tag did."""

    level: int
    tags: Mapping[Tag, TagSemantics]
    backend: str | None = None
    args: Mapping[str, object] = field(default_factory=dict)
    env: Mapping[str, EnvValue] = field(default_factory=dict)
    why: str = ""
