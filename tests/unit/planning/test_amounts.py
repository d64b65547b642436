"""What roles hold, by hand and against recorded peaks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vime.errors import PlanError
from vime.facts.memory import Tag
from vime.facts.model import Latent, ModelShape
from vime.facts.perf import PerfTable, Provenance, Quantity
from vime.facts.process import Parallel
from vime.planning import amounts
from vime.planning.amounts import Amount, Beside
from vime.planning.needs import PlanNeeds
from vime.testing.platforms import TINY_MODEL

NEEDS = PlanNeeds(micro_batch_tokens=1000, log_prob_chunk_tokens=100, recompute="none")
DENSE = replace(TINY_MODEL, parameters=8_000_000)
EXPERTS = replace(TINY_MODEL, experts=8, experts_per_token=2, expert_ffn=64, parameters=4 * 8 * 3 * 128 * 64 + 200_000)


def by_tag(held: tuple[Amount, ...]) -> dict[Tag | Beside, list[int]]:
    found: dict[Tag | Beside, list[int]] = {}
    for amount in held:
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
    found = by_tag(amounts.trainer_amounts(DENSE, dtype, Parallel(dp=dp), NEEDS))
    assert found[Tag.PARAMS] == [params]
    assert found[Tag.GRADS] == [grads]
    assert found[Tag.OPTIMIZER] == [optimizer]


def test_tensor_and_pipeline_parallel_split_everything() -> None:
    found = by_tag(amounts.trainer_amounts(DENSE, "bfloat16", Parallel(tp=2, pp=2, dp=2), NEEDS))
    assert (found[Tag.PARAMS], found[Tag.OPTIMIZER]) == ([4_000_000], [12_000_000])


def test_context_parallel_ranks_share_the_optimizer() -> None:
    found = by_tag(amounts.trainer_amounts(DENSE, "bfloat16", Parallel(cp=2, dp=2), NEEDS))
    assert found[Tag.OPTIMIZER] == [24_000_000]


def test_experts_are_split_by_expert_parallel() -> None:
    assert amounts.expert_parameters(EXPERTS) == 786_432
    found = by_tag(amounts.trainer_amounts(EXPERTS, "bfloat16", Parallel(ep=4, dp=8), NEEDS))
    assert found[Tag.PARAMS] == [(200_000 + 196_608) * 2]
    assert found[Tag.OPTIMIZER] == [200_000 * 12 // 8 + 196_608 * 12 // 2]


@pytest.mark.parametrize("task", amounts.FROZEN)
def test_a_frozen_role_holds_parameters_and_works_without_gradients(task: str) -> None:
    params, scoring = amounts.trainer_amounts(DENSE, "bfloat16", Parallel(), NEEDS, task=task)
    assert (params.tag, params.num_bytes) == (Tag.PARAMS, 16_000_000)
    assert (scoring.tag, scoring.scoring, scoring.num_bytes) == (Tag.ACTIVATIONS, True, 1000 * ONE * 2)
    wide = replace(DENSE, vocab=151_936)
    _, head = amounts.trainer_amounts(wide, "bfloat16", Parallel(), NEEDS, task=task)
    assert head.num_bytes == 100 * 151_936 * 18 + 1000 * H * 2
    _, split = amounts.trainer_amounts(wide, "bfloat16", Parallel(tp=2), NEEDS, task=task)
    assert split.num_bytes == 100 * 75_968 * 18 + 1000 * H * 2
    _, single = amounts.trainer_amounts(wide, "float32", Parallel(), NEEDS, task=task)
    assert single.num_bytes == 100 * 151_936 * 16 + 1000 * H * 4
    _, many = amounts.trainer_amounts(EXPERTS, "bfloat16", Parallel(), NEEDS, task=task)
    assert many.num_bytes == 1000 * (4 * H + max(6 * Q + 2 * KV, 2 * (H + 6 * 64))) * 2


def test_a_critic_has_a_value_in_place_of_the_vocabulary() -> None:
    untied = replace(DENSE, tied_embeddings=False)
    assert amounts.role_parameters(DENSE, "critic") == 8_000_000 + H
    assert amounts.role_parameters(untied, "critic") == 8_000_000 - 320 * H + H
    assert amounts.role_parameters(untied, "actor") == 8_000_000
    found = amounts.trainer_amounts(untied, "bfloat16", Parallel(), NEEDS, task="critic")
    here = 8_000_000 - 319 * H
    kept, working, scoring = (a for a in found if a.tag is Tag.ACTIVATIONS)
    assert [a.num_bytes for a in found if a.tag is not Tag.ACTIVATIONS] == [here * 2, here * 4, here * 12]
    assert [kept.scoring, working.scoring, scoring.scoring] == [False, False, True]
    assert kept.num_bytes == 1000 * 4 * PLAIN * 2
    assert working.num_bytes == 1000 * (11 * H) * 2
    assert scoring.num_bytes == 1000 * ONE * 2


H, FFN, Q, KV = 128, 384, 4 * 32, 2 * 32
PLAIN = 4 * H + 6 * Q + 2 * KV + 5 * FFN
ONE = 4 * H + 5 * FFN


@pytest.mark.parametrize(
    ("recompute", "values"), [("none", PLAIN), ("selective", 4 * H + 4 * Q + 3 * KV + 5 * FFN), ("full", H)]
)
def test_what_the_backward_pass_needs(recompute: str, values: int) -> None:
    needs = replace(NEEDS, recompute=recompute)
    found = amounts.kept_activations(TINY_MODEL, "float32", Parallel(), needs)
    assert found.num_bytes == 1000 * 4 * values * 4
    assert found.how == f"1000 tokens x 4 layers x {values} values x 4, recompute {recompute}"


def test_an_expert_keeps_its_token_and_six_vectors() -> None:
    dense_part = 4 * H + 6 * Q + 2 * KV
    assert amounts.layer_values(EXPERTS, Parallel()) == dense_part + 2 * (H + 6 * 64)


LATENT = Latent(kv_rank=48, q_rank=64, plain=32, rotary=16, value=32)


def test_latent_attention_keeps_its_compressed_vectors_on_every_rank() -> None:
    """Of a layer with 8 heads, measured on a host by what autograd saves: 4993 values, of which 33 are attention's sums."""
    model = replace(TINY_MODEL, heads=4, kv_heads=4, head_dim=48, latent=LATENT)
    whole, heads = 2 * (64 + 48) + 16, 4 * 4 * 48 + 4 * 32
    assert amounts.layer_values(model, Parallel()) == 4 * H + whole + heads + 5 * FFN
    assert amounts.layer_values(model, Parallel(tp=2)) == 4 * H + whole + heads // 2 + 5 * FFN // 2
    measured = replace(model, heads=8, head_dim=64, latent=Latent(64, 48, 32, 32, 32), experts=8, experts_per_token=2)
    measured = replace(measured, expert_ffn=96, shared_ffn=96)
    assert amounts.layer_values(measured, Parallel()) == pytest.approx(4993, rel=0.01)


