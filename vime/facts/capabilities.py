"""What a node can do, derived from its inventory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Capabilities:
    """`device_type` is torch's name. `ipc` names the ways in which one process can open another's device memory.

    `deterministic` lists what repeats bit for bit (`trainer`, `engine`). `absent` says why something is missing,
    so that a plan can repeat it.
    """

    device_type: str
    dtypes: tuple[str, ...]
    default_dtype: str
    fp8_recipes: tuple[str, ...] = ()
    ipc: tuple[str, ...] = ()
    collectives: tuple[str, ...] = ()
    deterministic: tuple[str, ...] = ()
    virtual_devices: bool = False
    engine_frees_memory: bool = True
    absent: Mapping[str, str] = field(default_factory=dict)
