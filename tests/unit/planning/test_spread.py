"""Experts of a topology that does not say how far they are spread."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from vime.facts.model import ModelShape
from vime.planning.make import make_plan
from vime.planning.needs import PlanNeeds
from vime.planning.plan import Plan
from vime.testing.platforms import GIB, TINY_MODEL, FakePlatform
from vime.topology.load import load_topology

PLATFORM = FakePlatform(memory_bytes=140 * GIB, node_memory_bytes=2**41)
LAYERS, HIDDEN, EXPERTS, FFN = 48, 2048, 128, 768
LARGE = replace(
    TINY_MODEL,
    **{
        "layers": LAYERS,
        "heads": 32,
        "kv_heads": 4,
        "hidden": HIDDEN,
        "ffn": 0,
        "experts": EXPERTS,
        "experts_per_token": 8,
        "expert_ffn": FFN,
    },
    parameters=LAYERS * EXPERTS * 3 * HIDDEN * FFN + 10**9,
)
SMALL = replace(LARGE, layers=2, parameters=2 * EXPERTS * 3 * HIDDEN * FFN + 10**8)


def plan_of(model: ModelShape = LARGE, nodes: int = 1, **parallel: int) -> Plan:
    actor: dict[str, Any] = {"kind": "train", "devices": 8 * nodes}
    if parallel:
        actor["parallel"] = parallel
    source = {
        "pools": {"p": {"platform": "acme", "nodes": nodes}},
        "roles": {"actor": actor, "rollout": {"kind": "rollout", "engines": 2 * nodes, "parallel": {"tp": 4}}},
        "share": [{"roles": ["actor", "rollout"], "residency": "park"}],
    }
    needs = PlanNeeds(micro_batch_tokens=1024)
    return make_plan(load_topology(source), model=model, needs=needs, platforms={"acme": PLATFORM})


def ep_of(plan: Plan) -> int:
    return plan.actor.request.parallel.ep


def told(plan: Plan) -> list[str]:
    return [note for note in plan.notes if "parallel.ep" in note]


def test_experts_that_do_not_fit_are_spread_and_the_plan_says_so() -> None:
    plan = plan_of()
    assert ep_of(plan) == 8
    assert told(plan)[0].startswith("roles.actor.parallel.ep 8, chosen by the plan: with all 128 experts a device would hold")


@pytest.mark.parametrize(
    ("model", "parallel", "ep"),
    [(LARGE, {"ep": 4}, 4), (SMALL, {}, 1), (replace(SMALL, experts=0, expert_ffn=0, ffn=512), {}, 1)],
    ids=["written", "fits", "dense"],
)
def test_what_is_written_or_fits_stays(model: ModelShape, parallel: dict[str, int], ep: int) -> None:
    plan = plan_of(model, **parallel)
    assert (ep_of(plan), told(plan)) == (ep, [])


def test_experts_stay_on_a_node_without_a_fabric() -> None:
    assert ep_of(plan_of(nodes=2)) == 8


def test_stages_divide_the_devices_first() -> None:
    assert ep_of(plan_of(replace(LARGE, parameters=LARGE.parameters + 10**10), pp=2)) == 4
