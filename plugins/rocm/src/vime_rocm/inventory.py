"""From facts to an inventory. A recording holds the same facts, so that both give the same answer."""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Mapping
from typing import Any

from vime.errors import PluginError
from vime.facts.diagnosis import ProbeContext, RecordedFixture
from vime.facts.inventory import Device, Link, NodeInventory
from vime.platforms import host
from vime_rocm import probe
from vime_rocm.devices import SUPPORTED, kind_named, kind_with, link_rate

ORIGIN = "VIME_ROCM_ORIGIN"
"""Set to `synthetic` by the fake library, so that no recording of it passes for one of a machine."""

_WHOLE = "SPX"


def inventory(ctx: ProbeContext) -> NodeInventory:
    """This machine's, or the recorded one's. Raises PluginError when neither can be read."""
    return from_facts(probe.read_machine() if ctx.recording is None else ctx.recording)


def fixture(ctx: ProbeContext) -> RecordedFixture:
    """A recording of this machine, or the one that is being replayed."""
    data = dict(ctx.recording) if ctx.recording is not None else probe.read_machine()
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    return RecordedFixture("rocm", ctx.env.get(ORIGIN, "recorded"), today, data)


def from_facts(facts: Mapping[str, Any]) -> NodeInventory:
    """The inventory that follows from read or recorded facts. Raises PluginError for facts of another kind."""
    try:
        return _inventory(facts)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise PluginError(
            f"the recording is not one of the rocm platform: {type(error).__name__}: {error}",
            fix="record it with `vime doctor --platform rocm --record FILE`",
        ) from error


def _inventory(facts: Mapping[str, Any]) -> NodeInventory:
    found = host.host_from(facts["host"])
    rows: list[Mapping[str, Any]] = list(facts["devices"])
    numbers, names = _numbers(rows), _unique_names(rows, found.hostname)
    siblings = Counter(_chip(row) for row in rows)
    devices = (
        _device(row, index=numbers[i], uuid=names[i], siblings=siblings[_chip(row)] if row["bdf"] else 1)
        for i, row in enumerate(rows)
    )
    arches = {numbers[i]: row["arch"] for i, row in enumerate(rows)}
    return NodeInventory(
        hostname=found.hostname,
        platform="rocm",
        arch=found.arch,
        devices=tuple(sorted(devices, key=lambda device: device.index)),
        cpus=len(found.cpus),
        memory_bytes=found.memory_bytes,
        numa=found.numa,
        links=_links(facts["links"], numbers, arches),
        driver=facts["driver"],
        software=found.software,
        vendor={name: value for name, value in facts.items() if name != "host"},
    )


def _numbers(rows: list[Mapping[str, Any]]) -> list[int]:
    """HIP's numbers, which masks hold, where all devices have one; amdsmi's order otherwise."""
    numbers = [row["hip_id"] for row in rows]
    if None in numbers or len(set(numbers)) != len(numbers):
        return list(range(len(rows)))
    return [int(number) for number in numbers]


def _unique_names(rows: list[Mapping[str, Any]], hostname: str) -> list[str]:
    """One UUID per device. Partitions of a chip may share the chip's; a device without one is named by its place."""
    given = Counter(row["uuid"] for row in rows)
    names = []
    for position, row in enumerate(rows):
        uuid = row["uuid"] or f"{hostname}/{row['bdf'] or position}"
        part = row["partition_id"] if row["partition_id"] is not None else position
        names.append(f"{uuid}/{part}" if row["uuid"] and given[uuid] > 1 else uuid)
    return names


def _chip(row: Mapping[str, Any]) -> str:
    """The chip's place on the bus: amdsmi writes the number of a partition into the function."""
    return str(row["bdf"]).rpartition(".")[0]


def _device(row: Mapping[str, Any], *, index: int, uuid: str, siblings: int) -> Device:
    kind = kind_with(row["device_id"])
    name = row["name"] or ""
    if kind_named(name) is None and kind is not None:
        name = kind.market_name
    return Device(
        index=index,
        uuid=uuid,
        name=name or f"device {row['device_id']}",
        memory_bytes=int(row["memory_bytes"] or (kind.memory_bytes if kind is not None else 0)) // siblings,
        numa_node=row["numa_node"],
        pci_bus=row["bdf"],
        partition=_partition(row, siblings),
        health=_health(row),
        arch=row["arch"],
    )


def _partition(row: Mapping[str, Any], siblings: int) -> str | None:
    """What this is a part of; None for a whole chip, and where the mode is unknown and the chip shows once."""
    mode = row["compute_partition"]
    if mode in (None, _WHOLE) and siblings == 1:
        return None
    part = "" if row["partition_id"] is None else f" {row['partition_id']}"
    return (
        f"part{part} of a chip in compute mode {mode or 'unknown'}, memory mode {row['memory_partition'] or 'unknown'}: "
        f"{siblings} devices share its memory and links; memory is the chip's, divided by {siblings}"
    )


def _health(row: Mapping[str, Any]) -> str:
    if row["errors"]:
        return "; ".join(f"{query}: {answer}" for query, answer in sorted(row["errors"].items()))
    if row["arch"] not in SUPPORTED:
        return f"architecture {row['arch'] or 'unknown'} is not one of {', '.join(SUPPORTED)}"
    return "ok" if row["memory_bytes"] else "amdsmi does not say how much memory it has"


def _links(rows: list[Mapping[str, Any]], numbers: list[int], arches: Mapping[int, str | None]) -> tuple[Link, ...]:
    """Both directions of every usable path. A pair has one xGMI link, whatever the number of links of a device."""
    links: list[Link] = []
    for row in rows:
        if row["p2p"] is False:
            continue
        ends = numbers[row["source"]], numbers[row["target"]]
        direct = row["type"] == "xgmi" and row["hops"] == 1
        rate = link_rate(arches[ends[0]]) if direct and arches[ends[0]] == arches[ends[1]] else None
        links += [Link(ends[0], ends[1], row["type"], rate), Link(ends[1], ends[0], row["type"], rate)]
    return tuple(sorted(links, key=lambda link: (link.source, link.target)))
