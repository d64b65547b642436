"""Which of the visible-device variables holds, when an environment brings several."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from vime.errors import PluginError

HIP, CUDA, ROCR = "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"
VISIBLE = (HIP, CUDA)
"""Both get the same list: vLLM copies the first into the second and refuses when they differ, Ray reads the first."""

NOSET = tuple(f"RAY_EXPERIMENTAL_NOSET_{name}" for name in (HIP, CUDA, ROCR))


@dataclass(frozen=True, slots=True)
class Mask:
    """`variable` is the one that holds, None where nothing masks. `entries` are opaque and in order: logical device i is the
    i-th. `unset` are variables that must not be passed on beside it.
    """

    variable: str | None
    entries: tuple[str, ...]
    unset: tuple[str, ...] = ()

    def entry(self, logical: int) -> str:
        """What a child that uses logical device `logical` gets. Raises PluginError beyond the mask."""
        if self.variable is None:
            return str(logical)
        if not 0 <= logical < len(self.entries):
            listed = ",".join(self.entries) or "nothing"
            raise PluginError(
                f"device {logical} is asked for, {self.variable} shows {listed}",
                where="platform rocm",
                fix=f"add the device to {self.variable}, or ask for fewer devices",
            )
        return self.entries[logical]


def entries_of(text: str) -> tuple[str, ...]:
    """Entries up to the first that is empty or -1: the runtime shows nothing after a bad one. Empty text shows nothing."""
    entries: list[str] = []
    for entry in (part.strip() for part in text.split(",")):
        if entry in ("", "-1"):
            break
        entries.append(entry)
    return tuple(entries)


def chosen_mask(env: Mapping[str, str]) -> Mask:
    """The mask that an environment means.

    Equal variables are one mask, under HIP's name. ROCR's must then go: it is applied first, and HIP's entries would count
    within what it leaves.

    Raises:
        PluginError: two variables differ, or ROCR's is alone, whose numbers are not HIP's and which Ray refuses.
    """
    found = {name: env[name] for name in (HIP, CUDA, ROCR) if name in env}
    if not found:
        return Mask(None, ())
    if len({entries_of(text) for text in found.values()}) > 1:
        listed = " and ".join(f"{name}={text!r}" for name, text in found.items())
        raise PluginError(
            f"{listed} differ",
            where="platform rocm",
            fix=f"keep {HIP} and unset {' and '.join(name for name in found if name != HIP) or ROCR}",
        )
    if tuple(found) == (ROCR,):
        raise PluginError(
            f"{ROCR}={found[ROCR]!r} is the only mask: Ray refuses it, and its numbers are not those of HIP",
            where="platform rocm",
            fix=f"unset {ROCR} and export {HIP} with the numbers that `amd-smi list -e` gives as HIP_ID",
        )
    variable = HIP if HIP in found else CUDA
    return Mask(variable, entries_of(found[variable]), (ROCR,) if ROCR in found else ())
