"""The seconds of a step from a plan: parts, what is unknown, what is assumed, and what a user sets."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from vime.errors import ConfigError
from vime.facts.inventory import NodeInventory
from vime.facts.model import ModelShape
from vime.facts.perf import PerfTable, Provenance, Quantity
from vime.facts.process import Parallel
from vime.planning.assume import assumptions, parse_words
from vime.planning.decode import Lengths
from vime.planning.explain import explain_json, explain_text
from vime.planning.make import make_plan
from vime.planning.needs import PlanNeeds
from vime.planning.plan import Plan
from vime.planning.step import StepTime, step_time
from vime.planning.switching import switches
from vime.planning.train_time import Trained, backward_seconds, expert_bytes, forward_seconds, gradient_bytes
from vime.testing.platforms import TINY_MODEL, FakePlatform
from vime.topology.load import load_topology

MODEL = replace(TINY_MODEL, parameters=10**9)
MIXED = replace(MODEL, ffn=0, experts=8, experts_per_token=2, expert_ffn=64)
RATES = {"device_memory": 1e12, "matmul": 1e14, "scale_up": 1e11, "host_link": 50e9}


class Rated(FakePlatform):
    """Devices whose rates are those of the test."""

    def __init__(self, rates: Mapping[str, float] = RATES, provenance: Provenance = Provenance.MEASURED) -> None:
        super().__init__()
        self.table = PerfTable({name: Quantity(value, "per s", provenance, "here") for name, value in rates.items()})

    def perf_model(self, inventory: NodeInventory) -> PerfTable:
        return self.table


def plan_of(
    platform: Rated | None = None, *, shared: bool = True, residency: str = "resident", model: ModelShape = MODEL, **needs: Any
) -> Plan:
    devices = 8 if shared else 4
    source: dict[str, Any] = {
        "pools": {"p": {"platform": "acme", "nodes": 1}},
        "roles": {"actor": {"kind": "train", "devices": devices}, "rollout": {"kind": "rollout", "engines": devices}},
    }
    if shared:
        source["share"] = [{"roles": ["actor", "rollout"], "residency": residency}]
    return make_plan(load_topology(source), model=model, needs=PlanNeeds(**needs), platforms={"acme": platform or Rated()})


def names(step: StepTime) -> list[str]:
    return [part.name for part in step.parts]


def total(step: StepTime) -> float:
    assert step.total.seconds is not None
    return step.total.seconds


def test_parts_add_up() -> None:
    step = step_time(plan_of())
    assert names(step)[:2] == ["prefill", "decode"]
    assert {"forward", "backward", "between ranks", "update", "other"} <= set(names(step))
    assert total(step) == pytest.approx(sum(part.estimate.seconds or 0.0 for part in step.parts))


@pytest.mark.parametrize(
    ("rate", "lost"),
    [
        ("device_memory", {"prefill", "decode"}),
        ("matmul", {"prefill", "decode", "forward", "backward"}),
        ("scale_up", {"between ranks"}),
    ],
)
def test_an_unknown_rate_leaves_its_parts_and_the_total_unknown(rate: str, lost: set[str]) -> None:
    step = step_time(plan_of(Rated({name: value for name, value in RATES.items() if name != rate})))
    assert {part.name for part in step.parts if part.estimate.seconds is None} == lost
    assert step.total.seconds is None
    assert all(f"p.{rate}" in part.estimate.how for part in step.parts if part.name in lost)


def test_a_data_sheets_products_are_not_reached_but_measured_ones_are() -> None:
    measured, sheet = (step_time(plan_of(Rated(provenance=p))) for p in (Provenance.MEASURED, Provenance.SPEC))
    assert (sheet.seconds("forward") or 0) == pytest.approx((measured.seconds("forward") or 0) / 0.8)


def test_an_assumption_of_the_user_is_used_and_told() -> None:
    plan = plan_of(max_response_tokens=1024)
    short, long = (step_time(plan, {"response_tokens": n}) for n in (128.0, 1000.0))
    assert (long.seconds("backward") or 0) > 2 * (short.seconds("backward") or 0)
    assert (long.assumed["response_tokens"].provenance, long.assumed["longest_tokens"].value) == ("yours", 1024)
    assert step_time(plan, {"response_tokens": 4000.0}).assumed["longest_tokens"].value == 4000


def test_more_responses_than_places_fill_the_batch_first() -> None:
    step = step_time(plan_of(batch_size=64, group_size=8, vllm={"max_num_seqs": 16}))
    how = next(part.estimate.how for part in step.parts if part.name == "full batches")
    assert how == "48 of 64 sequences an engine wait for a place among 16 (max_num_seqs)"
    assert "full batches" not in names(step_time(plan_of(batch_size=64, group_size=8)))


def test_a_cache_that_is_too_small_bounds_the_batch() -> None:
    tokens = 16 * (256 + 256 / 3 * 2)
    size = int(tokens * 2 * 4 * 2 * 32 * 2)
    step = step_time(plan_of(batch_size=64, group_size=8, vllm={"kv_cache_memory_bytes": size}))
    how = next(part.estimate.how for part in step.parts if part.name == "full batches")
    assert "cache hold" in how


def test_dropped_groups_are_sampled_again() -> None:
    kept, dropped = step_time(plan_of()), step_time(plan_of(filtered=True))
    assert dropped.assumed["groups_kept"].value == 0.7
    assert (dropped.seconds("prefill") or 0) > 1.3 * (kept.seconds("prefill") or 0)
    assert dropped.seconds("forward") == kept.seconds("forward")


def test_another_pass_for_the_log_probs_is_a_forward_pass() -> None:
    step = step_time(plan_of(log_prob_passes=1))
    assert step.seconds("log-probs") == step.seconds("forward")


def test_engines_that_run_ahead_hide_the_shorter_side() -> None:
    behind, ahead = (step_time(plan_of(shared=False, max_staleness=n), {"other_s": 0.0}) for n in (0, 1))
    assert (behind.ahead, ahead.ahead) == (False, True)
    assert ahead.parts == behind.parts
    sides = {s: sum(p.estimate.seconds or 0 for p in ahead.parts if p.side == s) for s in ("engines", "trainer", "between")}
    assert total(ahead) == pytest.approx(max(sides["engines"], sides["trainer"]) + sides["between"])
    assert total(behind) == pytest.approx(sum(sides.values()))
    assert not step_time(plan_of(max_staleness=1)).ahead  # shared devices take turns


def test_every_assumption_and_part_is_shown() -> None:
    plan = plan_of()
    step, text = step_time(plan), explain_text(plan, {"response_tokens": 100.0})
    told = explain_json(plan, {"response_tokens": 100.0})["step"]
    for name in (*step.assumed, *names(step)):
        assert f"\n  {name} " in text
    assert "response_tokens  100 tokens" in text
    assert told["assumed"]["response_tokens"]["provenance"] == "yours"
    assert [part["name"] for part in told["parts"]] == names(step)
    json.dumps(told, allow_nan=False)


# ---- assumptions


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ({"respons_tokens": 1.0}, "no assumption is called 'respons_tokens'"),
        ({"memory_share": 1.5}, "memory_share must be above 0 and at most 1"),
        ({"memory_share": 0.0}, "memory_share must be above 0"),
        ({"trainer_share": float("nan")}, "trainer_share must be above 0"),
        ({"response_tokens": float("inf")}, "response_tokens must be above 0"),
        ({"other_s": -1.0}, "other_s must be 0 or more"),
        ({"response_tokens": 100.0, "longest_tokens": 50.0}, "longest_tokens is only 50"),
    ],
)
def test_assumptions_that_make_no_sense(words: dict[str, float], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        assumptions(PlanNeeds(), words)


@pytest.mark.parametrize("word", ["response_tokens", "response_tokens=many", "=", "response_tokens="])
def test_words_that_are_no_numbers(word: str) -> None:
    with pytest.raises(ConfigError, match="expected NAME=NUMBER"):
        parse_words([word])


def test_every_assumption_says_where_it_is_from() -> None:
    for needs in (PlanNeeds(), PlanNeeds(max_prompt_tokens=64, filtered=True, vllm={"enforce_eager": True})):
        for one in assumptions(needs, layers=36).values():
            assert one.provenance in ("measured", "derived", "assumed")
            assert one.source


def test_what_a_platform_knows_replaces_what_is_assumed() -> None:
    known = {"memory_share": 0.5, "eager_layer": 2e-3, "trainer_share": 0.25, "step_rest": 3.0}
    engines, trainer = (
        PerfTable({name: Quantity(known[name], "", Provenance.MEASURED, "here") for name in names})
        for names in (("memory_share", "eager_layer"), ("trainer_share", "step_rest"))
    )
    found = assumptions(PlanNeeds(vllm={"enforce_eager": True}), layers=36, tables=(trainer, engines))
    expected = {"memory_share": 0.5, "decode_step_s": 0.072, "trainer_share": 0.25, "other_s": 3.0}
    assert {name: found[name].value for name in expected} == pytest.approx(expected)
    assert {found[name].provenance for name in expected} == {"measured"}
    assert all(found[name].source.endswith("here") for name in expected)
    assert found["prefill_share"].provenance == "assumed"
    graphs = assumptions(PlanNeeds(), layers=36, tables=(trainer, engines))
    assert graphs["decode_step_s"].value < 0.01


def test_a_parked_role_is_switched_there_and_back() -> None:
    plan = plan_of(residency="park")
    one_way = dict(switches(plan))["actor"].seconds
    assert one_way
    assert step_time(plan).seconds("switch of actor") == pytest.approx(2 * one_way)
    assert "switch of actor" not in names(step_time(plan_of(residency="resident")))


# ---- trainer


def batch(model: ModelShape = MODEL, parallel: Parallel | None = None, recompute: str = "none") -> Trained:
    return Trained(model, parallel or Parallel(), 8, Lengths(0, 1000, 1000), 2, recompute)


def test_a_pass_is_two_flop_a_parameter_and_attention() -> None:
    flops = 8 * 1000 * (2 * 1e9 + 2 * 4 * 4 * 32 * 1000)
    once = forward_seconds(batch(), 1e14, 1.0)
    assert once == pytest.approx(flops / 1e14)
    assert backward_seconds(batch(), 1e14, 1.0) == pytest.approx(2 * once)
    assert backward_seconds(batch(recompute="full"), 1e14, 1.0) == pytest.approx(3 * once)
    attention = 8 * 1000 * 2 * 4 * 4 * 32 * 1000 / 1e14
    assert backward_seconds(batch(recompute="selective"), 1e14, 1.0) == pytest.approx(2 * once + attention)
    assert forward_seconds(batch(parallel=Parallel(dp=4)), 1e14, 1.0) == pytest.approx(once / 4)


def test_a_mixture_of_experts_computes_what_a_token_goes_to() -> None:
    experts = 4 * 8 * 3 * 128 * 64
    active = MIXED.parameters - experts * 3 / 4
    assert forward_seconds(batch(MIXED), 1e14, 1.0) == pytest.approx(8 * 1000 * (2 * active + 2 * 4 * 4 * 32 * 1000) / 1e14)
    assert forward_seconds(batch(MIXED), 1e14, 0.5) > forward_seconds(batch(MIXED), 1e14, 1.0)


def test_ranks_send_gradients_and_tokens() -> None:
    assert gradient_bytes(MODEL, Parallel(), 2) == 0
    assert gradient_bytes(MODEL, Parallel(dp=4), 2) == pytest.approx(1e9 * 6 * 3 / 4)
    assert gradient_bytes(MIXED, Parallel(dp=4, ep=4), 2) < gradient_bytes(MIXED, Parallel(dp=4), 2)
    assert expert_bytes(batch(MIXED, Parallel(dp=4)), 2) == 0
    half = expert_bytes(batch(MIXED, Parallel(dp=2, ep=2)), 2)
    assert half == pytest.approx(2 * 4000 * 2 * 4 * 2 * 128 * 2 / 2)
