"""Machines that a plugin is checked on: fakes of the vendor's library, recordings, or the hardware itself."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from vime.facts.diagnosis import ProbeContext

ANY = -1
"""As a number of devices: one or more, nobody wrote down how many (real hardware)."""

ORIGINS = ("synthetic", "recorded", "hardware")


@dataclass(frozen=True)
class Machine:
    """One machine.

    Args:
        name: short and stable, it becomes part of test names.
        origin: `synthetic` (written by hand), `recorded` (read from a real machine) or `hardware` (this machine).
        install: puts the machine in place for a `with` block and yields the environment to probe with, a copy.
        devices: how many devices the inventory must list, or `ANY`.
        matches: whether `vime_probe` must say yes.
        readable: whether `vime_inventory` must answer; otherwise it must raise PluginError with a fix.
        note: what is special about it.
        recording: the JSON to replay instead of looking at hardware, for machines that are recordings only.
        probed: whether `vime_probe` is asked; not on recordings, which a probe may ignore.
    """

    name: str
    origin: str
    install: Callable[[], AbstractContextManager[Mapping[str, str]]]
    devices: int
    matches: bool = True
    readable: bool = True
    note: str = ""
    recording: Mapping[str, object] | None = None
    probed: bool = True

    def __post_init__(self) -> None:
        if self.origin not in ORIGINS:
            raise ValueError(f"machine {self.name}: origin {self.origin!r} is none of {', '.join(ORIGINS)}")

    @contextmanager
    def installed(self) -> Iterator[ProbeContext]:
        """The machine in place, as the context that hooks get."""
        with self.install() as env:
            yield ProbeContext(dict(env), recording=self.recording)

    @property
    def usable(self) -> bool:
        """It has devices that a role can be placed on."""
        return self.matches and self.readable and self.devices != 0


@contextmanager
def this_machine() -> Iterator[Mapping[str, str]]:
    """Nothing is put in place."""
    yield dict(os.environ)


def plain_host() -> Machine:
    """A machine without accelerators: the one that runs the tests. Not for a machine that has the plugin's hardware."""
    return Machine("plain-host", "hardware", this_machine, devices=0, matches=False, note="no accelerator")


def real_hardware() -> Machine:
    """This machine as one that has the plugin's hardware."""
    return Machine("hardware", "hardware", this_machine, devices=ANY)
