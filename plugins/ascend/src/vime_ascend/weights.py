"""The platform's halves of weight transports.

Rates come from reports of other systems on the same hardware. device_ipc: synchronising Qwen3-4B (8.04 GB in bfloat16) on
eight 910B1, trainer and engines on the same chips, took 1.6 to 2.3 s a step, all included. collective: a full broadcast of a
30B-A3B model over HCCL, two servers of sixteen 910C dies, ran at 5.3 GB/s.
"""

from __future__ import annotations

from collections.abc import Iterator

from vime.facts.inventory import NodeInventory
from vime.facts.process import Factory, RoleRequest
from vime.facts.transports import Edge, Precondition, Relation, Side, TransferCost, TransportOffer
from vime_ascend.versions import older

_IPC = "vime.weights.transports.device_ipc"
_COLLECTIVE = "vime.weights.transports.collective"
_SHARED = "vime.weights.transports.host_shm"
_IPC_OPTIONS = {"exporter": "vime_ascend.device_export:NpuExporter"}
_COLLECTIVE_OPTIONS = {"backend": "hccl", "device": "npu"}

HALVES = {
    "device_ipc": {
        Side.TRAINER: Factory(f"{_IPC}:DeviceIpcTrainer", _IPC_OPTIONS),
        Side.ENGINE: Factory(f"{_IPC}:DeviceIpcEngine"),
    },
    "collective": {
        Side.TRAINER: Factory(f"{_COLLECTIVE}:CollectiveTrainer", _COLLECTIVE_OPTIONS),
        Side.ENGINE: Factory(f"{_COLLECTIVE}:CollectiveEngine"),
    },
    "host_shm": {
        Side.TRAINER: Factory(f"{_SHARED}:HostShmTrainer"),
        Side.ENGINE: Factory(f"{_SHARED}:HostShmEngine"),
    },
}
"""What carries the bytes is said on the trainer's side; the engines learn it when they connect."""

COSTS = {
    # 8.04 GB in 1.95 s, the middle of what was seen.
    "device_ipc": TransferCost(bytes_per_s=4.1e9, provenance="measured"),
    "collective": TransferCost(bytes_per_s=5.3e9, provenance="measured"),
    "host_shm": TransferCost(None),
}

SHARING_DRIVER = "25.0.rc1"
"""From this driver on, two processes may use one chip's network."""
REOPENING_DRIVER = "25.3.rc1"
"""From this driver on, a second process can open memory that one has opened."""
SHARING_CANN = "8.3.rc1"
"""From this toolkit on, memory is shared without a list of allowed processes."""


def offers(edge: Edge, side: Side) -> tuple[TransportOffer, ...]:
    """This side's half of every transport, with what it needs of the edge."""
    needs = {"device_ipc": _device_ipc, "collective": _collective, "host_shm": _host_shm}
    return tuple(
        TransportOffer(protocol, side, halves[side], COSTS[protocol], preconditions=tuple(needs[protocol](edge)))
        for protocol, halves in HALVES.items()
    )


def _device_ipc(edge: Edge) -> Iterator[Precondition]:
    yield Precondition(
        edge.rank_beside_engines,
        "a chip's memory can be opened inside its node only, where some engine has no trainer rank; containers of one node "
        "must see the same chips under the same numbers",
    )
    for name, request in _sides(edge):
        able = request.capabilities.ipc
        yield Precondition("npu_storage" in able, f"the {name} side must open NPU storages; it has {', '.join(able) or 'none'}")
    for node in _nodes(edge):
        if edge.relation is Relation.SAME_DEVICE:
            yield _driver(node, SHARING_DRIVER, "two processes share a chip")
        if edge.engine.parallel.devices > 1:
            yield _driver(node, REOPENING_DRIVER, "several engine workers open one buffer")
        cann = str(node.vendor.get("cann") or "")
        yield Precondition(
            not older(cann, SHARING_CANN),
            f"CANN {SHARING_CANN} or newer is needed to share memory of a chip; {node.hostname} has {cann or 'unknown'}",
        )


def _collective(edge: Edge) -> Iterator[Precondition]:
    yield Precondition(
        edge.relation is not Relation.SAME_DEVICE,
        "trainer and engine are on the same chip, and HCCL wants a chip of its own for every rank",
    )
    for name, request in _sides(edge):
        able = request.capabilities.collectives
        yield Precondition("hccl" in able, f"the {name} side must speak hccl; it has {', '.join(able) or 'none'}")


def _host_shm(edge: Edge) -> Iterator[Precondition]:
    yield Precondition(edge.on_one_host, "trainer and engine must run on one node to share its memory")


def _sides(edge: Edge) -> tuple[tuple[str, RoleRequest], tuple[str, RoleRequest]]:
    return ("trainer", edge.trainer), ("engine", edge.engine)


def _nodes(edge: Edge) -> tuple[NodeInventory, ...]:
    """The engine's nodes; near the trainer they are its nodes too. A nominal one knows no versions and passes."""
    placed = edge.engine.placement.slots
    return tuple(edge.engine.inventories[index] for index in dict.fromkeys(slot.node for slot in placed))


def _driver(node: NodeInventory, needed: str, what: str) -> Precondition:
    have = node.driver or "unknown"
    return Precondition(not older(node.driver, needed), f"{what}, which needs driver {needed}; {node.hostname} has {have}")
