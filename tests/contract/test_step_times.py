"""Seconds of a step on paper: beside what one H200 did, and for the announced workload on two platforms."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vime.errors import PluginError
from vime.models.registry import read_shape
from vime.planning.make import make_plan
from vime.planning.needs import PlanNeeds
from vime.planning.plan import Plan
from vime.planning.step import step_time
from vime.platforms.discovery import discover
from vime.topology.load import load_topology

ROOT = Path(__file__).resolve().parents[2]
MEASURED = ROOT / "bench/results/h200"
DENSE = read_shape(ROOT / "examples/qwen3-4b-gsm8k/model")
PLATFORMS = discover()


def result(name: str) -> dict[str, Any]:
    return json.loads((MEASURED / f"{name}.json").read_text())


def on_one_h200(needs: PlanNeeds) -> Plan:
    """Trainer and engine of the 4B model, each on one device."""
    source = {
        "name": "one",
        "pools": {"node": {"platform": "cuda", "device": "h200", "nodes": 1}},
        "roles": {
            "actor": {"kind": "train", "devices": 1},
            "rollout": {"kind": "rollout", "engines": 1},
        },
        "share": [{"roles": ["actor", "rollout"], "residency": "park"}],
    }
    try:
        platforms = {"cuda": PLATFORMS.platform("cuda")}
    except PluginError as error:
        pytest.skip(str(error))
    return make_plan(load_topology(source), model=DENSE, needs=replace(needs, dtype="bfloat16"), platforms=platforms)


def between(value: float, measured: float, share: float) -> bool:
    return measured * (1 - share) <= value <= measured * (1 + share)


@pytest.mark.parametrize("kind", ["equal", "spread"])
def test_a_rollout_takes_what_was_measured(kind: str) -> None:
    """256 responses to 256 tokens: all of 512 tokens, and of lengths spread below that."""
    done = [r for r in result("rollout-4b")["parts"]["server"]["repeats"] if r["kind"] == kind]
    mean = done[0]["tokens"] / 256
    needs = PlanNeeds(batch_size=256, group_size=1, max_response_tokens=512, vllm={"max_num_seqs": 256})
    words = {"prompt_tokens": 256.0, "response_tokens": mean, "longest_tokens": 512.0}
    step = step_time(on_one_h200(needs), words)
    seconds = (step.seconds("prefill") or 0.0) + (step.seconds("decode") or 0.0)
    assert between(seconds, statistics.median(r["seconds"] for r in done), 0.3), seconds


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_training_takes_what_was_measured(recompute: str) -> None:
    """8 sequences of 2048 tokens."""
    done = result("train-4b")["parts"][f"recompute {recompute}"]
    needs = PlanNeeds(batch_size=8, group_size=1, max_response_tokens=2047, recompute=recompute)
    words = {"prompt_tokens": 1.0, "response_tokens": 2047.0, "longest_tokens": 2047.0}
    step = step_time(on_one_h200(needs), words)
    seconds = (step.seconds("forward") or 0.0) + (step.seconds("backward") or 0.0)
    assert between(seconds, statistics.median(done["step_s"]), 0.3), seconds


def test_the_rates_are_those_of_the_results() -> None:
    assumed = step_time(on_one_h200(PlanNeeds())).assumed
    trainer, copied = result("train-4b")["parts"], result("sync-4b")
    product = max(part["product"]["tflops"] for name, part in trainer.items() if name.startswith("recompute"))
    reached = trainer["recompute none"]["tflops_with_attention"] / product
    assert assumed["trainer_share"].value == pytest.approx(reached, rel=0.03)
    read_and_written = 2 * copied["parts"]["copies"]["on_device_bytes_per_s"]
    assert assumed["memory_share"].value == pytest.approx(read_and_written / 4.8e12, rel=0.02)
