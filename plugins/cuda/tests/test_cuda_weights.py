"""Half offers: what holds on which edge, and what they cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from vime.facts.inventory import FabricDomain, NodeInventory, Tri
from vime.facts.process import RolePlacement, RoleRequest, Slot
from vime.facts.transports import Edge, Hosts, Relation, Side
from vime.platforms.lineage import Platform
from vime_cuda import plugin, weights

Node = Callable[..., NodeInventory]
Request = Callable[..., RoleRequest]
DEVICE, NODE, DOMAIN, NETWORK = Relation.SAME_DEVICE, Relation.SAME_NODE, Relation.SAME_DOMAIN, Relation.NETWORK


@pytest.fixture
def edge(node_of: Node, request_for: Request) -> Callable[..., Edge]:
    def make(
        relation: Relation,
        name: str = "h200x8",
        engine: tuple[int, ...] | None = None,
        ranks: tuple[int, ...] = (0,),
        **changed: object,
    ) -> Edge:
        """The trainer's rank on device 0, the engine there too or on device 1, on another node where they are apart."""
        node = node_of(name, **changed)
        engine = engine or ((0,) if relation is DEVICE else (1,))
        home = node if relation in (DEVICE, NODE) else replace(node, hostname="another")
        return Edge(request_for(node, devices=ranks), request_for(home, "engine", devices=engine), relation, 8 * 10**9)

    return make


@pytest.mark.parametrize(
    ("relation", "holding"),
    [
        (DEVICE, {"device_ipc", "host_shm"}),
        (NODE, {"device_ipc", "collective", "host_shm"}),
        (DOMAIN, {"collective"}),
        (NETWORK, {"collective"}),
    ],
)
@pytest.mark.parametrize("side", list(Side))
def test_what_holds_on_an_edge(edge: Callable[..., Edge], relation: Relation, holding: set[str], side: Side) -> None:
    offers = weights.offers(edge(relation), side)
    assert {offer.protocol for offer in offers} == {"device_ipc", "collective", "host_shm"}
    assert {offer.protocol for offer in offers if all(p.holds for p in offer.preconditions)} == holding


def test_the_disk_comes_from_base(edge: Callable[..., Edge]) -> None:
    assert "disk" in {offer.protocol for offer in Platform.of(plugin).transports(edge(NETWORK), Side.ENGINE)}


def test_two_ranks_on_one_device_are_refused_with_nccls_reason(edge: Callable[..., Edge]) -> None:
    (offer,) = [o for o in weights.offers(edge(DEVICE), Side.TRAINER) if o.protocol == "collective"]
    assert [p.reason for p in offer.preconditions if not p.holds] == ["NCCL refuses two ranks of a group on one device"]


def test_devices_without_peer_access_do_not_hand_over_handles(edge: Callable[..., Edge]) -> None:
    def reasons(**changed: object) -> list[str]:
        (offer,) = [o for o in weights.offers(edge(NODE, "h200x2-vm", **changed), Side.ENGINE) if o.protocol == "device_ipc"]
        return [p.reason for p in offer.preconditions if not p.holds]

    assert reasons() == []
    assert reasons(p2p=None) == []
    (reason,) = reasons(p2p={"nvlink": 5, "read": 5})
    assert "device 1 cannot read device 0" in reason


def test_positions_under_a_mask_are_not_nvmls_numbers(node_of: Node, request_for: Request) -> None:
    """Devices 6 and 7 alone are left; only 6 and 7 are cut from each other."""
    paths = [
        [None if a == b else {"nvlink": 5, "read": 5} if {a, b} == {6, 7} else {"read": 0} for b in range(8)] for a in range(8)
    ]
    node = node_of("h200x8", p2p=paths)
    node = replace(node, devices=node.devices[6:])
    apart = Edge(request_for(node), request_for(node, "engine", devices=(1,)), NODE, 8 * 10**9)
    (offer,) = [o for o in weights.offers(apart, Side.ENGINE) if o.protocol == "device_ipc"]
    assert ["device 7 cannot read device 6" in p.reason for p in offer.preconditions if not p.holds] == [True]


def test_a_split_device_hands_over_nothing(edge: Callable[..., Edge]) -> None:
    (offer,) = [o for o in weights.offers(edge(DEVICE, "mig-on"), Side.TRAINER) if o.protocol == "device_ipc"]
    (reason,) = [p.reason for p in offer.preconditions if not p.holds]
    assert "MIG" in reason


