"""The choice of a transport, and every reason against the others."""

from __future__ import annotations

from dataclasses import replace

import pytest

from vime.errors import PlanError
from vime.facts.capabilities import Capabilities
from vime.facts.inventory import FabricDomain, NodeInventory, Tri
from vime.facts.perf import PerfTable, Provenance, Quantity
from vime.facts.process import Factory, Parallel, RoleKind, RolePlacement, RoleRequest, Slot
from vime.facts.transports import Edge, Hosts, Precondition, Relation, Side, TransferCost, TransportOffer
from vime.planning.make import make_plan
from vime.planning.needs import PlanNeeds
from vime.planning.plan import TransportPlan
from vime.planning.time import least_certain, switch, transfer
from vime.planning.transports import End, Wishes, choose, hosts, relation
from vime.testing.platforms import TINY_MODEL, FakePlatform
from vime.topology.load import load_topology

NODE = FakePlatform().node("n0")


def request(role: str) -> RoleRequest:
    caps = Capabilities("acme", ("bfloat16",), "bfloat16")
    return RoleRequest(role, RoleKind.TRAINER, RolePlacement(role, (Slot(0, 0),)), (NODE,), caps, Parallel(), "bfloat16")


EDGE = Edge(request("actor"), request("rollout"), Relation.SAME_NODE, num_bytes=1000)


def half(side: Side, protocol: str, rate: float | None = 100.0, **more: object) -> TransportOffer:
    cost = TransferCost(rate, provenance="measured")
    return replace(TransportOffer(protocol, side, Factory("m:f"), cost), **more)


def both(protocol: str, rate: float | None = 100.0, **more: object) -> tuple[TransportOffer, TransportOffer]:
    return half(Side.TRAINER, protocol, rate, **more), half(Side.ENGINE, protocol, rate, **more)


def pick(*pairs: tuple[TransportOffer | None, TransportOffer | None], wishes: Wishes | None = None) -> TransportPlan:
    trainer = [t for t, _ in pairs if t is not None]
    engine = [e for _, e in pairs if e is not None]
    return choose(EDGE, (trainer, engine), wishes or Wishes(), where="t.yaml:9")


def reasons(plan: TransportPlan) -> dict[str, str]:
    return {r.protocol: r.reason for r in plan.rejected}


def test_the_fastest_pair_wins_and_the_others_say_how_much_slower() -> None:
    plan = pick(both("disk", 10.0), both("ipc", 1000.0), both("collective", 100.0))
    assert (plan.protocol, plan.seconds, plan.provenance) == ("ipc", 1.0, "measured")
    assert plan.trainer.side is Side.TRAINER
    assert plan.engine.side is Side.ENGINE
    assert reasons(plan) == {
        "collective": "slower here: 10 s against 1 s",
        "disk": "slower here: 100 s against 1 s",
    }


def test_halves_must_meet() -> None:
    plan = pick(both("disk"), (half(Side.TRAINER, "a"), None), (None, half(Side.ENGINE, "b")))
    assert plan.protocol == "disk"
    assert reasons(plan) == {"a": "the engine side does not offer it", "b": "the trainer side does not offer it"}


def test_a_failed_precondition_of_either_side_is_the_reason() -> None:
    no = (Precondition(True, "fine"), Precondition(False, "no shared memory"))
    trainer, engine = both("ipc", 1e9)
    plan = pick((trainer, replace(engine, preconditions=no)), both("disk"))
    assert reasons(plan) == {"ipc": "no shared memory"}


def test_forbid_prefer_and_require() -> None:
    pairs = both("ipc", 1000.0), both("collective", 100.0), both("disk", 10.0)
    assert reasons(pick(*pairs, wishes=Wishes(forbid=("ipc",))))["ipc"] == "forbidden by the topology"
    preferred = pick(*pairs, wishes=Wishes(prefer=("disk", "collective")))
    assert preferred.protocol == "disk"
    assert reasons(preferred)["ipc"] == "the topology prefers disk"
    required = pick(*pairs, wishes=Wishes(require=("collective", "disk")))
    assert required.protocol == "collective"
    assert reasons(required)["ipc"] == "the topology requires collective or disk"


