"""Machines for the conformance kit, all of them fakes."""

from __future__ import annotations

from functools import partial

from vime.testing.conformance import Machine, plain_host
from vime_rocm.testing.fake_amdsmi import expand_devices, installed, load_profile


def machine(name: str) -> Machine:
    """The machine of a profile. What the platform must say of it is in the profile's `expect`."""
    profile = load_profile(name)
    expect = profile.get("expect", {})
    return Machine(
        name=name,
        origin=profile["origin"],
        install=partial(installed, name),
        devices=len(expand_devices(profile.get("devices", ()))),
        matches=expect.get("matches", True),
        readable=expect.get("readable", True),
        note=profile["machine"],
    )


MACHINES = tuple(
    machine(name)
    for name in (
        "mi300x8",
        "mi325x8",
        "mi355x8",
        "mi300x8-cpx",
        "mi300x8-masks",
        "mi300x8-sick",
        "mi300x1-old-amdsmi",
        "driver-not-loaded",
        "amdsmi-import-error",
    )
)
FOREIGN = (plain_host(), machine("radeon"))
