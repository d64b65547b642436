"""Routing replay is refused where a model has no experts, or its engines would not start."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from vime.errors import ConfigError, Errors, VimeError
from vime.planning.plan import Plan
from vime.planning.routing import check_routing
from vime.testing.plans import BOUNDED, plan_of, topology
from vime.testing.platforms import TINY_MODEL

EXPERTS = replace(TINY_MODEL, experts=8, experts_per_token=2, expert_ffn=32)


def planned(*, pp: int = 1, **vllm: Any) -> Plan:
    parallel = {"parallel": {"tp": 4 // pp, "pp": pp}}
    needs = replace(BOUNDED, vllm={**BOUNDED.vllm, **vllm}, returns_experts=True)
    return plan_of(topology(rollout=parallel), model=EXPERTS, needs=needs)


def where(path: str) -> str:
    return f"run.yaml:{path}"


def refused(plan: Plan, replay: str) -> VimeError:
    with pytest.raises((ConfigError, Errors)) as caught:
        check_routing(plan, replay, where=where)
    return caught.value


@pytest.mark.parametrize("replay", ["trainer", "rollout"])
def test_a_model_without_experts_has_nothing_to_replay(replay: str) -> None:
    plan = plan_of(topology(), model=TINY_MODEL)
    said = refused(plan, replay)
    assert said.where == "run.yaml:trainer.routing_replay"
    assert f"`trainer.routing_replay: {replay}`, but {TINY_MODEL.family} has no experts" in said.what
    check_routing(plan, "none", where=where)


@pytest.mark.parametrize(
    ("options", "place", "words"),
    [
        ({"pp": 2}, "trainer.routing_replay", "over 2 stages of a pipeline"),
        ({"decode_context_parallel_size": 2}, "rollout.vllm.decode_context_parallel_size", "decode_context_parallel_size 2"),
        ({"enable_prefix_caching": False}, "rollout.vllm.enable_prefix_caching", "without a prefix cache"),
    ],
)
def test_what_vllm_refuses_beside_experts_is_refused_with_its_place(options: Any, place: str, words: str) -> None:
    plan = planned(**options)
    said = refused(plan, "rollout")
    assert said.where == f"run.yaml:{place}"
    assert words in said.what
    check_routing(plan, "trainer", where=where)


def test_several_reasons_are_told_together() -> None:
    assert len(str(refused(planned(pp=2, enable_prefix_caching=False), "rollout")).split("fix: ")) == 3


def test_engines_that_vllm_starts_are_let_through() -> None:
    check_routing(planned(enable_prefix_caching=True, prefill_context_parallel_size=1), "rollout", where=where)