def test_a_side_that_does_not_speak_nccl_says_what_it_speaks(edge: Callable[..., Edge]) -> None:
    found = edge(NETWORK)
    other = replace(found.engine, capabilities=replace(found.engine.capabilities, collectives=("gloo",)))
    (offer,) = [o for o in weights.offers(replace(found, engine=other), Side.ENGINE) if o.protocol == "collective"]
    assert [p.reason for p in offer.preconditions if not p.holds] == ["the engine side must speak nccl; it speaks gloo"]


@pytest.mark.parametrize("side", list(Side))
def test_halves_by_name_and_what_the_trainers_are_told(edge: Callable[..., Edge], side: Side) -> None:
    named = {o.protocol: (o.factory.target, dict(o.factory.options)) for o in weights.offers(edge(NODE), side)}
    half, told = side.value.capitalize(), side is Side.TRAINER
    assert named == {
        "device_ipc": (
            f"vime.weights.transports.device_ipc:DeviceIpc{half}",
            {"exporter": "vime_cuda.device_export:CudaExporter"} if told else {},
        ),
        "collective": (
            f"vime.weights.transports.collective:Collective{half}",
            {"backend": "nccl", "device": "cuda"} if told else {},
        ),
        "host_shm": (f"vime.weights.transports.host_shm:HostShm{half}", {}),
    }


def test_only_engine_devices_without_a_rank_need_peer_access(edge: Callable[..., Edge]) -> None:
    """Every rank sends to the workers on its own device, the first one to those on devices without a rank."""

    def reasons(ranks: tuple[int, ...]) -> list[str]:
        apart = edge(DEVICE, "h200x2-vm", engine=(0, 1), ranks=ranks, p2p={"nvlink": 5, "read": 5})
        (offer,) = [o for o in weights.offers(apart, Side.ENGINE) if o.protocol == "device_ipc"]
        return [p.reason for p in offer.preconditions if not p.holds]

    (reason,) = reasons((0,))
    assert "device 1 cannot read device 0" in reason
    assert reasons((0, 1)) == []


@pytest.mark.parametrize(
    ("ranks", "engine", "rate"),
    [
        ((0, 1, 2, 3), (0, 1, 2, 3), 1 / (1 / 235e9 + 1 / 370e9)),
        ((0, 1), (0, 1, 2, 3), 370e9 / 2),
        ((0, 1), (0,), 235e9),
    ],
    ids=["a rank on each device", "two devices without a rank", "all on the first rank's device"],
)
def test_a_rate_depends_on_who_has_a_rank_beside_it(
    edge: Callable[..., Edge], ranks: tuple[int, ...], engine: tuple[int, ...], rate: float
) -> None:
    offers = weights.offers(edge(DEVICE, engine=engine, ranks=ranks), Side.TRAINER)
    (offer,) = [o for o in offers if o.protocol == "device_ipc"]
    assert offer.cost.bytes_per_s == pytest.approx(rate)


@pytest.mark.parametrize("side", list(Side))
def test_engines_are_asked_to_write_in_place(edge: Callable[..., Edge], side: Side) -> None:
    options = {o.protocol: dict(o.options) for o in weights.offers(edge(DEVICE), side)}
    wanted = {"in_place": True} if side is Side.ENGINE else {}
    assert options == dict.fromkeys(("device_ipc", "collective", "host_shm"), wanted)


def test_processes_see_the_device_that_sends(node_of: Node) -> None:
    assert plugin.vime_ray_binding(node_of("h200x8")).full_node_mask


@pytest.mark.parametrize(
    ("name", "relation", "engine", "protocol", "rate", "provenance"),
    [
        ("h200x8", DEVICE, (0,), "device_ipc", 235e9, "measured"),
        ("h200x8", NODE, (4,), "device_ipc", 370e9, "measured"),
        ("h200x8", NODE, (4, 5, 6, 7), "device_ipc", 92.5e9, "derived"),
        ("h200x8", DEVICE, (0, 1, 2, 3), "device_ipc", 370e9 / 3, "derived"),
        ("h200x8", NODE, (4,), "collective", 294e9, "measured"),
        ("h200x8", NODE, (4, 5, 6, 7), "collective", 294e9, "measured"),
        ("a100x8", NODE, (4,), "collective", 240e9 * 294 / 370, "derived"),
        ("b200x8", NODE, (4,), "device_ipc", 18 * 40.1e9, "derived"),
        ("h200x8", NODE, (4,), "host_shm", 27.7e9, "derived"),
        ("mixed-devices", NODE, (1,), "device_ipc", None, "unknown"),
        ("h200x8", NETWORK, (4,), "collective", None, "unknown"),
        ("gb200-tray", DOMAIN, (1,), "collective", None, "unknown"),
    ],
)
def test_costs_are_measured_derived_or_unknown(
    edge: Callable[..., Edge],
    name: str,
    relation: Relation,
    engine: tuple[int, ...],
    protocol: str,
    rate: float | None,
    provenance: str,
) -> None:
    (offer,) = [o for o in weights.offers(edge(relation, name, engine=engine), Side.TRAINER) if o.protocol == protocol]
    assert offer.cost.bytes_per_s == (None if rate is None else pytest.approx(rate))
    assert offer.cost.provenance == provenance


