"""Pools on the nodes of a cluster: which are taken, in what order, and what is said where they do not suffice."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vime.errors import PlanError, TopologyError
from vime.facts.bindings import RayBinding
from vime.facts.inventory import FabricDomain, NodeInventory, Tri
from vime.planning.joined import Offer, check_engines, choose_nodes
from vime.planning.make import Here, make_plan
from vime.planning.masks import by_host
from vime.planning.needs import PlanNeeds
from vime.planning.place import physical_order
from vime.testing.platforms import TINY_MODEL, FakePlatform
from vime.topology.load import load_topology

ADDRESS = "10.0.0.1:6379"
FAKE = FakePlatform()


def offer(host: str, devices: int = 4, *, count: float | None = None, domain: str | None = None, **over: Any) -> Offer:
    """A node of discrete devices, all of which Ray counts unless `count` says otherwise."""
    fabric = FabricDomain(domain, "1", Tri.YES, "told") if domain else None
    node = replace(FAKE.node(host, devices), fabric=fabric, virtual=over.pop("virtual", False))
    binding = over.pop("binding", RayBinding("ACME", ("VISIBLE",)))
    resources = {binding.resource: float(devices) if count is None else count}
    return Offer(host, node, binding, **{"resources": resources, **over})


def topology(pool: dict[str, Any], *, actor: int = 4, engines: int = 4, pp: int = 1) -> dict[str, Any]:
    return {
        "pools": {"p": {"platform": "acme", **pool}},
        "roles": {
            "actor": {"kind": "train", "devices": actor},
            "rollout": {"kind": "rollout", "engines": engines, "parallel": {"pp": pp}},
        },
    }


def chosen(pool: dict[str, Any], *offers: Offer) -> list[str]:
    _, nodes = choose_nodes(load_topology(topology(pool)), {"acme": offers}, address=ADDRESS)
    return [node.hostname for node in nodes["p"]]


def test_nodes_are_in_physical_order_whatever_order_ray_has() -> None:
    assert chosen({"nodes": 3}, offer("node-10"), offer("node-9"), offer("node-2")) == ["node-2", "node-9", "node-10"]
    assert chosen({"nodes": 2}, offer("10.0.0.10"), offer("10.0.0.2")) == ["10.0.0.2", "10.0.0.10"]
    mixed = [offer("n3", domain="a"), offer("n1", domain="b"), offer("n2", domain="a"), offer("n0", domain="b")]
    assert chosen({"nodes": 4}, *mixed) == ["n2", "n3", "n0", "n1"]
    assert chosen({"nodes": 2, "select": {"hosts": ["n3", "n0"]}}, *mixed) == ["n3", "n0"]


def test_what_a_domain_has_left_over_cuts_no_segment() -> None:
    nodes = [offer(f"a{i}", domain="a") for i in range(3)] + [offer(f"b{i}", domain="b") for i in range(2)]
    pool = {"nodes": 4, "domain": {"kind": "fabric", "segment_nodes": 2, "require": "strict"}}
    assert chosen(pool, *nodes) == ["a0", "a1", "b0", "b1"]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 200)), unique=True, max_size=20), st.integers(1, 4))
def test_every_node_is_kept_and_whole_segments_lie_in_one_domain(named: list[tuple[str, int]], size: int) -> None:
    nodes = [replace(FAKE.node(f"h{n}-{d}"), fabric=FabricDomain(d, "1", Tri.YES, "told")) for d, n in named]
    order = physical_order(nodes, size)
    assert sorted(order) == list(range(len(nodes)))
    domains = [named[i][0] for i in order]
    whole = sum(domains.count(d) // size * size for d in set(domains))
    assert all(len(set(domains[at : at + size])) == 1 for at in range(0, whole, size))
    hosts = [[nodes[i].hostname for i in order[:whole] if named[i][0] == d] for d in set(domains)]
    assert all(names == sorted(names, key=by_host) for names in hosts)


def test_slots_of_hosts_are_those_that_nodes_offer_unless_sizes_are_written() -> None:
    binding = RayBinding("slot", virtual=True)
    offers = [offer(f"n{i}", 8, count=size, virtual=True, binding=binding) for i, size in enumerate((1, 2, 1, 2))]
    loaded, nodes = choose_nodes(load_topology(topology({"nodes": 4})), {"acme": offers}, address=ADDRESS)
    assert [node.hostname for node in nodes["p"]] == ["n0", "n1", "n2", "n3"]
    pool: Any = loaded.topology.pools["p"]
    assert [group.devices for group in pool.nodes] == [1, 2, 1, 2]
    assert chosen({"nodes": [{"count": 1, "devices": 2}, {"count": 2, "devices": 1}]}, *offers) == ["n1", "n0", "n2"]
    with pytest.raises(TopologyError, match=r"3 nodes of 2, 2, 2 devices asked for, 2 there, 1 missing; n0: offers 1; n1"):
        chosen({"nodes": 3, "devices_per_node": 2}, *offers)


@pytest.mark.parametrize(
    ("bad", "told"),
    [
        (Offer("n1", problem="cannot run vime: no module"), "n1: cannot run vime: no module"),
        (offer("n1", count=0.0, resources={"CPU": 8.0}), r"n1: offers no ACME \(it offers CPU 8\)"),
        (offer("n1", binding=RayBinding("ACME", labels={"rack": "7"}), labels={"rack": "6"}), "label rack is '6', not '7'"),
        (offer("n1", binding=RayBinding("ACME", labels={"rack": "7"})), "label rack is None, not '7'"),
        (offer("n1", count=2.0), "n1: has 4 devices, but Ray counts 2 x ACME"),
        (offer("n1", env={"VISIBLE": "9"}), "n1: E261 VISIBLE has the entry '9', which names no device of n1"),
    ],
)
def test_a_node_that_cannot_be_used_is_named_with_the_command_that_starts_it(bad: Offer, told: str) -> None:
    with pytest.raises(TopologyError, match=told) as raised:
        chosen({"nodes": 2}, offer("n0"), bad)
    text = str(raised.value)
    assert "E201 pools.p.nodes: 2 nodes asked for, 1 there, 1 missing; n0: offers 4" in text
    assert f"`vime node start --platform acme --address {ADDRESS}`" in text


def test_no_node_is_in_two_pools() -> None:
    source = topology({"nodes": 1})
    source["pools"]["q"] = {"platform": "acme", "nodes": 1}
    source["roles"]["actor"]["pool"], source["roles"]["rollout"]["pool"] = "p", "q"
    offers = {"acme": (offer("n0"), offer("n1"))}
    _, nodes = choose_nodes(load_topology(source), offers, address=ADDRESS)
    assert [nodes[name][0].hostname for name in ("p", "q")] == ["n0", "n1"]
    with pytest.raises(TopologyError, match=r"pools\.q\.nodes: 1 node asked for, 0 there, 1 missing.*n0: is in another pool"):
        choose_nodes(load_topology(source), {"acme": offers["acme"][:1]}, address=ADDRESS)


class Masked(FakePlatform):
    """Devices that a variable masks, by number or by UUID."""

    kind = "index"

    def ray_binding(self, inventory: NodeInventory) -> RayBinding:
        return RayBinding("ACME", ("VISIBLE",), ("NOSET",), id_kind=self.kind)


class MaskedByUuid(Masked):
    kind = "uuid"


@pytest.mark.parametrize(("fake", "second"), [(Masked(), ["0", "1"]), (MaskedByUuid(), ["n1/0", "n1/1"])])
def test_masks_are_those_of_each_node(fake: Masked, second: list[str]) -> None:
    """n0 is bounded by its own environment, n1 is not; the driver's environment, which has another mask, is not asked."""
    env = {"n0": {"VISIBLE": "n0/3,n0/1"}, "n1": {}}
    plan = make_plan(
        load_topology(topology({"nodes": 2}, actor=2, engines=2)),
        model=TINY_MODEL,
        needs=PlanNeeds(vllm={"kv_cache_memory_bytes": 2**30}),
        platforms={"acme": fake},
        inventories={"p": (fake.node("n0", 4), fake.node("n1", 2))},
        here=Here({"VISIBLE": "0"}, frozenset({"p"}), env),
    )
    assert [mask["VISIBLE"] for mask in plan.actor.masks] == ["n0/3", "n0/1"]
    assert [engine.mask["VISIBLE"] for engine in plan.engines] == second
    assert plan.pools[0].segment_nodes == 2


def test_an_engine_over_several_nodes_is_refused() -> None:
    loaded = load_topology(topology({"nodes": 3}, actor=2, engines=1, pp=4))
    plan = make_plan(
        loaded,
        model=TINY_MODEL,
        needs=PlanNeeds(vllm={"kv_cache_memory_bytes": 2**30}),
        platforms={"acme": FAKE},
        inventories={"p": tuple(FAKE.node(f"n{i}", 2) for i in range(3))},
    )
    with pytest.raises(PlanError, match=r"E301 roles\.rollout\.parallel: engine 0 would span n1, n2") as caught:
        check_engines(loaded, plan)
    assert caught.value.where == loaded.where("roles", "rollout", "parallel")
