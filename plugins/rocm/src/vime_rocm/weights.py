"""This platform's halves of weight transports. `disk` comes from `base`."""

from __future__ import annotations

from vime.facts.process import Factory, RoleRequest, Slot
from vime.facts.transports import Edge, Precondition, Relation, Side, TransferCost, TransportOffer
from vime_rocm.devices import common_kind
from vime_rocm.perf import HOST_LINK

_PROTOCOLS = {"device_ipc": "DeviceIpc", "collective": "Collective", "host_shm": "HostShm"}
_OPTIONS: dict[str, dict[str, object]] = {
    "device_ipc": {"exporter": "vime_rocm.device_export:HipExporter"},
    "collective": {"backend": "nccl", "device": "cuda"},
    "host_shm": {},
}


def offers(edge: Edge, side: Side) -> tuple[TransportOffer, ...]:
    """This side's half of every transport, with what it needs of the edge."""
    return tuple(
        TransportOffer(
            protocol,
            side,
            _factory(protocol, side),
            _cost(protocol, edge),
            preconditions=_preconditions(protocol, edge, side),
        )
        for protocol in _PROTOCOLS
    )


def _factory(protocol: str, side: Side) -> Factory:
    if side is Side.ENGINE:
        # The engine's half is told exporter and backend by the trainer's, when it connects.
        return Factory(f"vime.weights.transports.{protocol}:{_PROTOCOLS[protocol]}Engine")
    return Factory(f"vime.weights.transports.{protocol}:{_PROTOCOLS[protocol]}Trainer", _OPTIONS[protocol])


def _preconditions(protocol: str, edge: Edge, side: Side) -> tuple[Precondition, ...]:
    if protocol == "host_shm":
        return (Precondition(edge.on_one_host, "trainer and engine must run on one node to share its memory"),)
    if protocol == "collective":
        request = edge.trainer if side is Side.TRAINER else edge.engine
        able = "nccl" in request.capabilities.collectives
        return (
            Precondition(edge.relation is not Relation.SAME_DEVICE, "RCCL refuses two ranks of a group on one device"),
            Precondition(able, f"the {side} side must speak RCCL; it has {request.capabilities.collectives or 'none'}"),
            *((_same_library(edge),) if side is Side.TRAINER else ()),
        )
    return _ipc_preconditions(edge)


def _same_library(edge: Edge) -> Precondition:
    """The trainer's library is the group's. RCCL has NCCL's name in torch and does not speak with it."""
    others = sorted({node.platform for node in edge.engine.inventories} - {"rocm"})
    return Precondition(not others, f"the engine side must have RCCL too; it is on {', '.join(others) or 'the same'}")


def _ipc_preconditions(edge: Edge) -> tuple[Precondition, ...]:
    """A handle carries the exporter's device number, which HIP resolves in the importer's list of devices."""
    near = edge.rank_beside_engines
    both = all("hip_ipc" in request.capabilities.ipc for request in (edge.trainer, edge.engine))
    return (
        Precondition(near, "device memory is opened on its own node only, and some engine has no trainer rank there"),
        Precondition(both, "both sides must be able to open HIP memory handles"),
        Precondition(
            not near or _same_first(edge),
            "HIP resolves a memory handle's device number in the importer's list, so trainer and engine must list the node's "
            "devices in one order: every device of the trainer belongs to this engine, and their first is the same",
        ),
        Precondition(not near or _whole(edge), "a partition of a chip cannot export memory under a number of its own"),
    )


def _same_first(edge: Edge) -> bool:
    trainer, engine = edge.trainer.placement.slots, edge.engine.placement.slots
    return bool(trainer) and trainer[:1] == engine[:1] and set(trainer) <= set(engine)


def _whole(edge: Edge) -> bool:
    return all(_partition(request, slot) is None for request in (edge.trainer, edge.engine) for slot in request.placement.slots)


def _partition(request: RoleRequest, slot: Slot) -> str | None:
    node = request.inventories[slot.node]
    return node.devices[slot.device].partition if slot.device < len(node.devices) else None


def _cost(protocol: str, edge: Edge) -> TransferCost:
    """Rates by the vendor's figures; nothing was measured. Unknown where the path is a network."""
    kind = common_kind(device for node in edge.engine.inventories for device in node.devices)
    if kind is None:
        return TransferCost(None)
    if protocol == "host_shm":
        # To the host and back, one after the other, each over PCIe 5 x16.
        return TransferCost(HOST_LINK / 2, provenance="derived")
    if protocol == "device_ipc" and len(edge.trainer.placement.slots) == 1:
        return TransferCost(kind.memory_bandwidth / 2, provenance="derived")
    if protocol in ("device_ipc", "collective") and edge.on_one_host:
        return TransferCost(kind.link, provenance="spec")
    return TransferCost(None)
