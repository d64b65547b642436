"""Which devices a process may see: the visible-device variables of each process. Pure.

The entries of a mask are opaque strings: the i-th entry is the i-th device that a process sees, and a child gets the entry
itself. A mask that the machine's environment already sets is a bound: positions count inside it.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from vime.errors import PlacementError, PlanError
from vime.facts.bindings import RayBinding
from vime.facts.inventory import Device, NodeInventory

Environment = Mapping[str, str]


def parse_mask(text: str) -> tuple[str, ...]:
    """`0,1` -> ("0", "1"). Vendor runtimes read nothing from the first bad entry on: an empty one, or a negative number."""
    entries: list[str] = []
    for part in text.split(","):
        entry = part.strip()
        if not entry or entry.startswith("-"):
            break
        entries.append(entry)
    return tuple(entries)


def inherited_mask(binding: RayBinding, env: Environment) -> tuple[str, ...] | None:
    """The mask that an environment sets, None where it sets none (an empty one hides every device).

    Raises PlanError E261 naming both variables where two are set and differ, and where only one is set that the platform
    does not allow: its numbers count other devices than those of the variable that is believed.
    """
    names = (*binding.visible_env, *binding.unset_env)
    given = [(name, env[name]) for name in names if name in env]
    if binding.virtual or not given:
        return None
    first, text = given[0]
    for name, other in given[1:]:
        if parse_mask(other) != parse_mask(text):
            what = f"E261 {first} is {text!r} and {name} is {other!r}: they mask devices twice and differently"
            raise PlanError(what, fix=f"unset {name}, or set {' and '.join(binding.visible_env)} to one list")
    if first in binding.unset_env:
        what = f"E261 only {first} is set ({text!r}), which must not be set on this platform"
        raise PlanError(what, fix=f"unset {first}; to leave devices out set {' and '.join(binding.visible_env)}")
    return parse_mask(text)


def visible_node(binding: RayBinding, node: NodeInventory, env: Environment) -> NodeInventory:
    """The node with the devices that the environment's mask leaves, in the mask's order.

    Raises PlanError E261 for an entry that names no device of the node, or several.
    """
    mask = inherited_mask(binding, env)
    if mask is None or node.virtual:
        return node
    return replace(node, devices=tuple(_device(entry, node, binding.visible_env[0]) for entry in mask))


def _device(entry: str, node: NodeInventory, variable: str) -> Device:
    """A number is a device's index, anything else its identifier, which may be cut short as long as it names one device."""
    if entry.isdecimal():
        found = [d for d in node.devices if d.index == int(entry)]
    else:
        found = [d for d in node.devices if d.uuid == entry] or [d for d in node.devices if d.uuid.startswith(entry)]
    if len(found) == 1:
        return found[0]
    known = ", ".join(f"{d.index} ({d.uuid})" for d in node.devices)
    many = "no device" if not found else f"{len(found)} devices"
    raise PlanError(
        f"E261 {variable} has the entry {entry!r}, which names {many} of {node.hostname}; there are {known or 'none'}",
        fix=f"correct or unset {variable}",
    )


def mask_entries(binding: RayBinding, node: NodeInventory, env: Environment) -> tuple[str, ...]:
    """The mask entry of every device of a node, by position. `node` is what `visible_node` leaves.

    Entries that the environment gives are kept as they are written; otherwise the binding says what they are.
    """
    if binding.virtual or not binding.visible_env:
        return ()
    mask = inherited_mask(binding, env)
    if mask is not None:
        return mask
    return tuple(d.uuid if binding.id_kind == "uuid" else str(d.index) for d in node.devices)


def process_mask(binding: RayBinding, entries: Sequence[str], positions: Sequence[int]) -> dict[str, str]:
    """The visible-device variables of a process on these positions of a node; all of them get the same list.

    Its own devices come first, so that its first device is number 0 to it. Where importers need the whole node, the rest of
    it follows. Empty for virtual devices.

    Raises PlacementError for a position that the mask does not have.
    """
    if binding.virtual or not binding.visible_env:
        return {}
    for position in positions:
        if not 0 <= position < len(entries):
            name = binding.visible_env[0]
            what = f"device {position} of a node is asked for, {name} leaves {len(entries)}: {','.join(entries)}"
            raise PlacementError(what, fix=f"use a smaller topology, or allow more devices in {name}")
    own = [entries[position] for position in positions]
    rest = [entry for entry in entries if entry not in own] if binding.full_node_mask else []
    return dict.fromkeys(binding.visible_env, ",".join([*own, *rest]))


def scheduler_flags(binding: RayBinding) -> dict[str, str]:
    """Variables that make the scheduler leave the mask alone."""
    return dict.fromkeys(binding.noset_env, "1")


def check_untouched(binding: RayBinding, env: Environment, *, process: str, where: str | None) -> None:
    """Refuse a mask among a process's own variables: vime gives every process its devices. Raises PlanError E261."""
    for name in (*binding.visible_env, *binding.noset_env, *binding.unset_env):
        if name in env:
            what = f"E261 {process}: {name} is set by vime, from the placement"
            raise PlanError(what, where=where, fix=f"remove {name}; set it for the whole run to leave devices out")


# ---- order


def by_host(host: str) -> tuple[int, int, tuple[tuple[int, int, str], ...]]:
    """A sort key: addresses by number (10.0.0.2 before 10.0.0.10), then names with their numbers read as numbers."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        parts = re.findall(r"\d+|\D+", host)
        return 1, 0, tuple((0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts)
    return 0, int(address), ()


def in_device_order(ids: Sequence[str]) -> tuple[str, ...]:
    """Device ids by number; where one is not a number, as they were given."""
    return tuple(sorted(ids, key=int)) if all(i.isdecimal() for i in ids) else tuple(ids)
