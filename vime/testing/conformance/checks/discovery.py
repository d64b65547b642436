"""Probe, inventory, recordings: what a plugin finds."""

from __future__ import annotations

import json
import time

from vime.errors import PluginError
from vime.facts.diagnosis import Match, ProbeContext
from vime.facts.inventory import NodeInventory
from vime.testing.conformance.machine import ANY, Machine
from vime.testing.conformance.registry import NotRun, check, fail, require
from vime.testing.conformance.subject import Subject


def own_match(subject: Subject, ctx: ProbeContext) -> Match | None:
    """The plugin's own answer among those of its lineage."""
    own = [match for match in subject.platform.probe(ctx) if match.platform == subject.name]
    return own[-1] if own else None


@check("C10", hooks=["vime_probe"], title="probe knows its machines")
def probe_knows_its_machines(subject: Subject) -> None:
    """On every machine that is marked as its own the probe says yes, twice the same, with a specificity of 0 or more."""
    asked = [machine for machine in subject.machines if machine.matches and machine.probed]
    if not asked:
        raise NotRun("no machine of the plugin was given")
    for machine in asked:
        with machine.installed() as ctx:
            first, second = own_match(subject, ctx), own_match(subject, ctx)
        if first is None:
            fail(
                f"vime_probe says no on {machine.name} ({machine.note or machine.origin})", "return Match(...) on this hardware"
            )
        require(first == second, f"vime_probe answers {first}, then {second} on {machine.name}", "decide from facts only")
        require(first.specificity >= 0, f"the specificity is {first.specificity}", "give 0 or more; children more than parents")
        require(first.reason, f"the match on {machine.name} has no reason", "say what was found")


@check("C11", hooks=["vime_probe"], title="probe refuses other machines")
def probe_refuses_other_machines(subject: Subject) -> None:
    """On every other machine the probe says None, in less than a second, without raising."""
    others = (*subject.foreign, *(machine for machine in subject.machines if machine.probed and not machine.matches))
    if not others:
        raise NotRun("no foreign machine was given")
    for machine in others:
        with machine.installed() as ctx:
            start = time.perf_counter()
            match = own_match(subject, ctx)
            seconds = time.perf_counter() - start
        if match is not None:
            fail(f"vime_probe says yes on {machine.name}: {match.reason}", "return None where the hardware is not yours")
        slow = f"vime_probe took {seconds:.1f} s to refuse {machine.name}, allowed is {subject.refusal_s:g} s"
        require(seconds < subject.refusal_s, slow, "look for a file or a library before you start anything")


@check("C12", hooks=["vime_inventory"], title="inventory lists the devices")
def inventory_lists_the_devices(subject: Subject) -> None:
    """Every readable machine gives the expected number of devices, with unique ids and indexes, memory, and health texts."""
    asked = [machine for machine in subject.machines if machine.readable]
    if not asked:
        raise NotRun("no readable machine was given")
    for machine in asked:
        with machine.installed() as ctx:
            try:
                inventory = subject.platform.inventory(ctx)
            except PluginError as error:
                fail(f"vime_inventory raises on {machine.name}: {error.what}", "read it, or mark the machine readable=False")
        check_inventory(subject, machine, inventory)


