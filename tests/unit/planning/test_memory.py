"""Bytes per device, by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from vime.errors import PlanError
from vime.facts.memory import EngineSleep, NullMemory, Tag
from vime.facts.model import ModelShape
from vime.facts.process import Parallel
from vime.planning import memory
from vime.planning.memory import Amount, Occupant, PoolSpace, check_memory, in_units, parked_bytes, plan_memory
from vime.planning.needs import PlanNeeds
from vime.testing.platforms import FREED, GIB, STAYS, TINY_MODEL, FakePlatform
from vime.topology.rules import ResolvedRole

NEEDS = PlanNeeds(micro_batch_tokens=1000, log_prob_chunk_tokens=100)
DENSE = replace(TINY_MODEL, parameters=8_000_000)
EXPERTS = replace(TINY_MODEL, experts=8, experts_per_token=2, expert_ffn=64, parameters=4 * 8 * 3 * 128 * 64 + 200_000)


def by_tag(amounts: tuple[Amount, ...]) -> dict[Tag, list[int]]:
    found: dict[Tag, list[int]] = {}
    for amount in amounts:
        found.setdefault(amount.tag, []).append(amount.num_bytes)
    return found


@pytest.mark.parametrize(
    ("dtype", "dp", "params", "grads", "optimizer"),
    [
        ("bfloat16", 1, 16_000_000, 32_000_000, 96_000_000),
        ("bfloat16", 8, 16_000_000, 32_000_000, 12_000_000),
        ("float32", 1, 32_000_000, 32_000_000, 64_000_000),
        ("float32", 4, 32_000_000, 32_000_000, 16_000_000),
    ],
)
def test_bytes_of_a_parameter(dtype: str, dp: int, params: int, grads: int, optimizer: int) -> None:
    found = by_tag(memory.trainer_amounts(DENSE, dtype, Parallel(dp=dp), NEEDS))
    assert found[Tag.PARAMS] == [params]
    assert found[Tag.GRADS] == [grads]
    assert found[Tag.OPTIMIZER] == [optimizer]


def test_tensor_and_pipeline_parallel_split_everything() -> None:
    found = by_tag(memory.trainer_amounts(DENSE, "bfloat16", Parallel(tp=2, pp=2, dp=2), NEEDS))
    assert (found[Tag.PARAMS], found[Tag.OPTIMIZER]) == ([4_000_000], [12_000_000])


def test_context_parallel_ranks_share_the_optimizer() -> None:
    found = by_tag(memory.trainer_amounts(DENSE, "bfloat16", Parallel(cp=2, dp=2), NEEDS))
    assert found[Tag.OPTIMIZER] == [24_000_000]


def test_experts_are_split_by_expert_parallel() -> None:
    assert memory.expert_parameters(EXPERTS) == 786_432
    found = by_tag(memory.trainer_amounts(EXPERTS, "bfloat16", Parallel(ep=4, dp=8), NEEDS))
    assert found[Tag.PARAMS] == [(200_000 + 196_608) * 2]
    assert found[Tag.OPTIMIZER] == [200_000 * 12 // 8 + 196_608 * 12 // 2]


def test_a_frozen_role_holds_parameters_only() -> None:
    found = memory.trainer_amounts(DENSE, "bfloat16", Parallel(), NEEDS, optimizer=False)
    assert [amount.tag for amount in found] == [Tag.PARAMS]


@pytest.mark.parametrize(
    ("recompute", "per_token"),
    [
        ("none", 4 * (4 * 128 + (2 * 4 + 2 * 2) * 32 + 3 * 384)),
        ("selective", 4 * (4 * 128 + (2 * 4 + 2 * 2) * 32 + 1 * 384)),
        ("full", 4 * 128 + (4 * 128 + (2 * 4 + 2 * 2) * 32 + 3 * 384)),
    ],
)
def test_activations(recompute: str, per_token: int) -> None:
    found = memory.activation_amount(TINY_MODEL, "float32", Parallel(), replace(NEEDS, recompute=recompute))
    assert found.num_bytes == 1000 * per_token * 4
    assert found.how.startswith("estimate: ")


def test_a_chunk_of_logits_and_its_gradient() -> None:
    assert memory.logits_amount(TINY_MODEL, Parallel(tp=2), NEEDS).num_bytes == 100 * 160 * 4 * 2


@pytest.mark.parametrize(
    ("args", "cache"),
    [
        ({}, 0),
        ({"kv_cache_memory_bytes": 1000}, 1000),
        ({"kv_cache_memory_bytes": "1KiB"}, 1024),
        ({"gpu_memory_utilization": 0.5}, 50_000_000 - 16_000_000),
        ({"gpu_memory_utilization": 0.5, "kv_cache_memory_bytes": 7}, 7),
    ],
)
def test_an_engine_holds_weights_and_cache(args: dict[str, Any], cache: int) -> None:
    weights, kv = memory.engine_amounts(DENSE, "bfloat16", Parallel(), args, capacity=100_000_000)
    assert (weights.num_bytes, kv.num_bytes) == (16_000_000, cache)


def test_expert_weights_of_an_engine_spread_over_tp_and_dp() -> None:
    weights, _ = memory.engine_amounts(EXPERTS, "bfloat16", Parallel(tp=2, dp=2, ep=4), {}, capacity=1)
    assert weights.num_bytes == (100_000 + 196_608) * 2


@pytest.mark.parametrize(
    "args", [{"gpu_memory_utilization": 0.1}, {"gpu_memory_utilization": 7}, {"kv_cache_memory_bytes": "x"}]
)
def test_engine_arguments_that_cannot_be(args: dict[str, Any]) -> None:
    with pytest.raises(PlanError):
        memory.engine_amounts(DENSE, "bfloat16", Parallel(), args, capacity=100_000_000)


# ---- phases


FAKE = FakePlatform()
ACTOR = ResolvedRole("actor", "train", "p", Parallel(), 1, 1)
ROLLOUT = ResolvedRole("rollout", "rollout", "p", Parallel(), 1, 1, optimizer=False)
HELD = (
    Amount(Tag.PARAMS, 1, ""),
    Amount(Tag.GRADS, 2, ""),
    Amount(Tag.OPTIMIZER, 4, ""),
    Amount(Tag.ACTIVATIONS, 8, ""),
)
SERVED = (Amount(Tag.ENGINE_WEIGHTS, 16, ""), Amount(Tag.KV, 32, ""))


def pair(
    *, parks: bool, sleep: EngineSleep = FAKE.sleep, group: str = "g", virtual: bool = False
) -> tuple[PoolSpace, list[Occupant]]:
    node = FakePlatform(memory_bytes=1000, node_memory_bytes=1000, virtual=virtual).node(devices=2)
    space = PoolSpace("p", (node,), 0, None, "t.yaml:3")
    other = group if group == "g" else "own"
    return space, [
        Occupant(ACTOR, "g", HELD, FAKE.backend, parks, (0,)),
        Occupant(ROLLOUT, other, SERVED, sleep, parks, (0,)),
    ]


def phases(space: PoolSpace, occupants: list[Occupant]) -> list[int]:
    plan = plan_memory([space], occupants, published_bytes=0)
    return [plan.phase_bytes("p", phase) for phase in memory.PHASES]


def test_resident_roles_stay_in_every_phase() -> None:
    assert phases(*pair(parks=False)) == [1 + 2 + 4 + 16 + 32, 15 + 48, 7 + 48]


def test_parked_roles_leave_and_meet_only_while_updating() -> None:
    assert phases(*pair(parks=True)) == [48, 15, 1 + 16]


def test_what_an_engine_cannot_free_stays() -> None:
    pause_only = EngineSleep(0, {Tag.ENGINE_WEIGHTS: STAYS, Tag.KV: STAYS})
    assert phases(*pair(parks=True, sleep=pause_only)) == [48, 15 + 48, 1 + 48]


def test_roles_on_devices_of_their_own_are_not_added_up() -> None:
    assert phases(*pair(parks=False, group="other")) == [48, 48, 48]


def test_parked_bytes_are_those_whose_content_is_kept() -> None:
    _, (actor, rollout) = pair(parks=True)
    assert (parked_bytes(actor), parked_bytes(rollout)) == (7, 48)
    lost = replace(FREED, preserves=False)
    level2 = EngineSleep(2, {Tag.ENGINE_WEIGHTS: lost, Tag.KV: lost})
    assert parked_bytes(replace(rollout, leaves=level2)) == 0
    assert parked_bytes(replace(actor, parks=False)) == parked_bytes(replace(actor, leaves=NullMemory("no"))) == 0


def check(space: PoolSpace, occupants: list[Occupant], published: int = 0) -> tuple[list[str], list[str]]:
    errors, notes = check_memory(space, plan_memory([space], occupants, published_bytes=published), occupants)
    return [f"{e.where}: {e.what}" for e in errors], notes


def test_what_does_not_fit_names_phase_parts_and_sum() -> None:
    space, occupants = pair(parks=False)
    small = FakePlatform(memory_bytes=60, node_memory_bytes=1000).node(devices=2)
    errors, _ = check(replace(space, nodes=(small,), reserve_bytes=2), occupants)
    assert errors == ["t.yaml:3: E251 pools.p: training needs actor 15 B + rollout 48 B + reserve 2 B = 65 B of 60 B"]


def test_nearly_full_is_a_warning() -> None:
    space, occupants = pair(parks=False)
    node = FakePlatform(memory_bytes=65, node_memory_bytes=1000).node(devices=2)
    assert check(replace(space, nodes=(node,)), occupants)[1] == [
        "W253 pools.p: training needs actor 15 B + rollout 48 B = 63 B of 65 B: within 8% of the limit"
    ]


def test_host_memory_of_parked_state_and_published_weights() -> None:
    space, occupants = pair(parks=True)
    plan = plan_memory([space], occupants, published_bytes=100)
    assert plan.host_bytes_per_node == 7 + 48 + 100
    errors, _ = check(replace(space, host_limit_bytes=150), occupants, published=100)
    assert errors == [
        "t.yaml:3: E252 pools.p: parked state and published weights need 155 B a node, limits.host_pinned_per_node is 150 B"
    ]
    assert check(replace(space, host_limit_bytes=155), occupants, published=100)[0] == []


def test_slots_of_a_host_share_its_memory() -> None:
    """A slot's share may be exceeded while the host has room; what is parked stays in the host."""
    space, occupants = pair(parks=True, virtual=True)
    roomy = FakePlatform(memory_bytes=10, node_memory_bytes=63, virtual=True).node(devices=2)
    assert check(replace(space, nodes=(roomy,)), occupants)[0] == []
    tight = FakePlatform(memory_bytes=10, node_memory_bytes=62, virtual=True).node(devices=2)
    assert check(replace(space, nodes=(tight,)), occupants)[0] == [
        "t.yaml:3: E251 pools.p: training needs actor 15 B + rollout 48 B = 63 B of 62 B"
    ]


@pytest.mark.parametrize(
    ("size", "text"),
    [(17, "17 B"), (1536, "1.50 KiB"), (512 * 2**20, "512 MiB"), (3 * GIB, "3.00 GiB"), (2 * 1024 * GIB, "2.00 TiB")],
)
def test_units(size: int, text: str) -> None:
    assert in_units(size) == text


def test_a_shape_without_experts_has_no_expert_parameters() -> None:
    shape: ModelShape = TINY_MODEL
    assert memory.expert_parameters(shape) == 0
