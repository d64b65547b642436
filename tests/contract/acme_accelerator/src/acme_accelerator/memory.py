"""Who can leave a device and how, tag by tag. The code that does it is in `parking`."""

from __future__ import annotations

from vime.facts.memory import EngineSleep, MemoryBackend, Tag, TagSemantics
from vime.facts.process import Factory

_PARKED = "copied to the host with a checksum, freed on the device, checked when it comes back"

BACKEND = MemoryBackend(
    factory=Factory("acme_accelerator.parking:AcmeMemory"),
    tags={
        Tag.PARAMS: TagSemantics(frees=True, preserves=True, why=_PARKED),
        Tag.GRADS: TagSemantics(frees=True, preserves=True, why=_PARKED),
        Tag.OPTIMIZER: TagSemantics(frees=True, preserves=True, why=_PARKED),
        Tag.ACTIVATIONS: TagSemantics(frees=False, preserves=True, why="they are gone when the step ends"),
        Tag.COMMUNICATORS: TagSemantics(frees=False, preserves=True, why="process groups hold sockets, no device memory"),
    },
)

_PAUSED = "the engine runs on vLLM's CPU platform, whose worker only pauses"

SLEEP = EngineSleep(
    level=0,
    tags={
        Tag.ENGINE_WEIGHTS: TagSemantics(frees=False, preserves=True, why=_PAUSED),
        Tag.KV: TagSemantics(frees=False, preserves=True, why=_PAUSED),
        Tag.GRAPHS: TagSemantics(frees=False, preserves=True, why="the engine captures no graphs"),
    },
    why=_PAUSED,
)
