"""Every shipped topology gives a plan without its hardware, by the platforms that are installed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from vime.errors import PluginError, VimeError
from vime.facts.model import ModelShape
from vime.planning.explain import explain_json, explain_text
from vime.planning.make import Inventories, make_plan
from vime.planning.needs import PlanNeeds
from vime.planning.plan import Plan
from vime.platforms.discovery import discover
from vime.testing.platforms import TINY_MODEL
from vime.topology.load import fill_device, load_topology, shipped_names, shipped_text

MOE_30B = ModelShape(
    family="qwen3_moe",
    layers=48,
    hidden=2048,
    heads=32,
    kv_heads=4,
    head_dim=128,
    ffn=6144,
    vocab=151936,
    tied_embeddings=False,
    parameters=30_532_122_624,
    max_positions=40960,
    experts=128,
    experts_per_token=8,
    expert_ffn=768,
)
DENSE_8B = replace(
    MOE_30B,
    **{"family": "qwen3", "layers": 36, "hidden": 4096, "kv_heads": 8, "ffn": 12288, "parameters": 8_190_735_360},
    **{"experts": 0, "experts_per_token": 0, "expert_ffn": 0},
)
DENSE_4B = replace(DENSE_8B, hidden=2560, ffn=9728, parameters=4_022_468_096, tied_embeddings=True)
NEEDS = PlanNeeds(micro_batch_tokens=4096, recompute="full")
HARDWARE = [name for name in shipped_names() if load_topology(name).platforms() not in (("cpu",), ("auto",))]
PLATFORMS = discover()


def plan_of(
    name: str | dict[str, Any],
    model: ModelShape,
    needs: PlanNeeds = NEEDS,
    *,
    platform: str = "auto",
    device: str | None = None,
    inventories: Inventories | None = None,
) -> Plan:
    loaded = load_topology(name, platform=platform)
    try:
        platforms = {p: PLATFORMS.platform(p) for p in loaded.platforms()}
    except PluginError as error:
        pytest.skip(str(error))
    kinds = {n: [p.name for p in platforms[pool.platform].profiles()] for n, pool in loaded.topology.pools.items()}
    return make_plan(fill_device(loaded, device, kinds), model=model, needs=needs, platforms=platforms, inventories=inventories)


@pytest.mark.parametrize("model", [TINY_MODEL, DENSE_4B], ids=["tiny", "4b"])
@pytest.mark.parametrize("name", HARDWARE)
def test_shipped_topologies_plan(name: str, model: ModelShape) -> None:
    plan = plan_of(name, model)
    assert any(note.startswith("W281") for note in plan.notes)
    assert plan.transport is not None
    assert explain_text(plan)
    for pool in plan.pools:
        assert all(len(entries) == len(node.devices) for entries, node in zip(pool.entries, pool.inventories, strict=True))
    assert all((*plan.actor.masks, *(e.mask for e in plan.engines)))


@pytest.mark.parametrize("name", [name for name in HARDWARE if "gb200" in name])
def test_a_rack_in_one_communicator_is_told_of(name: str) -> None:
    plan = plan_of(name, DENSE_4B)
    ranks = len(plan.actor.request.placement.slots)
    warned = [note for note in plan.notes if note.startswith("W223")]
    assert len(warned) == (ranks > 43)
    assert all(f"has {ranks} members" in note and "43 are known to work" in note for note in warned)


@pytest.mark.parametrize("name", ["gb200x8-colocate", "gb200-nvl72", "h200x8-colocate"])
def test_shared_devices_on_several_nodes_pass_weights_inside_each_node(name: str) -> None:
    plan = plan_of(name, DENSE_4B)
    assert plan.transport is not None
    assert plan.transport.protocol == "device_ipc"
    assert plan.transport.edge.on_one_host is (len(plan.pools[0].inventories) == 1)
    rejected = {row.protocol: row.reason for row in plan.transport.rejected}
    if not plan.transport.edge.on_one_host:
        assert rejected["host_shm"] == "trainer and engine must run on one node to share its memory"


@pytest.mark.parametrize("name", HARDWARE)
def test_a_mixture_of_experts_gives_a_plan_or_says_which_rule_it_breaks(name: str) -> None:
    try:
        told = explain_json(plan_of(name, MOE_30B))
    except VimeError as error:
        told = {"refused": str(error)}
    assert told.get("transport") or "E251" in told["refused"]


@pytest.mark.parametrize("name", ["gb200x8-colocate", "h200x8-colocate", "mi300x8-colocate", "atlas-a3"])
def test_experts_spread_over_a_node_plan(name: str) -> None:
    source = yaml.safe_load(shipped_text(name))
    devices = source["roles"]["actor"]["devices"]
    source["roles"]["actor"]["parallel"] = {"ep": devices}
    source["roles"]["rollout"]["parallel"] = {"tp": 4, "ep": 4}
    plan = plan_of(source, MOE_30B)
    assert (plan.shared, plan.actor.request.parallel.ep) == (True, devices)
    assert ("enable_expert_parallel", True) in {
        (a["name"], a["value"]) for a in explain_json(plan)["engine"] if a["value"] is True
    }


@pytest.mark.parametrize(
    ("platform", "device", "each"),
    [("gb200", None, 4), ("cuda", "h200", 8), ("rocm", "mi300x", 8), ("ascend", "atlas-a2", 8), ("ascend", "atlas-a3", 16)],
)
def test_a_topology_for_any_platform_fills_a_node(platform: str, device: str | None, each: int) -> None:
    plan = plan_of("colocate", TINY_MODEL, platform=platform, device=device)
    assert len(plan.actor.request.placement.slots) == len(plan.engines) == each
    assert plan.pools[0].lineage[0] == platform
    half = plan_of("disaggregated", TINY_MODEL, platform=platform, device=device)
    assert len(half.actor.request.placement.slots) == len(half.engines) == each // 2


@pytest.mark.parametrize("name", ["h200x8-colocate", "mi300x8-colocate", "gb200x8-colocate"])
def test_a_rank_without_tensor_parallelism_has_the_whole_head(name: str) -> None:
    plan = plan_of(name, DENSE_8B)
    assert any("weight's gradient 151936 x 4096 x 6" in row.how for row in plan.memory.rows)


def test_what_is_too_large_for_64_gib_a_device_fits_when_it_is_split() -> None:
    with pytest.raises(VimeError, match=r"E251 pools\.node: training needs actor"):
        plan_of("atlas-a3", DENSE_8B)
    source = yaml.safe_load(shipped_text("atlas-a3"))
    source["roles"]["actor"]["parallel"] = {"tp": 2}
    assert plan_of(source, DENSE_8B).actor.request.parallel.tp == 2


# ---- one H200, as it was measured

GIB = 2**30
LENGTHS: dict[str, Any] = {"max_prompt_tokens": 512, "max_response_tokens": 1024}


def one_h200(residency: str, model: ModelShape, **needs: Any) -> Plan:
    """Trainer and engine on one device of 140 GiB, nothing bounded by the user."""
    source = {
        "name": "one",
        "pools": {"node": {"platform": "cuda", "nodes": 1}},
        "roles": {"actor": {"kind": "train", "devices": "all"}, "rollout": {"kind": "rollout", "devices": "all"}},
        "share": [{"roles": ["actor", "rollout"], "residency": residency}],
    }
    node = plan_of("h200x8-colocate", TINY_MODEL).pools[0].inventories[0]
    first = replace(node.devices[0], memory_bytes=150754820096)
    return plan_of(source, model, PlanNeeds(**{**LENGTHS, **needs}), inventories={"node": (replace(node, devices=(first,)),)})


def told(plan: Plan) -> tuple[str | None, str]:
    values = {arg.name: arg.value for arg in plan.engines[0].args}
    peak = max(plan.memory.phase_bytes("node", phase) for phase in ("serving", "training", "updating"))
    assert values["kv_cache_memory_bytes"] > 0
    assert 0.9 * 140.4 * GIB < peak <= 0.92 * 140.41 * GIB
    return plan.residency, plan.recompute


def test_plans_for_one_h200_need_no_bound_in_the_run_file() -> None:
    assert told(one_h200("auto", DENSE_4B)) == ("park", "none")
    assert told(one_h200("resident", DENSE_4B)) == ("resident", "full")
    short = {"micro_batch_tokens": 1024, "max_response_tokens": 512, "batch_size": 16}
    assert told(one_h200("auto", DENSE_4B, **short)) == ("resident", "none")
    assert told(one_h200("auto", DENSE_4B, micro_batch_tokens=32768)) == ("park", "full")
    assert told(one_h200("auto", TINY_MODEL)) == ("resident", "none")
    with pytest.raises(VimeError, match=r"E251 pools\.node: training needs actor"):
        one_h200("auto", MOE_30B)


def test_experts_over_eight_h200_recompute_what_they_must() -> None:
    source = yaml.safe_load(shipped_text("h200x8-colocate"))
    source["roles"]["actor"]["parallel"] = {"ep": 8}
    source["roles"]["rollout"]["parallel"] = {"tp": 4, "ep": 4}
    few, many = (plan_of(source, MOE_30B, PlanNeeds(**LENGTHS, micro_batch_tokens=n)) for n in (2048, 16384))
    assert few.recompute == "none"
    assert many.recompute == "full"


def test_the_driver_s_view_of_the_measured_runs() -> None:
    """The peak that the driver saw, and the update of a publication that nothing checked."""
    results = json.loads((Path(__file__).parents[2] / "bench" / "results" / "h200" / "step-4b.json").read_text())["parts"]
    bounds = {"kv_cache_memory_bytes": 8 * GIB, "enforce_eager": True, "max_num_seqs": 128}
    for residency in ("park", "resident"):
        plan = one_h200(residency, DENSE_4B, micro_batch_tokens=4096, recompute="auto", vllm=bounds)
        peak = results[residency]["device_used_gib"]["peak"] * GIB
        assert plan.memory.phase_bytes("node", "training") == pytest.approx(peak, rel=0.1)
        update = results[residency]["syncs"][-1]["seconds"]["sync/update"]
        assert plan.transport is not None
        assert plan.transport.seconds == pytest.approx(update, rel=0.35)


@pytest.mark.parametrize(("trains", "samples"), [("cuda", "rocm"), ("rocm", "cuda"), ("cuda", "gb200"), ("cuda", "ascend")])
def test_a_group_is_of_one_library(trains: str, samples: str) -> None:
    """Names of backends say too little: two vendors' libraries have one name in torch."""
    devices = {"cuda": "h200", "rocm": "mi300x", "gb200": "gb200", "ascend": "atlas-a2"}
    sizes = {"cuda": 8, "rocm": 8, "gb200": 4, "ascend": 8}
    pools = {n: {"platform": p, "device": devices[p], "devices_per_node": sizes[p]} for n, p in (("a", trains), ("b", samples))}
    source = {
        "pools": pools,
        "roles": {"actor": {"kind": "train", "pool": "a"}, "rollout": {"kind": "rollout", "pool": "b"}},
        "sync": [{"from": "actor", "to": "rollout"}],
    }
    plan = plan_of(source, TINY_MODEL)
    assert plan.transport is not None
    if {trains, samples} == {"cuda", "gb200"}:
        assert plan.transport.protocol == "collective"
        return
    assert plan.transport.protocol == "disk"
    assert any(r.protocol == "collective" and "must" in str(r) for r in plan.transport.rejected)