def test_an_unknown_time_comes_last_and_stays_unknown() -> None:
    plan = pick(both("new", None), both("disk", 10.0))
    assert plan.protocol == "disk"
    assert reasons(plan)["new"] == "its time is unknown (the trainer side's rate is unknown)"
    alone = pick(both("new", None))
    assert (alone.seconds, alone.provenance) == (None, "unknown")


def test_nothing_left_lists_every_reason() -> None:
    with pytest.raises(PlanError) as caught:
        pick((half(Side.TRAINER, "a"), None), both("disk"), wishes=Wishes(forbid=("disk",)))
    assert caught.value.where == "t.yaml:9"
    assert caught.value.what == (
        "E241 no transport is left for actor -> rollout: a: the engine side does not offer it; disk: forbidden by the topology"
    )


def test_a_required_transport_that_cannot_be_used() -> None:
    no = (Precondition(False, "different devices"),)
    with pytest.raises(PlanError, match="E242 a required transport cannot be used: ipc: different devices"):
        pick(both("ipc", preconditions=no), both("disk"), wishes=Wishes(require=("ipc",)))
    with pytest.raises(PlanError, match=r"E242 .* nope: the trainer and the engine side does not offer it"):
        pick(both("disk"), wishes=Wishes(require=("nope",)))


# ---- relation


def end(pool: str, *slots: Slot, nodes: tuple[NodeInventory, ...] = (NODE,)) -> End:
    return End(pool, nodes, slots)


def test_relations() -> None:
    two = (FakePlatform().node("n0"), FakePlatform().node("n1"))
    a0, a1, b0 = Slot(0, 0), Slot(0, 1), Slot(1, 0)
    assert relation(end("p", a0, a1), end("p", a1)) is Relation.SAME_DEVICE
    assert relation(end("p", a0), end("p", a1)) is Relation.SAME_NODE
    assert relation(end("p", a0, nodes=two), end("p", a1, b0, nodes=two)) is Relation.NETWORK
    assert relation(end("p", a0), end("q", a0)) is Relation.SAME_NODE
    assert relation(end("p", a0), end("q", a0, nodes=(two[1],))) is Relation.NETWORK


def test_two_platforms_on_one_machine_are_on_one_node() -> None:
    """A machine is known by its name, whoever looks at it; that the devices are others keeps the relation from being nearer."""
    other = replace(FakePlatform(name="other").node("n0"), virtual=True)
    ends = end("p", Slot(0, 0)), end("q", Slot(0, 0), nodes=(other,))
    assert relation(*ends) is Relation.SAME_NODE
    assert hosts(*ends, [ends[1].slots]) is Hosts.ONE
    away = replace(other, hostname="n1")
    apart = ends[0], end("q", Slot(0, 0), nodes=(away,))
    assert relation(*apart) is Relation.NETWORK
    assert hosts(*apart, [apart[1].slots]) is Hosts.APART


def test_on_which_hosts_an_edge_is() -> None:
    """Engines of two devices on nodes of two; ranks on some."""
    nodes = tuple(FakePlatform().node(f"n{i}", devices=2) for i in range(3))

    def at(ranks: list[Slot], *engines: tuple[Slot, ...]) -> Hosts:
        trainer = end("p", *ranks, nodes=nodes)
        return hosts(trainer, end("p", *(slot for one in engines for slot in one), nodes=nodes), engines)

    a, b, c = ((Slot(n, 0), Slot(n, 1)) for n in range(3))
    assert at([*a], a) is Hosts.ONE
    assert at([a[0]], (a[1],)) is Hosts.ONE
    assert at([*a, *b], a, b) is Hosts.EACH
    assert at([a[0], b[0]], (a[1],), (b[1],)) is Hosts.EACH
    assert at([*a, *b], a) is Hosts.EACH, "the ranks alone are on two"
    assert at([*a, *b], a, c) is Hosts.APART
    assert at([*a], b) is Hosts.APART
    assert at([*a, *b], (a[0], b[0])) is Hosts.APART, "one engine on two"


