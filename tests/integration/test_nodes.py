"""Placement over several Ray nodes: every actor on the planned node, nothing waited for that never comes."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vime.cluster.joined import JoinedCluster, check_shared, look_around
from vime.cluster.placement import Placement
from vime.cluster.session import RaySession
from vime.errors import PlacementError, TopologyError
from vime.planning.joined import choose_nodes
from vime.planning.make import Here, make_plan
from vime.planning.needs import PlanNeeds
from vime.planning.plan import Plan
from vime.platforms.discovery import PluginPolicy, discover
from vime.testing.platforms import TINY_MODEL
from vime.topology.load import load_topology

from ray_nodes import RayNodes

pytestmark = pytest.mark.timeout(240)

SLOTS = (1, 2, 1, 2)
LIMIT_S = 30.0


def topology(nodes: Any, *, actor: int = 3, engines: int = 3) -> dict[str, Any]:
    return {
        "pools": {"p": {"platform": "cpu", "nodes": nodes}},
        "roles": {
            "actor": {"kind": "train", "devices": actor},
            "rollout": {"kind": "rollout", "engines": engines},
        },
    }


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayNodes]:
    started = RayNodes(tmp_path_factory.mktemp("nodes"), SLOTS)
    try:
        started.start()
        yield started
    finally:
        started.close()


def planned(address: str, written: dict[str, Any]) -> tuple[Plan, JoinedCluster]:
    """What `vime run --ray-address` does before it starts anything."""
    plugins = discover(PluginPolicy.read(platform="cpu"))
    platforms = {"cpu": plugins.platform("cpu")}
    cluster = look_around(address, platforms, plugins.resolved())
    loaded, chosen = choose_nodes(load_topology(written), cluster.offers, address=address)
    first = next(iter(chosen.values()))[0].hostname
    plan = make_plan(
        loaded,
        model=TINY_MODEL,
        needs=PlanNeeds(),
        platforms=platforms,
        inventories=chosen,
        here=Here(cluster.env[first], frozenset(chosen), cluster.env),
    )
    return plan, cluster


class Seen:
    """Says where it is."""

    def node(self) -> tuple[str, int]:
        import ray

        return ray.get_runtime_context().get_node_id(), os.getpid()


async def test_every_actor_is_on_the_planned_node(nodes: RayNodes, tmp_path: Path) -> None:
    """Nodes of 1 + 2 + 1 + 2 slots in the order of their names; then a run that finds them taken, and one that does not fit."""
    import ray

    plan, cluster = planned(nodes.address, topology(4))
    host = {name.rpartition("/")[2]: node for name, node in cluster.nodes.items()}
    assert [n.hostname.rpartition("/")[2] for n in plan.pools[0].inventories] == ["n1", "n2", "n3", "n4"]
    assert [len(n.devices) for n in plan.pools[0].inventories] == list(SLOTS)
    session = RaySession(resources={}, address=nodes.address, log_dir=tmp_path, run_id="nodes")
    session.start()
    try:
        placement, second = Placement(plan, cluster.nodes), Placement(plan, cluster.nodes)
        await placement.reserve()
        seen: Any = ray.remote(Seen)
        role = plan.actor.request.placement
        ranks = [seen.options(**placement.options("p", role, rank, {})).remote() for rank in range(3)]
        engines = [seen.options(**placement.options("p", e.request.placement, 0, {})).remote() for e in plan.engines]
        told = ray.get([actor.node.remote() for actor in (*ranks, *engines)], timeout=60)
        assert [node for node, _ in told] == [host[name].id for name in ("n1", "n2", "n2", "n3", "n4", "n4")]
        assert len({pid for _, pid in told}) == 6
        assert [placement.host("p", slot) for slot in role.slots] == ["127.0.0.2", "127.0.0.3", "127.0.0.3"]
        check_shared(tmp_path, placement.hosts, run_id="nodes")
        assert os.listdir(tmp_path) == []
        began = time.monotonic()
        taken = r"within 2 s, 6 are missing: .*/n2 \(127.0.0.3\): asked 2 x vime_cpu_slot, 0 free, 2 missing"
        with pytest.raises(PlacementError, match=taken):
            await second.reserve(2.0)
        assert time.monotonic() - began < LIMIT_S
        second.close()
        placement.close()
        await Placement(plan, cluster.nodes).reserve()
    finally:
        session.close()
    assert nodes.alive() == [True] * 4


def test_a_node_that_is_too_small_is_told_at_once(nodes: RayNodes) -> None:
    began = time.monotonic()
    with pytest.raises(TopologyError) as raised:
        planned(nodes.address, topology([{"count": 3, "devices": 2}]))
    assert time.monotonic() - began < LIMIT_S
    text = str(raised.value)
    assert "3 nodes of 2, 2, 2 devices asked for, 2 there, 1 missing" in text
    assert f"vime node start --platform cpu --address {nodes.address}" in text


@pytest.mark.slow
async def test_a_node_that_vanishes_between_plan_and_start_is_told_at_once(nodes: RayNodes, tmp_path: Path) -> None:
    """n4 is killed once its slots are reserved, so that Ray learns of it while actors start; then the cluster is too small."""
    import ray

    plan, cluster = planned(nodes.address, topology(4))
    session = RaySession(resources={}, address=nodes.address, log_dir=tmp_path, run_id="gone")
    session.start()
    try:
        placement, later = Placement(plan, cluster.nodes), Placement(plan, cluster.nodes)
        await placement.reserve()
        nodes.kill(3)
        began = time.monotonic()
        seen: Any = ray.remote(Seen)
        engine = plan.engines[2].request.placement
        gone = r"have left the cluster: .*/n4 \(127.0.0.5\): asked 2 x vime_cpu_slot, there 0; 3 nodes are there"
        with pytest.raises(PlacementError, match=gone):
            await placement.watched(_node_of(seen.options(**placement.options("p", engine, 0, {})).remote()))
        assert time.monotonic() - began < LIMIT_S
        with pytest.raises(PlacementError, match=gone):
            await later.reserve()
        placement.close()
    finally:
        session.close()
    assert nodes.alive() == [True, True, True, False]


async def _node_of(actor: Any) -> Any:
    while True:
        await actor.node.remote()
        await asyncio.sleep(0.1)


def test_a_wrong_address_is_told_at_once() -> None:
    began = time.monotonic()
    with pytest.raises(PlacementError, match=r"no Ray cluster answers at 127\.0\.0\.2:9"):
        planned("127.0.0.2:9", topology(1))
    assert time.monotonic() - began < LIMIT_S
