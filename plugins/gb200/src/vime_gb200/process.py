"""What a tray changes in capabilities, Ray's labels, process groups and the environment."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from vime.facts.bindings import RayBinding
from vime.facts.capabilities import Capabilities
from vime.facts.collectives import CollectiveSpec, GroupRequest
from vime.facts.inventory import NodeInventory, Tri
from vime.facts.process import EnvMode, EnvValue, RoleKind, RoleRequest

RANKS_PER_CLIQUE = 43
"""The largest communicator in one clique that users report to work; from 44 ranks on NCCL ended with a segmentation fault."""

CLIQUE_LIMIT = (
    f"a communicator of more than {RANKS_PER_CLIQUE} ranks in one clique",
    "users report a segmentation fault inside NCCL when it is set up; NCCL_MNNVL_ENABLE=0 for trainer and engine avoids it "
    "and sends the traffic between trays over the network",
)
ABSENT_FABRIC = "scale_up_between_nodes"

COMMUNICATORS = ("collective",)
"""Transports that make a communicator of NCCL out of trainer and engine: only there must both set it up alike."""

_LABEL_VALUE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")
_LABELS = {"chassis_serial": "vime/chassis", "tray": "vime/tray", "host_id": "vime/host-id"}


def capabilities(found: Capabilities, inventory: NodeInventory) -> Capabilities:
    """cuda's answer, with the reason where trays do not reach each other over NVLink."""
    domain = inventory.fabric
    if domain is None or domain.usable is Tri.YES:
        return found
    return replace(found, absent={**found.absent, ABSENT_FABRIC: f"fabric usable: {domain.usable}: {domain.reason}"})


def binding(found: RayBinding, inventory: NodeInventory) -> RayBinding:
    """cuda's binding with labels: the rack's domain, by which Ray packs groups, and the tray's place.

    A domain that may not be used is not named: Ray would pack a group into it.
    """
    labels = dict(found.labels)
    domain = inventory.fabric
    # A nominal node has no machine, and so no place in a rack.
    if domain is not None and domain.usable is Tri.YES and inventory.vendor:
        labels["ray.io/gpu-domain"] = f"{domain.id}.{domain.clique}"
    return replace(found, labels={**labels, **_place(inventory.vendor.get("devices") or ())})


def _place(devices: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Chassis, tray and host as the board names them, where all devices say the same and Ray can take the text."""
    places = [device.get("platform_info") or {} for device in devices]
    found: dict[str, str] = {}
    for fact, label in _LABELS.items():
        values = {str(place.get(fact)).strip() for place in places if place.get(fact) is not None}
        if len(values) == 1 and _LABEL_VALUE.fullmatch(value := values.pop()):
            found[label] = value
    return found


def collective(found: CollectiveSpec, group: GroupRequest) -> CollectiveSpec:
    """cuda's spec with the limits of a fabric over trays."""
    condition, effect = CLIQUE_LIMIT
    known = f"this group has {group.world} ranks: {effect}" if group.world > RANKS_PER_CLIQUE else effect
    limits = {
        condition: known,
        "IMEX daemons of two trays do not form one domain": "the group ends when it connects (invalid resource handle): "
        "no reading of one tray shows it",
    }
    return replace(found, limits={**found.limits, **limits}, domain_ranks=RANKS_PER_CLIQUE)


def environment(request: RoleRequest) -> dict[str, EnvValue]:
    """Rules of this platform; those of cuda hold beside them."""
    rules = {
        "NCCL_CUMEM_ENABLE": EnvValue(
            "0",
            "memory for other trays comes from cuMem: without it NCCL leaves NVLink between trays unused, says nothing, and "
            "the traffic goes over the network",
            EnvMode.FORBID,
            "both_equal",
            COMMUNICATORS,
        ),
        "NCCL_NET_GDR_LEVEL": EnvValue(
            "SYS",
            "every network card is as far as SYS from every device on this board, which NCCL takes for too far to reach device "
            "memory directly; users measured 13 to 20 % more bandwidth with it on GH200, nobody has here",
        ),
    }
    if why := broken(request.inventories):
        rules["NCCL_MNNVL_ENABLE"] = EnvValue(
            "0",
            f"the fabric between trays cannot be used ({why}), and NCCL ends with an error where it tries",
            scope="both_equal",
            protocols=COMMUNICATORS,
        )
    elif request.kind is RoleKind.ENGINE and _whole(request.inventories):
        rules["UCX_CUDA_IPC_ENABLE_MNNVL"] = EnvValue(
            "y", "UCX, which carries caches between engines, uses NVLink between trays only when told to"
        )
    return rules


def broken(inventories: Iterable[NodeInventory]) -> str:
    """Why the fabric of these nodes cannot be used, by node; empty where no node says no."""
    bad = [f"{n.hostname}: {n.fabric.reason}" for n in inventories if n.fabric is not None and n.fabric.usable is Tri.NO]
    return "; ".join(bad)


def _whole(inventories: Iterable[NodeInventory]) -> bool:
    return all(node.fabric is not None and node.fabric.usable is Tri.YES for node in inventories)