@pytest.fixture
def spread(node_of: Node, request_for: Request) -> Callable[..., Edge]:
    def make(name: str, *, fabric: bool, engine: int = 0) -> Edge:
        """A rank on device 0 of two nodes, the first engine on a device of the second, another one on the first."""
        node = node_of(name)
        fabrics = (FabricDomain("rack", "0", Tri.YES, ""),) * 2 if fabric else (None, FabricDomain("rack", "0", Tri.YES, ""))
        nodes = (replace(node, fabric=fabrics[0]), replace(node, hostname="another", fabric=fabrics[1]))
        trainer = request_for(node, devices=(0,))
        trainer = replace(trainer, inventories=nodes, placement=RolePlacement("actor", (Slot(0, 0), Slot(1, 0))))
        beside = replace(request_for(node, "engine"), inventories=nodes)
        beside = replace(beside, placement=RolePlacement("rollout", (Slot(1, engine),)))
        return Edge(trainer, beside, NETWORK if engine else DEVICE, 8 * 10**9, Hosts.EACH)

    return make


@pytest.mark.parametrize("engine", [0, 4])
@pytest.mark.parametrize("side", list(Side))
def test_on_several_nodes_device_memory_goes_to_engines_beside_a_rank(
    spread: Callable[..., Edge], engine: int, side: Side
) -> None:
    edge = spread("h200x8", fabric=False, engine=engine)
    offers = {offer.protocol: offer for offer in weights.offers(edge, side)}
    holding = {name for name, offer in offers.items() if all(p.holds for p in offer.preconditions)}
    assert holding == ({"device_ipc", "collective"} if engine else {"device_ipc"})
    apart = weights.offers(replace(edge, hosts=Hosts.APART), side)
    (refused,) = [o for o in apart if o.protocol == "device_ipc"]
    assert "some engine has no trainer rank on its node" in next(p.reason for p in refused.preconditions if not p.holds)


def test_a_worker_without_a_rank_on_its_device_reads_from_the_first_rank_of_its_own_node(
    spread: Callable[..., Edge], node_of: Node
) -> None:
    edge = spread("h200x8", fabric=False, engine=4)
    cut = node_of("h200x8", p2p={"nvlink": 5, "read": 5}).vendor
    nodes = (edge.engine.inventories[0], replace(edge.engine.inventories[1], vendor=cut))
    (offer,) = [
        o
        for o in weights.offers(replace(edge, engine=replace(edge.engine, inventories=nodes)), Side.ENGINE)
        if o.protocol == "device_ipc"
    ]
    assert any("device 4 cannot read device 0" in p.reason for p in offer.preconditions if not p.holds)


@pytest.mark.parametrize(("fabric", "rate"), [(True, 1 / (1 / (18 * 40.1e9) + 1 / 235e9)), (False, None)])
def test_ranks_on_several_nodes_gather_at_the_fabrics_rate_or_an_unknown_one(
    spread: Callable[..., Edge], fabric: bool, rate: float | None
) -> None:
    (offer,) = [o for o in weights.offers(spread("gb200-tray", fabric=fabric), Side.TRAINER) if o.protocol == "device_ipc"]
    assert offer.cost.bytes_per_s == (None if rate is None else pytest.approx(rate))


def test_nothing_is_promised_where_nvlink_is_down(edge: Callable[..., Edge]) -> None:
    offers = weights.offers(edge(NODE, "h200x2-vm", p2p={"nvlink": 5, "read": 0}), Side.TRAINER)
    assert {o.protocol: o.cost.bytes_per_s for o in offers if o.protocol != "host_shm"} == {
        "device_ipc": None,
        "collective": None,
    }
