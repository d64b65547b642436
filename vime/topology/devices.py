"""Rules about the very devices that a placement uses: parts of a chip are not trained on, sick devices are not used."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from vime.errors import VimeError
from vime.facts.inventory import Device, NodeInventory
from vime.facts.process import Slot
from vime.topology.rules import ResolvedRole, rule_error


def check_devices(
    role: ResolvedRole, slots: Iterable[Slot], nodes: Sequence[NodeInventory], *, where: str | None
) -> list[VimeError]:
    """E212 for a training role on a partition, E213 for any role on a device that is not healthy; one error a rule."""
    used = [(nodes[slot.node], nodes[slot.node].devices[slot.device]) for slot in slots]
    errors: list[VimeError] = []
    parts = [_told(node, device, device.partition) for node, device in used if device.partition is not None]
    if parts and role.kind == "train":
        text = f"training needs whole devices, but the placement uses {_listed(parts)}"
        fix = "turn partitioning off on this node, or give the role devices that are whole"
        errors.append(rule_error("E212", f"roles.{role.name}", text, where=where, fix=fix))
    sick = [_told(node, device, device.health) for node, device in used if device.health != "ok"]
    if sick:
        fix = "repair or reset the device, or leave it out of the visible devices"
        errors.append(rule_error("E213", f"roles.{role.name}", f"not healthy: {_listed(sick)}", where=where, fix=fix))
    return errors


def _told(node: NodeInventory, device: Device, said: object) -> str:
    return f"{node.hostname}[{device.index}]: {said}"


def _listed(texts: Sequence[str]) -> str:
    more = f" and {len(texts) - 3} more" if len(texts) > 3 else ""
    return "; ".join(texts[:3]) + more
