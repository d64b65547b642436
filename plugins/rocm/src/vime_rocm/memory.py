"""How a trainer leaves its devices."""

from __future__ import annotations

from vime.facts.memory import MemoryBackend, Tag, TagSemantics
from vime.facts.process import Factory

_PARKED = "the storages are emptied and their bytes kept in pinned host memory"

BACKEND = MemoryBackend(
    factory=Factory("vime_rocm.device_memory:RocmMemory"),
    tags={
        Tag.PARAMS: TagSemantics(frees=True, preserves=True, why=_PARKED),
        Tag.GRADS: TagSemantics(frees=True, preserves=True, why=_PARKED),
        Tag.OPTIMIZER: TagSemantics(frees=True, preserves=True, why=_PARKED),
        Tag.ACTIVATIONS: TagSemantics(frees=False, preserves=True, why="they are gone when the step ends"),
        Tag.COMMUNICATORS: TagSemantics(frees=False, preserves=True, why="RCCL's buffers stay: leave room for them"),
    },
    pinned_host=True,
    communicators="keep",
    exclusions=(
        "captured graphs over parked tensors: their addresses change",
        "asynchronous checkpoints, which may read parked storages",
    ),
)
