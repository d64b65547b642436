"""How a trainer leaves its devices."""

from __future__ import annotations

from vime.facts.memory import MemoryBackend, Tag, TagSemantics
from vime.facts.process import Factory, RoleRequest

_PARKED = "the storages are emptied, their bytes kept in page-locked host memory, and the allocator's blocks given back"
_STATE = TagSemantics(frees=True, preserves=True, why=_PARKED)

BACKEND = MemoryBackend(
    factory=Factory("vime_cuda.device_memory:DeviceMemory"),
    tags={
        Tag.PARAMS: _STATE,
        Tag.GRADS: _STATE,
        Tag.OPTIMIZER: _STATE,
        Tag.ACTIVATIONS: TagSemantics(frees=False, preserves=True, why="they are gone when the step ends"),
        Tag.COMMUNICATORS: TagSemantics(
            frees=False,
            preserves=True,
            why="kept: NCCL's buffers stay on the device (7 to 10 GB a rank were reported for runs with many groups); "
            "building the groups again at every turn would take time and can hang",
        ),
    },
    pinned_host=True,
    communicators="keep",
    exclusions=(
        "asynchronous checkpoints by a persistent writer, which may alias parked storages",
        "buffers of expert-parallel libraries (DeepEP) and of NCCL, which torch does not own",
        "storages that another process has opened by handle: they must be closed there first",
    ),
)


def backend(request: RoleRequest) -> MemoryBackend:
    """The same for every trainer."""
    return BACKEND
