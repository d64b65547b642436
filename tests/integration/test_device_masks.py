"""Masks in real Ray actors: every process sees its own devices, and Ray leaves the variables alone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from vime.cluster.placement import Placement, demand, labels, masked_out
from vime.cluster.session import RaySession
from vime.facts.bindings import RayBinding
from vime.facts.inventory import NodeInventory
from vime.planning.make import Here, make_plan
from vime.planning.needs import PlanNeeds
from vime.planning.plan import Plan
from vime.testing.platforms import TINY_MODEL, FakePlatform
from vime.topology.load import load_topology

NAMES = ("CUDA_VISIBLE_DEVICES", "ACME_VISIBLE_DEVICES", "ACME_OLD_MASK", "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES")
TOPOLOGY = {
    "pools": {"p": {"platform": "acme"}},
    "roles": {
        "actor": {"kind": "train", "devices": 4},
        "rollout": {"kind": "rollout", "engines": 2, "parallel": {"tp": 2}},
    },
    "share": [{"roles": ["actor", "rollout"]}],
}


class Board(FakePlatform):
    """Devices that Ray counts as its own accelerator resource."""

    def ray_binding(self, inventory: NodeInventory) -> RayBinding:
        return RayBinding(
            "GPU", NAMES[:2], noset_env=NAMES[3:], unset_env=("ACME_OLD_MASK",), labels={"acme.io/board": "b7", "rack": "3"}
        )


@pytest.fixture
def plan() -> Plan:
    board = Board()
    env = dict.fromkeys((*NAMES[:2], "ACME_OLD_MASK"), "4,5,6,7")
    needs = PlanNeeds(vllm={"kv_cache_memory_bytes": 2**30})
    inventories = {"p": (board.node(),)}
    here = Here(env, frozenset({"p"}))
    platforms = {"acme": board}
    return make_plan(
        load_topology(TOPOLOGY), model=TINY_MODEL, needs=needs, platforms=platforms, inventories=inventories, here=here
    )


class Seen:
    """Says what its process sees."""

    def variables(self) -> dict[str, str]:
        return {name: os.environ[name] for name in NAMES if name in os.environ}


async def test_two_roles_on_the_same_devices_get_their_masks(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray  # after vime.cluster, which sets what Ray reads when it is imported

    monkeypatch.setenv("ACME_OLD_MASK", "4,5,6,7")
    assert (demand(plan), masked_out(plan)) == ({"GPU": 4.0}, ("ACME_OLD_MASK",))
    session = RaySession(resources=demand(plan), log_dir=tmp_path, run_id="masks", labels=labels(plan), unset=masked_out(plan))
    try:
        session.start()
        assert ray.nodes()[0]["Labels"]["acme.io/board"] == "b7"
        placement = Placement(plan)
        await placement.reserve()
        seen = ray.remote(Seen)
        role = plan.actor
        ranks = [
            seen.options(**placement.options("p", role.request.placement, rank, role.masks[rank])).remote() for rank in range(4)
        ]
        engines = [seen.options(**placement.options("p", e.request.placement, 0, e.mask)).remote() for e in plan.engines]
        told = ray.get([actor.variables.remote() for actor in (*ranks, *engines)], timeout=60)
        placement.close()
    finally:
        session.close()
    masks = ["4", "5", "6", "7", "4,5", "6,7"]
    assert told == [{NAMES[0]: mask, NAMES[1]: mask, NAMES[3]: "1"} for mask in masks]