def test_a_token_of_latent_attention_is_one_compressed_vector_in_every_worker() -> None:
    model = replace(TINY_MODEL, latent=LATENT)
    for tp in (1, 2):
        assert amounts.token_bytes(model, "bfloat16", Parallel(tp=tp)) == 4 * (48 + 16) * 2
    assert amounts.token_bytes(TINY_MODEL, "bfloat16", Parallel(tp=2)) == 2 * 4 * 1 * 32 * 2


def test_a_mixture_after_dense_layers_counts_both() -> None:
    """The shared expert is one more network, and only layers with experts have them."""
    model = replace(EXPERTS, dense_layers=1, shared_ffn=96, parameters=10_000_000)
    assert amounts.expert_parameters(model) == 3 * 8 * 3 * 128 * 64
    around = 4 * H + 6 * Q + 2 * KV
    assert amounts.layer_values(model, Parallel()) == around + max(5 * FFN, 2 * (H + 6 * 64) + 5 * 96)


@pytest.mark.parametrize(("pp", "vpp", "layers"), [(4, 1, 32), (4, 2, 32 + 3 * 4), (4, 8, 32 + 3), (2, 4, 32 + 4)])
def test_a_stage_in_pieces_holds_more_layers_than_a_whole_one(pp: int, vpp: int, layers: int) -> None:
    """As many pieces as megatron-core's first rank has begun before its first backward pass."""
    kept = amounts.kept_activations(replace(TINY_MODEL, layers=32), "bfloat16", Parallel(pp=pp, vpp=vpp), NEEDS)
    assert kept.num_bytes == 1000 * layers * PLAIN * 2
    warm_up = 2 * (pp - 1) + (vpp - 1) * pp if vpp > 1 else pp - 1
    assert layers == (warm_up + 1) * 32 // (pp * vpp)


def test_tensor_and_context_parallel_split_activations() -> None:
    assert amounts.layer_values(TINY_MODEL, Parallel(tp=2)) == 4 * H + (6 * Q + 2 * KV) // 2 + 5 * FFN // 2
    half = amounts.kept_activations(TINY_MODEL, "float32", Parallel(cp=2), replace(NEEDS, recompute="none"))
    assert half.num_bytes == 500 * 4 * PLAIN * 4


@pytest.mark.parametrize(("dtype", "each", "width"), [("bfloat16", 20, 2), ("float32", 16, 4)])
def test_the_head_works_on_chunks_and_adds_up_its_gradient(dtype: str, each: int, width: int) -> None:
    wide = replace(TINY_MODEL, vocab=32000)
    found = amounts.working_activations(wide, dtype, Parallel(tp=2), replace(NEEDS, recompute="none"))
    assert found.num_bytes == 100 * 16000 * each + 16000 * H * (4 + width) + 1000 * 4 * H * width
    assert found.how.startswith("head: 100 rows x 16000 x ")
    few = replace(NEEDS, recompute="none", micro_batch_tokens=50)
    assert amounts.working_activations(wide, dtype, Parallel(), few).how.startswith("head: 50 rows")