def check_inventory(subject: Subject, machine: Machine, inventory: NodeInventory) -> None:
    """Fail where an inventory is not whole."""
    count, at = len(inventory.devices), f"on {machine.name}"
    if machine.devices == ANY:
        require(count > 0, f"no device {at}", "list the devices of the node")
    else:
        require(
            count == machine.devices, f"{count} devices {at}, {machine.devices} are there", "list every device, no mask applied"
        )
    expected = subject.name
    require(inventory.platform == expected, f"the inventory says platform {inventory.platform!r} {at}", f"write {expected!r}")
    require(inventory.hostname and inventory.arch, f"hostname or arch is empty {at}", "read the host with vime.platforms.host")
    require(inventory.memory_bytes > 0, f"the node has {inventory.memory_bytes} bytes of memory {at}", "read the host")
    for name in ("uuid", "index"):
        values = [getattr(device, name) for device in inventory.devices]
        require(len(set(values)) == count, f"devices share a {name} {at}: {values}", f"give every device its own {name}")
    for device in inventory.devices:
        which = f"device {device.index} {at}"
        require(device.uuid and device.name, f"{which} has no uuid or name", "read both from the vendor")
        broken = device.health != "ok"
        require(broken or device.memory_bytes > 0, f"{which} has {device.memory_bytes} bytes of memory", "read its memory size")
        require(device.health.strip(), f"{which} has an empty health", "write ok, or the reason why no role may use it")
        require(
            device.partition is None or device.partition.strip(), f"{which} has an empty partition", "None, or which part it is"
        )
        if inventory.numa and device.numa_node is not None:
            known = {node.index for node in inventory.numa}
            require(
                device.numa_node in known, f"{which} is at memory node {device.numa_node}, known are {sorted(known)}", "check"
            )
    indexes = {device.index for device in inventory.devices}
    for link in inventory.links:
        ends = {link.source, link.target}
        require(ends <= indexes, f"a link joins {sorted(ends)} {at}, devices are {sorted(indexes)}", "use the devices' indexes")


@check("C13", hooks=["vime_inventory"], title="unreadable machines are refused with a fix")
def unreadable_machines_are_refused(subject: Subject) -> None:
    """Where the hardware cannot be read vime_inventory raises PluginError, with the next step, and nothing else."""
    asked = [machine for machine in subject.machines if not machine.readable]
    if not asked:
        raise NotRun("no unreadable machine was given")
    for machine in asked:
        with machine.installed() as ctx:
            try:
                inventory = subject.platform.inventory(ctx)
            except PluginError as error:
                foreign = error.__cause__ is not None and not isinstance(error.__cause__, PluginError)
                what = f"vime_inventory raises {type(error.__cause__).__name__} on {machine.name}: {error.__cause__}"
                require(not foreign, what, "catch the library's error and raise PluginError(what, fix=...)")
                require(error.fix, f"the error on {machine.name} names no next step: {error.what}", "give PluginError a fix")
            else:
                fail(
                    f"vime_inventory answers with {len(inventory.devices)} devices on {machine.name} ({machine.note})",
                    "raise PluginError where the hardware cannot be read",
                )


@check("C14", hooks=["vime_fixture", "vime_inventory"], title="a recording replays the inventory")
def recording_replays(subject: Subject) -> None:
    """What vime_fixture records is JSON, names its origin, and gives the same inventory when it is replayed."""
    asked = [machine for machine in subject.machines if machine.readable]
    if not asked:
        raise NotRun("no readable machine was given")
    for machine in asked:
        with machine.installed() as ctx:
            fixture = subject.ask("vime_fixture", ctx)
            if fixture is None:
                raise NotRun("the platform makes no recordings")
            live = subject.ask("vime_inventory", ctx)
        at = f"on {machine.name}"
        origin = fixture.origin in ("recorded", "synthetic")
        require(origin, f"the origin is {fixture.origin!r} {at}", "write recorded or synthetic")
        require(
            fixture.platform == subject.name,
            f"the recording says platform {fixture.platform!r} {at}",
            f"write {subject.name!r}",
        )
        require(fixture.date, f"the recording has no date {at}", "give the day it was made")
        try:
            data = json.loads(json.dumps(fixture.data))
        except (TypeError, ValueError) as error:
            fail(f"the recording's data is no JSON {at}: {error}", "keep to numbers, texts, lists and mappings with text keys")
        replayed = subject.ask("vime_inventory", ProbeContext({}, recording=data))
        require(
            replayed == live,
            f"the replay differs {at}: {difference(live, replayed)}",
            "derive the inventory from the facts only",
        )


def difference(one: NodeInventory, other: NodeInventory) -> str:
    """The first field that differs, for messages."""
    for name in one.__dataclass_fields__:
        left, right = getattr(one, name), getattr(other, name)
        if left != right:
            return f"{name} is {str(left)[:120]}, replayed {str(right)[:120]}"
    return "nothing"
