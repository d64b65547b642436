"""The halves of weight transports on NVIDIA GPUs. Rates were measured with separate scripts on one and two H200."""

from __future__ import annotations

from vime.facts.inventory import NodeInventory, in_one_domain
from vime.facts.process import Factory, RoleRequest
from vime.facts.transports import Edge, Precondition, Relation, Side, TransferCost, TransportOffer
from vime_cuda.inventory import product
from vime_cuda.perf import table

_TRANSPORTS = "vime.weights.transports"
_EXPORTER = {"exporter": "vime_cuda.device_export:CudaExporter"}
_GROUP = {"backend": "nccl", "device": "cuda"}

# Engine halves learn exporter, backend and device from the trainer's half when they are initialised.
HALVES: dict[str, dict[Side, Factory]] = {
    "device_ipc": {
        Side.TRAINER: Factory(f"{_TRANSPORTS}.device_ipc:DeviceIpcTrainer", _EXPORTER),
        Side.ENGINE: Factory(f"{_TRANSPORTS}.device_ipc:DeviceIpcEngine"),
    },
    "collective": {
        Side.TRAINER: Factory(f"{_TRANSPORTS}.collective:CollectiveTrainer", _GROUP),
        Side.ENGINE: Factory(f"{_TRANSPORTS}.collective:CollectiveEngine"),
    },
    "host_shm": {
        Side.TRAINER: Factory(f"{_TRANSPORTS}.host_shm:HostShmTrainer"),
        Side.ENGINE: Factory(f"{_TRANSPORTS}.host_shm:HostShmEngine"),
    },
}

_OPTIONS: dict[Side, dict[str, object]] = {Side.TRAINER: {}, Side.ENGINE: {"in_place": True}}
"""vLLM's dense layers multiply with the live parameters as the checkpoint has them: 0.26 changes them for the CPU only
(`UnquantizedLinearMethod` and `UnquantizedEmbeddingMethod`). So an update is a copy into them, also after sleep, whose end maps
them at the same addresses and brings back the buffers. Engines whose model is not of this kind reload layer by layer."""

KIN = frozenset({"cuda", "gb200"})
"""Platforms whose collectives are NCCL's."""

_ON_ONE_DEVICE = 235e9
"""8.04 GB from a trainer's tensors into the model of an engine on the same H200 took 0.034 s."""
_OF_SCALE_UP = 294 / 370
"""Between two H200 a peer copy ran at 370e9, NCCL's broadcast of 400 tensors of 20 MiB at 294e9 (of 1 GiB at 368e9)."""
_PINNED = 55.4e9
"""Copies between page-locked host memory and an H200. The way through the host takes two of them, one after the other."""


def offers(edge: Edge, side: Side) -> tuple[TransportOffer, ...]:
    """This side's half of every transport, with what it needs of the edge. The disk comes from `base`."""
    return tuple(
        TransportOffer(
            protocol,
            side,
            halves[side],
            _cost(protocol, edge),
            preconditions=_preconditions(protocol, edge, side),
            options=_OPTIONS[side],
        )
        for protocol, halves in HALVES.items()
    )


def _preconditions(protocol: str, edge: Edge, side: Side) -> tuple[Precondition, ...]:
    request = edge.trainer if side is Side.TRAINER else edge.engine
    if protocol == "host_shm":
        return (Precondition(edge.on_one_host, "trainer and engine must run on one node to share its memory"),)
    if protocol == "collective":
        speaks = "nccl" in request.capabilities.collectives
        spoken = ", ".join(request.capabilities.collectives) or "none"
        return (
            Precondition(edge.relation is not Relation.SAME_DEVICE, "NCCL refuses two ranks of a group on one device"),
            Precondition(speaks, f"the {side} side must speak nccl; it speaks {spoken}"),
            *((_same_library(edge),) if side is Side.TRAINER else ()),
        )
    opens = "cuda_ipc" in request.capabilities.ipc
    return (
        Precondition(
            edge.rank_beside_engines,
            "device memory can be opened by processes of the same node only, and some engine has no trainer rank on its node",
        ),
        Precondition(opens, f"the {side} side must open device memory: {_why_not(request)}"),
        _peer_access(edge),
    )