def test_a_small_vocabulary_needs_less_than_a_layer_s_gradients() -> None:
    none, full = (
        amounts.working_activations(TINY_MODEL, "float32", Parallel(), replace(NEEDS, recompute=r)) for r in ("none", "full")
    )
    assert none.num_bytes == 1000 * 11 * H * 4
    assert full.num_bytes == 1000 * (PLAIN + 11 * H) * 4


# ---- peaks that torch's allocator reported on an accelerator

FOUR_B = ModelShape(
    family="qwen3",
    layers=36,
    hidden=2560,
    heads=32,
    kv_heads=8,
    head_dim=128,
    ffn=9728,
    vocab=151936,
    tied_embeddings=True,
    parameters=4_022_468_096,
    max_positions=40960,
)
RECORDED = Path(__file__).parents[3] / "bench" / "results" / "h200" / "train-4b.json"


def recorded() -> list[dict[str, Any]]:
    return [part for name, part in json.loads(RECORDED.read_text())["parts"].items() if name.startswith("recompute")]


@pytest.mark.parametrize("row", recorded(), ids=lambda row: row["recompute"])
def test_bytes_by_tag_and_peaks_of_a_recorded_run(row: dict[str, Any]) -> None:
    """Micro-batches of 8192 tokens, 1024 rows of logits at once."""
    needs = PlanNeeds(micro_batch_tokens=8192, log_prob_chunk_tokens=1024, recompute=row["recompute"])
    found = by_tag(amounts.trainer_amounts(FOUR_B, "bfloat16", Parallel(), needs))
    memory = row["memory"]
    resident = sum(memory["bytes_by_tag"].values())
    for tag, size in memory["bytes_by_tag"].items():
        assert sum(found[Tag(tag)]) == pytest.approx(size, rel=1e-3)
    assert sum(found[Tag.ACTIVATIONS]) == pytest.approx(memory["peak_bytes"] - resident, rel=0.03)


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
    weights, kv = amounts.engine_amounts(DENSE, "bfloat16", Parallel(), args, capacity=100_000_000)
    assert (weights.num_bytes, kv.num_bytes) == (16_000_000, cache)


def test_a_share_of_the_device_bounds_all_that_an_engine_takes() -> None:
    args = {"gpu_memory_utilization": 0.5}
    _, kv = amounts.engine_amounts(DENSE, "bfloat16", Parallel(), args, capacity=100_000_000, beside=4_000_000)
    assert kv.num_bytes == 30_000_000
    with pytest.raises(PlanError, match="16000000 bytes and 40000000 of work space"):
        amounts.engine_amounts(DENSE, "bfloat16", Parallel(), args, capacity=100_000_000, beside=40_000_000)


def test_expert_weights_of_an_engine_spread_over_tp_and_dp() -> None:
    weights, _ = amounts.engine_amounts(EXPERTS, "bfloat16", Parallel(tp=2, dp=2, ep=4), {}, capacity=1)
    assert weights.num_bytes == (100_000 + 196_608) * 2


@pytest.mark.parametrize(
    "args", [{"gpu_memory_utilization": 0.1}, {"gpu_memory_utilization": 7}, {"kv_cache_memory_bytes": "x"}]
)
def test_engine_arguments_that_cannot_be(args: dict[str, Any]) -> None:
    with pytest.raises(PlanError):
        amounts.engine_amounts(DENSE, "bfloat16", Parallel(), args, capacity=100_000_000)


# ---- beside tensors

SIZES = {"process": 100, "trainer_libraries": 20, "engine_rest": 30, "engine_work": 40, "engine_graph_layer": 5}
TABLE = PerfTable({name: Quantity(size, "bytes", Provenance.MEASURED, "here") for name, size in SIZES.items()})


def test_what_processes_take_beside_tensors_says_where_it_comes_from() -> None:
    trainer = amounts.trainer_footprint(TABLE)
    assert [(a.tag, a.num_bytes) for a in trainer] == [(Beside.RUNTIME, 100), (Tag.COMMUNICATORS, 20)]
    engine = amounts.engine_footprint(TABLE, TINY_MODEL, Parallel(pp=2), {})
    assert [(a.tag, a.num_bytes) for a in engine] == [
        (Beside.RUNTIME, 100),
        (Beside.RUNTIME, 30),
        (Tag.ACTIVATIONS, 40),
        (Tag.GRAPHS, 10),
    ]
    assert {a.how for a in trainer} == {"measured: here"}
    eager = amounts.engine_footprint(TABLE, TINY_MODEL, Parallel(), {"enforce-eager": True})
    assert Tag.GRAPHS not in by_tag(eager)
    assert amounts.trainer_footprint(PerfTable()) == amounts.engine_footprint(PerfTable(), TINY_MODEL, Parallel(), {}) == ()


def test_a_token_of_the_cache_is_split_like_the_engine() -> None:
    assert amounts.token_bytes(FOUR_B, "bfloat16", Parallel()) == 2 * 36 * 8 * 128 * 2
    assert amounts.token_bytes(FOUR_B, "bfloat16", Parallel(tp=16, pp=2)) == 2 * 18 * 1 * 128 * 2


def test_a_shape_without_experts_has_no_expert_parameters() -> None:
    assert amounts.expert_parameters(TINY_MODEL) == 0
