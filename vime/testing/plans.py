"""Plans of small topologies on the invented platform, and the errors that they give instead."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vime.errors import VimeError
from vime.facts.model import ModelShape
from vime.planning.make import make_plan
from vime.planning.needs import PlanNeeds
from vime.planning.plan import Plan
from vime.testing.platforms import GIB, TINY_MODEL, FakePlatform
from vime.topology.load import load_topology

BIG = replace(
    TINY_MODEL, parameters=8 * 10**9, layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, ffn=12288, vocab=151936
)
BOUNDED = PlanNeeds(micro_batch_tokens=2048, recompute="full", vllm={"kv_cache_memory_bytes": 30 * GIB})
UNBOUNDED = replace(BOUNDED, vllm={})


def topology(*, share: str | None = "auto", actor: Any = None, rollout: Any = None, **more: Any) -> dict[str, Any]:
    """An actor on the eight devices of a node, two engines of four on the same ones; on a second node where `share` is None."""
    made: dict[str, Any] = {
        "name": "made",
        "pools": {"p": {"platform": "acme", "nodes": 1 if share else 2}},
        "roles": {
            "actor": {"kind": "train", "devices": 8, **(actor or {})},
            "rollout": {"kind": "rollout", "engines": 2, "parallel": {"tp": 4}, **(rollout or {})},
        },
        **more,
    }
    if share:
        made["share"] = [{"roles": ["actor", "rollout"], "residency": share}]
    return made


def plan_of(source: Any, *, model: ModelShape = BIG, needs: PlanNeeds = BOUNDED, fake: FakePlatform | None = None) -> Plan:
    """The plan of a topology whose pools are of the invented platform, which is `fake` where it is given."""
    return make_plan(load_topology(source), model=model, needs=needs, platforms={"acme": fake or FakePlatform()})


def error_of(source: Any, **options: Any) -> VimeError:
    """The error that a plan of `source` raises. Raises AssertionError where there is a plan."""
    try:
        plan_of(source, **options)
    except VimeError as error:
        return error
    raise AssertionError("there is a plan, and an error was expected")
