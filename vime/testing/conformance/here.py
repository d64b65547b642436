"""The subject for an installed or importable plugin on this machine, or on a recording."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from vime.facts.diagnosis import ProbeContext, RecordedFixture
from vime.testing.conformance.machine import ANY, Machine, plain_host, real_hardware
from vime.testing.conformance.subject import Subject, load_subject


@contextmanager
def _nothing() -> Iterator[Mapping[str, str]]:
    yield {}


def recorded_machine(name: str, recording: RecordedFixture) -> Machine:
    """A recording as a machine. Its probe is not asked: a recording of hardware says nothing about the machine that replays."""
    note = f"{recording.origin} {recording.date}"
    return Machine(name, recording.origin, _nothing, ANY, probed=False, note=note, recording=recording.data)


def subject_here(
    name: str, *, device: bool = False, folder: Path, recordings: Mapping[str, RecordedFixture] | None = None
) -> Subject:
    """A plugin by platform or module name, with this machine where its probe says yes, and with recordings by file name.

    Raises PluginError where it does not load.
    """
    machines = tuple(recorded_machine(file, recording) for file, recording in (recordings or {}).items())
    subject = load_subject(name, machines=machines, device=device, folder=folder)
    matches = [m for m in subject.platform.probe(ProbeContext(dict(os.environ))) if m.platform == subject.name]
    if matches or device:
        subject.machines = (*machines, real_hardware())
    elif not recordings:
        subject.foreign = (plain_host(),)
    return subject
