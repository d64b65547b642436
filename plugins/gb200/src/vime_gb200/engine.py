"""What a tray changes for an engine: workers at the memory of their Grace."""

from __future__ import annotations

from packaging.version import InvalidVersion, Version

from vime.facts.process import RoleRequest, VllmDefaults
from vime_gb200.inventory import NUMACTL

_BINDS_SINCE = Version("0.26")
"""The oldest vLLM whose `numa_bind` arguments were looked at."""


def defaults(request: RoleRequest) -> VllmDefaults:
    """Each worker at the memory node of its device, where nodes are known and vLLM and the machine can bind.

    vLLM counts the devices that it sees, which are those of the role in the order of its slots. Without permission to set a
    memory policy it binds processors only; without the program `numactl` it would refuse to start.
    """
    homes = _homes(request)
    if not homes or not _binds(request):
        return VllmDefaults()
    return VllmDefaults(args={"numa_bind": True, "numa_bind_nodes": list(homes)})


def _homes(request: RoleRequest) -> tuple[int, ...]:
    """Memory nodes of the engine's devices; empty where one is unknown or the engine spans several trays."""
    slots = request.placement.slots
    if len({slot.node for slot in slots}) != 1:
        return ()
    node = request.inventories[slots[0].node]
    homes = [node.devices[slot.device].numa_node for slot in slots]
    return tuple(home for home in homes if home is not None) if None not in homes else ()


def _binds(request: RoleRequest) -> bool:
    try:
        version = Version(request.software.get("vllm", "0"))
    except InvalidVersion:
        return False
    node = request.inventories[request.placement.slots[0].node]
    return version >= _BINDS_SINCE and node.vendor.get(NUMACTL) is True