@pytest.mark.parametrize(
    ("share", "rollout", "protocol"),
    [
        (True, {"engines": 4, "parallel": {"tp": 4}}, "device_ipc"),
        (True, {"engines": 1, "parallel": {"tp": 4, "pp": 4}}, "collective"),
        (False, {"engines": 4, "parallel": {"tp": 4}}, "collective"),
    ],
    ids=["each engine on one host", "an engine on both hosts", "engines on hosts of their own"],
)
def test_what_passes_memory_of_a_host_is_planned_where_every_engine_has_a_rank_on_its_own(
    share: bool, rollout: dict[str, object], protocol: str
) -> None:
    source: dict[str, object] = {
        "name": "hosts",
        "pools": {"p": {"platform": "acme", "nodes": 2 if share else 4, "devices_per_node": 8}},
        "roles": {"actor": {"kind": "train", "devices": 16}, "rollout": {"kind": "rollout", **rollout}},
        "share": [{"roles": ["actor", "rollout"], "residency": "park"}] if share else [],
    }
    plan = make_plan(load_topology(source), model=TINY_MODEL, needs=PlanNeeds(), platforms={"acme": FakePlatform()})
    assert plan.transport is not None
    assert plan.transport.protocol == protocol
    assert not plan.transport.edge.on_one_host
    assert plan.transport.edge.rank_beside_engines == (protocol == "device_ipc")


def test_without_hosts_an_edge_goes_by_its_relation() -> None:
    for near in Relation:
        edge = replace(EDGE, relation=near)
        inside = near in (Relation.SAME_DEVICE, Relation.SAME_NODE)
        assert (edge.on_one_host, edge.rank_beside_engines) == (inside, inside)
        told = replace(edge, hosts=Hosts.EACH)
        assert (told.on_one_host, told.rank_beside_engines) == (False, True)


def test_nodes_of_one_fabric_domain() -> None:
    def rack(usable: Tri, clique: str = "1") -> NodeInventory:
        host = FakePlatform().node(f"n{clique}{usable}")
        return replace(host, fabric=FabricDomain("rack", clique, usable, ""))

    def at(first: NodeInventory, second: NodeInventory) -> Relation:
        other = replace(second, hostname="other")
        return relation(end("p", Slot(0, 0), nodes=(first,)), end("q", Slot(0, 0), nodes=(other,)))

    assert at(rack(Tri.YES), rack(Tri.YES)) is Relation.SAME_DOMAIN
    assert at(rack(Tri.YES), rack(Tri.YES, "2")) is Relation.NETWORK
    assert at(rack(Tri.UNKNOWN), rack(Tri.UNKNOWN)) is Relation.NETWORK


# ---- time


def test_the_seconds_of_an_update() -> None:
    slow = TransferCost(100.0, fixed_s=1.0, per_chunk_s=0.1, provenance="spec")
    fast = TransferCost(400.0, fixed_s=2.0, per_chunk_s=0.0, provenance="measured")
    estimate = transfer(slow, fast, num_bytes=1000, buffer_bytes=300)
    assert estimate.seconds == pytest.approx(2.0 + 4 * 0.1 + 10.0)
    assert estimate.provenance == "spec"


def test_certainty() -> None:
    assert least_certain(("measured", "spec", "derived")) == "spec"
    assert least_certain(("measured", "guessed")) == "unknown"
    assert least_certain(()) == "unknown"


def test_devices_of_one_memory_node_share_what_it_can_do() -> None:
    link = Quantity(100.0, "bytes/s", Provenance.MEASURED)
    table = PerfTable({"host_link": link, "host_memory": Quantity(160.0, "bytes/s", Provenance.SPEC)})
    homes = replace(NODE, devices=tuple(replace(d, numa_node=d.index // 2) for d in NODE.devices[:4]))
    assert switch(1000, table, homes).seconds == 12.5
    assert switch(1000, table, homes).provenance == "spec"
    assert switch(1000, table, NODE).seconds == 50.0
    assert switch(1000, PerfTable({"host_link": link}), NODE).seconds == 10.0
    assert switch(0, table, NODE).seconds == 0.0
    assert switch(1000, PerfTable(), NODE).seconds is None
