"""What a tray changes for a trainer's parked memory.

Where it lies is no option of the backend: the runtime binds the process to the Grace of its device before anything is
allocated, and pinned buffers come from there.
"""

from __future__ import annotations

from dataclasses import replace

from vime.facts.memory import MemoryBackend

EXCLUSIONS = ("buffers that other trays have opened by fabric handle (HybridEP, NVSHMEM): they must be closed there first",)


def amend(found: MemoryBackend) -> MemoryBackend:
    """cuda's backend with what must stay on the device."""
    return replace(found, exclusions=(*found.exclusions, *EXCLUSIONS))
