"""How a trainer leaves its chips."""

from __future__ import annotations

from vime.facts.memory import MemoryBackend, Tag, TagSemantics
from vime.facts.process import Factory, RoleRequest

_PARKED = "storages are freed and their bytes kept in host memory; the allocator's cache goes back to the driver"


def backend(request: RoleRequest) -> MemoryBackend:
    """Parks by storage, as on other devices: no library has to be preloaded, and allocator options stay the user's."""
    return MemoryBackend(
        factory=Factory("vime_ascend.device_memory:NpuMemory"),
        tags={
            Tag.PARAMS: TagSemantics(frees=True, preserves=True, why=_PARKED),
            Tag.GRADS: TagSemantics(frees=True, preserves=True, why=_PARKED),
            Tag.OPTIMIZER: TagSemantics(frees=True, preserves=True, why=_PARKED),
            Tag.ACTIVATIONS: TagSemantics(frees=False, preserves=True, why="they are gone when the step ends"),
            Tag.COMMUNICATORS: TagSemantics(
                frees=False, preserves=True, why="HCCL keeps 2 x HCCL_BUFFSIZE a communicator outside torch's allocator"
            ),
        },
        pinned_host=True,
        communicators="keep",
        exclusions=(
            "asynchronous checkpoints by a persistent writer, which may alias parked storages",
            "a pluggable allocator in the trainer (torch_memory_saver): emptying the cache under it fails",
        ),
    )
