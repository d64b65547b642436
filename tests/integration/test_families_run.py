"""Families through the real engine: what is trained is what is served, after every publication."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from vime.observe.jsonl import Row
from vime.testing.tiny_models import FamilySizes, make_tiny

from live_runs import rows, run, steps, write_run

SLOW = [pytest.mark.slow, pytest.mark.timeout(300)]
FOLLOWS_LOAD = {"moe_router_bias_update_rate": 0.02}
"""The router's bias changes in every update, so that a bias that stays behind in the engine fails the probe."""
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


def value(row: Row, name: str) -> float:
    found = row.metrics[name]
    assert found is not None
    return found


def trained(folder: Path, family: str, *, num_steps: int, sizes: FamilySizes | None = None, **sections: Any) -> Path:
    """A run's folder; its log-probs are the engine's, in every step and in every probe."""
    make_tiny(folder / "model", family, seed=1, **(sizes or {}))
    prompts = [json.dumps({"prompt": f"{n} + {n % 7} =", "label": str(n + n % 7)}) for n in range(40)]
    (folder / "prompts.jsonl").write_text("\n".join(prompts) + "\n")
    run(write_run(folder, schedule={"num_steps": num_steps}, **sections))
    seen = steps(folder / "run")
    assert sorted(seen) == list(range(1, num_steps + 1))
    for row in seen.values():
        assert value(row, "train/train_rollout_logprob_abs_diff") <= 2e-6
        assert value(row, "train/grad_norm") > 0
    probed = [r for r in rows(folder / "run") if r.kind == "sync" and "sync/probe_abs_diff" in r.metrics]
    assert [r.step for r in probed] == list(range(num_steps + 1))
    assert all(value(r, "sync/probe_abs_diff") < 1e-5 for r in probed)
    return folder / "run"


@pytest.mark.parametrize("family", ["qwen2", pytest.param("llama", marks=SLOW)])
def test_a_dense_family_is_trained_and_served_as_one_policy(family: str, tmp_path: Path) -> None:
    folder = trained(tmp_path, family, num_steps=1)
    before, after = (load_file(path / "model.safetensors") for path in (tmp_path / "model", folder / "model"))
    assert before.keys() == after.keys()
    assert not any(torch.equal(before[name], after[name]) for name in before if "proj" in name)


LATENT: dict[str, Any] = {
    "schema": "vime.topology/v1",
    "name": "latent",
    "pools": {"host": {"platform": "cpu", "nodes": 1, "devices_per_node": 1}},
    "roles": {
        "actor": {"kind": "train", "pool": "host", "devices": 1},
        "rollout": {"kind": "rollout", "pool": "host", "engines": 1},
    },
    "share": [{"roles": ["actor", "rollout"], "mode": "time"}],
    "sync": [{"from": "actor", "to": "rollout"}],
    "env": {"engine": {"VLLM_MLA_DISABLE": "0"}},
}
"""With vLLM's own latent attention, as accelerators have it."""


@pytest.mark.parametrize(
    ("family", "sizes", "topology"),
    [
        pytest.param("glm4_moe", {"qk_norm": True}, "cpu-colocate", id="glm4_moe"),
        pytest.param("deepseek_v3", {}, "cpu-colocate", id="deepseek_v3"),
        # A host's kernel takes these sizes only.
        pytest.param("deepseek_v3", {"kv_rank": 512, "head_dim": 128}, LATENT, id="deepseek_v3-latent"),
    ],
)
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_mixture_with_a_routers_bias_is_trained_and_served_as_one_policy(
    family: str, sizes: FamilySizes, topology: Any, tmp_path: Path
) -> None:
    """Layers for multi-token prediction go from the start model to the last one as they are."""
    folder = trained(tmp_path, family, num_steps=2, sizes=sizes, topology=topology, trainer={"megatron": FOLLOWS_LOAD})
    before, after = (load_file(path / "model.safetensors") for path in (tmp_path / "model", folder / "model"))
    assert before.keys() == after.keys()
    moved = (after[BIAS] - before[BIAS]).abs()
    assert 0.01 < moved.max() <= 0.0401
    frozen = [name for name in before if name.startswith("model.layers.3.")]
    assert len(frozen) > 10
    assert all(torch.equal(before[name], after[name]) for name in frozen)
    assert ("Using CPU_MLA backend" in (folder / "logs" / "engine-0.log").read_text()) is (topology is LATENT)