def _same_library(edge: Edge) -> Precondition:
    """The trainer's library is the group's. Another vendor's answers to the same name in torch and does not speak with NCCL."""
    others = sorted({node.platform for node in edge.engine.inventories} - KIN)
    return Precondition(not others, f"the engine side must have NCCL too; it is on {', '.join(others) or 'the same'}")


def _why_not(request: RoleRequest) -> str:
    return request.capabilities.absent.get("ipc", "its platform does not name cuda_ipc")


def _peer_access(edge: Edge) -> Precondition:
    """Every engine device that no rank is on must reach the first rank's, which sends there; a node whose facts are unknown is
    not refused.
    """
    cut = [(a, b) for node, a, b in _apart(edge) if _reached(node, "p2p_read", a, b) is False]
    text = "; ".join(f"device {a} cannot read device {b}" for a, b in cut[:3])
    return Precondition(not cut, f"devices must read each other's memory (NVML's peer status): {text or 'they do'}")


def _pairs(edge: Edge) -> list[tuple[NodeInventory, int, int]]:
    """(node, engine's device, sending device) by NVML's numbers, for the engine's devices on nodes with a rank, other than the
    first rank's there.
    """
    found = [(edge.engine.inventories[s.node], s.device) for s in edge.engine.placement.slots]
    near = [(node, node.devices[position].index, _ranks(edge, node)) for node, position in found]
    return [(node, index, ranks[0]) for node, index, ranks in near if ranks and index != ranks[0]]


def _ranks(edge: Edge, node: NodeInventory) -> list[int]:
    """NVML's numbers of the trainer's devices on a node, in the order of ranks."""
    request = edge.trainer
    placed = [(request.inventories[slot.node], slot.device) for slot in request.placement.slots]
    return [home.devices[position].index for home, position in placed if home.hostname == node.hostname]


def _apart(edge: Edge) -> list[tuple[NodeInventory, int, int]]:
    """Of `_pairs` those whose engine device belongs to no rank of the trainer: each rank sends to the workers on its device."""
    return [pair for pair in _pairs(edge) if pair[1] not in _ranks(edge, pair[0])]


def _in_one_domain(edge: Edge) -> bool:
    """Whether ranks on several nodes gather over NVLink."""
    request = edge.trainer
    return in_one_domain(request.inventories[slot.node] for slot in request.placement.slots)


def _reached(node: NodeInventory, matrix: str, a: int, b: int) -> bool | None:
    try:
        return node.vendor[matrix][a][b]
    except (KeyError, IndexError):
        return None


def _cost(protocol: str, edge: Edge) -> TransferCost:
    """From what was measured on H200, scaled by the rates of `perf`; unknown across nodes and where NVLink is not there."""
    node = edge.trainer.inventories[0]
    on_h200 = {product(d.name) for r in (edge.trainer, edge.engine) for n in r.inventories for d in n.devices} == {"H200"}
    provenance = "measured" if on_h200 else "derived"
    if protocol == "host_shm":
        return TransferCost(_PINNED / 2, fixed_s=0.01, provenance="derived")
    pairs, scale_up = _pairs(edge), table(node).get("scale_up").value
    if protocol == "device_ipc" and not pairs and edge.on_one_host:
        return TransferCost(_ON_ONE_DEVICE, fixed_s=0.005, provenance=provenance)
    near = edge.on_one_host or (protocol == "device_ipc" and edge.rank_beside_engines and _in_one_domain(edge))
    if not near or scale_up is None or any(_reached(n, "p2p_nvlink", a, b) is False for n, a, b in pairs):
        return TransferCost(None)
    if protocol == "collective":
        return TransferCost(scale_up * _OF_SCALE_UP, fixed_s=0.01, provenance=provenance)
    if not (apart := _apart(edge)):
        # Each rank gathers what all have over NVLink first, then hands it over on its own device.
        return TransferCost(1 / (1 / scale_up + 1 / _ON_ONE_DEVICE), fixed_s=0.01, provenance="derived")
    # The sending device's links are shared by all workers that read from it at once.
    return TransferCost(scale_up / len(apart), fixed_s=0.005, provenance=provenance if len(pairs) == 1 else "derived")
