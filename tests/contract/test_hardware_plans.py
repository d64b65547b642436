"""Every shipped topology gives a plan without its hardware, by the platforms that are installed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import yaml

from vime.errors import PluginError, VimeError
from vime.facts.model import ModelShape
from vime.planning.explain import explain_json, explain_text
from vime.planning.make import make_plan
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
NEEDS = PlanNeeds(micro_batch_tokens=4096, recompute="full")
HARDWARE = [name for name in shipped_names() if load_topology(name).platforms() not in (("cpu",), ("auto",))]
PLATFORMS = discover()


def plan_of(
    name: str, model: ModelShape, needs: PlanNeeds = NEEDS, *, platform: str = "auto", device: str | None = None
) -> Plan:
    loaded = load_topology(name, platform=platform)
    try:
        platforms = {p: PLATFORMS.platform(p) for p in loaded.platforms()}
    except PluginError as error:
        pytest.skip(str(error))
    kinds = {n: [p.name for p in platforms[pool.platform].profiles()] for n, pool in loaded.topology.pools.items()}
    return make_plan(fill_device(loaded, device, kinds), model=model, needs=NEEDS, platforms=platforms)


@pytest.mark.parametrize("model", [TINY_MODEL, DENSE_8B], ids=["tiny", "8b"])
@pytest.mark.parametrize("name", HARDWARE)
def test_shipped_topologies_plan(name: str, model: ModelShape) -> None:
    plan = plan_of(name, model)
    assert any(note.startswith("W281") for note in plan.notes)
    assert plan.transport is not None
    assert explain_text(plan)
    for pool in plan.pools:
        assert all(len(entries) == len(node.devices) for entries, node in zip(pool.entries, pool.inventories, strict=True))
    assert all((*plan.actor.masks, *(e.mask for e in plan.engines)))


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
    assert (plan.residency, plan.actor.request.parallel.ep) == ("park", devices)
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
