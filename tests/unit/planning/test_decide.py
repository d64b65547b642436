"""What the plan decides by arithmetic: the cache of an engine on a shared device, and how much the trainer recomputes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from vime.planning.explain import explain_json, explain_text
from vime.planning.plan import Plan
from vime.testing.plans import BOUNDED, UNBOUNDED, error_of, plan_of, topology
from vime.testing.platforms import GIB, FakePlatform


def engine_values(plan: Plan) -> dict[str, Any]:
    return {arg.name: arg.value for arg in plan.engines[0].args}


def used(plan: Plan) -> int:
    return max(plan.memory.phase_bytes("p", phase) for phase in ("serving", "training", "updating"))


@pytest.mark.parametrize(("share", "memory"), [("park", 80 * GIB), ("resident", 110 * GIB)])
def test_the_plan_bounds_the_cache_of_an_engine_on_a_shared_device(share: str, memory: int) -> None:
    fake = FakePlatform(memory_bytes=memory, engine_args={"gpu_memory_utilization": 0.5})
    plan = plan_of(topology(share=share, limits={"device_reserve": "1GiB"}), needs=UNBOUNDED, fake=fake)
    values = engine_values(plan)
    told = {a.name: (a.origin, a.over) for a in plan.engines[0].args}
    assert told == {"kv_cache_memory_bytes": ("plan", None), "gpu_memory_utilization": ("plan", 0.5)}
    limit = 0.92 * memory - GIB
    assert limit - 64 * 2**20 < used(plan) <= limit
    weights = next(r.num_bytes for r in plan.memory.rows if r.tag == "engine_weights")
    taken = (values["kv_cache_memory_bytes"] + weights) / memory
    assert taken <= values["gpu_memory_utilization"] < taken + 0.01
    assert "kv_cache_memory_bytes" in explain_text(plan)
    assert any(r.how.startswith("chosen by the plan: 0.92 x ") for r in plan.memory.rows if r.tag == "kv")


@pytest.mark.parametrize("share", ["park", "resident"])
def test_a_bound_of_the_user_is_never_overruled(share: str) -> None:
    fake = FakePlatform(memory_bytes=200 * GIB)
    plan = plan_of(topology(share=share), needs=BOUNDED, fake=fake)
    assert engine_values(plan) == {"kv_cache_memory_bytes": 30 * GIB, "gpu_memory_utilization": 0.17}
    both = replace(BOUNDED, vllm={"kv-cache-memory-bytes": 30 * GIB, "gpu-memory-utilization": 0.3})
    values = engine_values(plan_of(topology(share=share), needs=both, fake=fake))
    assert values == {"kv_cache_memory_bytes": 30 * GIB, "gpu_memory_utilization": 0.3}
    only = replace(BOUNDED, vllm={"gpu_memory_utilization": 0.2})
    assert engine_values(plan_of(topology(share=share), needs=only, fake=fake)) == {"gpu_memory_utilization": 0.2}


def test_an_engine_with_devices_of_its_own_keeps_the_platform_s_share() -> None:
    fake = FakePlatform(engine_args={"gpu_memory_utilization": 0.9})
    assert engine_values(plan_of(topology(share=None), needs=UNBOUNDED, fake=fake)) == {"gpu_memory_utilization": 0.9}


def test_roles_stay_only_with_a_cache_that_serves_a_batch() -> None:
    """8 sequences an engine of 256 + 256 tokens: 2 x 32 layers x 2 heads x 128 x 2 bytes a token."""
    wanted = 128 * 512 * 2 * 32 * 2 * 128 * 2
    needs = replace(UNBOUNDED, max_response_tokens=256)
    without = replace(needs, vllm={"kv_cache_memory_bytes": 0})
    held = used(plan_of(topology(share="resident"), needs=without, fake=FakePlatform(memory_bytes=900 * GIB)))
    room = {free: FakePlatform(memory_bytes=int((held + wanted + free) / 0.92)) for free in (-(2**27), 2**27)}
    plans = {free: plan_of(topology(), needs=needs, fake=fake) for free, fake in room.items()}
    assert {free: plan.residency for free, plan in plans.items()} == {-(2**27): "park", 2**27: "resident"}
    assert plan_of(topology(share="resident"), needs=needs, fake=room[-(2**27)]).residency == "resident"


def test_a_device_without_room_for_one_sequence_is_refused() -> None:
    full = FakePlatform(memory_bytes=68 * GIB)
    error = error_of(topology(share="resident"), needs=UNBOUNDED, fake=full)
    assert "E251 pools.p: " in error.what
    assert "of cache for 1 x 512 tokens are not left: 0.92 x 68.00 GiB - (actor" in error.what


AUTO = replace(BOUNDED, recompute="auto", micro_batch_tokens=8192)


@pytest.mark.parametrize(
    ("memory", "recompute", "why"),
    [
        (200, "none", "chosen by the plan: what training needs fits without"),
        (122, "selective", "none, park: training would leave too little free"),
        (90, "full", "selective, park: E251 pools.p: training needs actor"),
        (68, "full", "none, park: E251 pools.p: training needs actor"),
    ],
)
def test_the_least_recomputation_that_fits(memory: int, recompute: str, why: str) -> None:
    plan = plan_of(topology(share="park"), needs=AUTO, fake=FakePlatform(memory_bytes=memory * GIB))
    assert (plan.recompute, why in plan.recompute_why) == (recompute, True), plan.recompute_why
    assert f"recompute {recompute}, chosen by the plan" in explain_text(plan)
    assert explain_json(plan)["recompute"]["value"] == recompute
    kept = next(r.how for r in plan.memory.rows if r.tag == "activations")
    assert kept.endswith(f"recompute {recompute}")


def test_recomputation_that_a_user_names_is_kept() -> None:
    for recompute in ("none", "selective", "full"):
        fake = FakePlatform(memory_bytes=500 * GIB)
        plan = plan_of(topology(share="park"), needs=replace(AUTO, recompute=recompute), fake=fake)
        assert (plan.recompute, plan.recompute_why) == (recompute, "yours (trainer.recompute)")
    error = error_of(topology(share="park"), needs=replace(AUTO, recompute="none"))
    assert "E251 pools.p: training needs actor" in error.what


def test_no_recomputation_is_enough() -> None:
    error = error_of(topology(), needs=AUTO, fake=FakePlatform(memory_bytes=40 * GIB))
    assert "E231 roles that share devices neither fit together nor can take turns: resident: E251" in error.what


def test_hooks_are_not_asked_again_for_recomputation() -> None:
    fake = FakePlatform(memory_bytes=68 * GIB)
    plan_of(topology(), needs=AUTO, fake=fake)
    assert (fake.calls.count("memory_backend"), fake.calls.count("transports")) == (2, 4)
