"""Which devices a process sees, and who says so.

`ASCEND_RT_VISIBLE_DEVICES` lists a node's devices; torch counts from 0 within that list. Ray writes the variable itself,
unless `RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES` is set: then it only names the devices that it assigned, by their
numbers on the node, and whoever starts the process has to write the variable. Handing such a number to `set_device` is a
range error, or somebody else's device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vime.errors import PluginError

VISIBLE = "ASCEND_RT_VISIBLE_DEVICES"
NOSET = "RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES"
_NONE = "NoDevFiles"
"""Ray's word for no device at all."""


@dataclass(frozen=True, slots=True)
class View:
    """What a process is started with: the variable's value (None: leave it as it is) and its logical device numbers."""

    value: str | None
    logical: tuple[int, ...]


def visible(text: str | None) -> tuple[str, ...] | None:
    """Entries of the variable, as they stand; None when it is unset (every device).

    The runtime reads up to the first entry that is empty or negative, so nothing after it counts.
    """
    if text is None:
        return None
    entries: list[str] = []
    for entry in (part.strip() for part in text.split(",")):
        if not entry or entry.startswith("-") or entry == _NONE:
            break
        entries.append(entry)
    return tuple(entries)


def entry_of(base: Sequence[str], local_rank: int) -> str:
    """The node's device behind a logical number. Raises PluginError for a number that the list does not reach."""
    if not 0 <= local_rank < len(base):
        raise PluginError(
            f"local rank {local_rank} has no device: this process sees {len(base)} ({','.join(base) or 'none'})",
            where=VISIBLE,
            fix="give the node as many visible devices as it has ranks, or start fewer ranks on it",
        )
    return base[local_rank]


def noset(env: Mapping[str, str]) -> bool:
    """Whether Ray leaves the variable alone. Ray takes `1` and `true` for yes."""
    return env.get(NOSET, "").strip().lower() in ("1", "true")


def view_for(assigned: Sequence[str], env: Mapping[str, str]) -> View:
    """How a process sees the devices that Ray assigned to it.

    With the NOSET flag the variable becomes the assigned list; without it Ray's own value stays. Either way the process
    counts its devices from 0. Raises PluginError where Ray's value and its assignment have different lengths.
    """
    logical = tuple(range(len(assigned)))
    if noset(env):
        return View(",".join(assigned), logical)
    kept = visible(env.get(VISIBLE))
    if kept is not None and len(kept) != len(assigned):
        raise PluginError(
            f"Ray assigned {len(assigned)} devices, the variable shows {len(kept)} ({env.get(VISIBLE)!r})",
            where=VISIBLE,
            fix=f"let Ray set the variable, or set {NOSET}=1 before Ray starts",
        )
    return View(None, logical)
