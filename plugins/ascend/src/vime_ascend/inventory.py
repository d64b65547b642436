"""The node's inventory, from the facts that `probe.read` gathered or a recording holds."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from typing import Any

from vime.errors import PluginError
from vime.facts.diagnosis import ProbeContext, RecordedFixture
from vime.facts.inventory import Device, FabricDomain, Link, NodeInventory, NumaNode, Tri
from vime.platforms.host import Host, host_from, parse_cpulist
from vime_ascend import probe, smi_text, stack
from vime_ascend.chips import generation_of
from vime_ascend.smi_text import Chip, MappedChip, Topology

_FIX = "record it with `vime doctor --platform ascend --record FILE`"


def of(ctx: ProbeContext) -> NodeInventory:
    """This node, or the one that a recording describes. Raises PluginError where it cannot be read."""
    return from_facts(probe.read(ctx.env) if ctx.recording is None else ctx.recording)


def fixture(ctx: ProbeContext) -> RecordedFixture:
    """A recording of this node, or the one that is being replayed."""
    data = dict(ctx.recording) if ctx.recording is not None else probe.read(ctx.env)
    return RecordedFixture("ascend", "recorded", datetime.datetime.now(tz=datetime.UTC).date().isoformat(), data)


def from_facts(facts: Mapping[str, Any]) -> NodeInventory:
    """The inventory that follows from facts.

    A chip whose health is not OK, or whose generation the platform does not know, is listed with the reason.

    Raises PluginError when facts are missing or the tool's two lists of chips do not go together.
    """
    try:
        host = host_from(facts["host"])
        texts: Mapping[str, str] = {str(name): str(text) for name, text in dict(facts["npu_smi"]).items()}
        info, mapped = texts["info"], texts["map"]
    except (KeyError, TypeError, ValueError) as error:
        what = f"the recording is not one of the ascend platform: {type(error).__name__}: {error}"
        raise PluginError(what, fix=_FIX) from error
    rows = _joined(smi_text.chips(info), smi_text.mapping(mapped))
    topology = smi_text.topology(texts.get("topo", ""))
    board, pod = smi_text.fields(texts.get("board", "")), smi_text.fields(texts.get("super_pod", ""))
    tool, driver = smi_text.versions(info)
    cann = facts.get("cann")
    return NodeInventory(
        hostname=host.hostname,
        platform="ascend",
        arch=host.arch,
        devices=tuple(_device(chip, place, topology, host) for chip, place in rows),
        cpus=len(host.cpus),
        memory_bytes=host.memory_bytes,
        numa=host.numa,
        links=_links([place for _, place in rows], topology),
        fabric=_fabric(pod),
        driver=smi_text.field(board, "Software Version", "软件版本") or driver,
        software=_software(host.software, cann),
        vendor={
            "npu_smi": tool,
            "firmware": smi_text.field(board, "Firmware Version", "固件版本"),
            "cann": cann,
            "vllm_ascend_build": facts.get("vllm_ascend_build"),
            "translated": smi_text.translated(info),
            "physical_ids": [place.physical for _, place in rows],
            "packages": [place.card for _, place in rows],
            "names": [chip.name for chip, _ in rows],
            "server_index": smi_text.field(pod, "Server Index"),
            "problems": dict(facts.get("problems") or {}),
        },
    )


def _joined(chips: Sequence[Chip], mapped: Sequence[MappedChip]) -> list[tuple[Chip, MappedChip]]:
    """Chips with their ids, by logical id: the order in which masks count."""
    by_place = {(chip.card, chip.chip): chip for chip in chips}
    if not by_place or not mapped:
        raise PluginError(
            f"npu-smi lists no chips ({len(by_place)} in its table, {len(mapped)} in its mapping)",
            where="npu-smi",
            fix="run `npu-smi info` and `npu-smi info -m`; in a container, pass /dev/davinci* and /dev/davinci_manager",
        )
    lost = [f"{place.card}/{place.chip}" for place in mapped if (place.card, place.chip) not in by_place]
    if lost or len(mapped) != len(by_place):
        raise PluginError(
            f"npu-smi's table has {len(by_place)} chips and its mapping {len(mapped)}"
            + (f"; chips {', '.join(lost)} (card/chip) are in the mapping only" if lost else ""),
            where="npu-smi",
            fix="a chip went away between the two calls: look at `dmesg`, then try again",
        )
    return [(by_place[place.card, place.chip], place) for place in mapped]


def _device(chip: Chip, place: MappedChip, topology: Topology, host: Host) -> Device:
    generation = generation_of(chip.name, chip.physical is not None) or generation_of(place.name, chip.physical is not None)
    return Device(
        index=place.logical,
        # torch_npu has no device UUID, so the host's name and its number for the chip stand in: two containers of one
        # host have names of their own, and the same chip then counts as two.
        uuid=f"{host.hostname}/npu-{place.physical}",
        name=chip.name if chip.name.startswith("Ascend") else f"Ascend {chip.name}",
        memory_bytes=chip.memory_bytes,
        numa_node=_home(topology.affinity.get(place.physical), host.numa),
        pci_bus=chip.bus,
        health=_health(chip, known=generation is not None),
        arch=generation.arch if generation else None,
    )


def _health(chip: Chip, *, known: bool) -> str:
    if chip.health not in smi_text.HEALTHY:
        return f"npu-smi says {chip.health}"
    if not known:
        return f"a {chip.name} is neither Atlas A2 (910B) nor Atlas A3 (910C)"
    return "ok" if chip.memory_bytes else "npu-smi does not say how much memory it has"


def _home(cpus: str | None, numa: Sequence[NumaNode]) -> int | None:
    """The memory node of a list of processors; None where none is told or they belong to several nodes."""
    near = set(parse_cpulist(cpus)) if cpus else set()
    homes = [node.index for node in numa if near & set(node.cpus)]
    return homes[0] if len(homes) == 1 else None


def _links(places: Sequence[MappedChip], topology: Topology) -> tuple[Link, ...]:
    """Direct paths by device index. Their rates are not told."""
    index = {place.physical: place.logical for place in places}
    return tuple(
        Link(index[source], index[target], kind)
        for (source, target), kind in sorted(topology.paths.items())
        if kind in smi_text.LINKS and source in index and target in index
    )


def _fabric(pod: Mapping[str, str]) -> FabricDomain | None:
    """The super pod that a server says it belongs to. 0 is a pod's number like any other."""
    number, size = smi_text.field(pod, "Super Pod ID"), smi_text.field(pod, "Super Pod Size")
    if number is None:
        return None
    return FabricDomain(
        id=f"super-pod-{number}",
        clique=number,
        usable=Tri.UNKNOWN,
        reason=f"npu-smi names super pod {number} (size {size or 'not told'}); whether its servers reach each other at fabric "
        "speed shows only when they connect",
    )


def _software(found: Mapping[str, Mapping[str, str]], cann: object) -> dict[str, Mapping[str, str]]:
    """Packages by role; trainer and engine stand on CANN as well."""
    own = {stack.CANN: str(cann)} if cann else {}
    return {role: {**names, **own} if role in ("trainer", "engine") else dict(names) for role, names in found.items()}
