"""What usually goes wrong with an A1. Facts come from the inventory, so that a recording gives the same findings."""

from __future__ import annotations

from collections.abc import Iterator

from packaging.version import InvalidVersion, Version

from acme_accelerator.process import MASK
from vime.facts.diagnosis import Check, DoctorContext, Severity

OLDEST_DRIVER = "3.0"


def checks(ctx: DoctorContext) -> Iterator[Check]:
    """All findings; an id is stable, and every finding that is not ok says what to do."""
    yield _driver(ctx.inventory.driver)
    yield _devices(ctx)
    yield _mask(ctx)


def _driver(version: str | None) -> Check:
    try:
        recent = version is not None and Version(version) >= Version(OLDEST_DRIVER)
    except InvalidVersion:
        recent = False
    if recent:
        return Check("acme.driver", Severity.OK, f"driver {version}")
    what = f"driver {version} is older than {OLDEST_DRIVER}, with which links lose frames"
    return Check("acme.driver", Severity.ERROR, what, f"install driver {OLDEST_DRIVER} or later")


def _devices(ctx: DoctorContext) -> Check:
    devices = ctx.inventory.devices
    faults = [f"{device.uuid}: {device.health}" for device in devices if device.health != "ok"]
    if faults:
        return Check("acme.devices", Severity.ERROR, "; ".join(faults), "take the device out of the table, or replace it")
    return Check("acme.devices", Severity.OK, f"{len(devices)} devices, all in order")


def _mask(ctx: DoctorContext) -> Check:
    if MASK in ctx.env:
        what = f"{MASK}={ctx.env[MASK]} is set here; vime masks the processes that it starts itself"
        return Check("acme.mask", Severity.WARNING, what, f"unset {MASK}")
    return Check("acme.mask", Severity.OK, "no mask is set")
