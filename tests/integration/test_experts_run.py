"""A mixture of experts through real vLLM engines: whole runs, and what an engine says to tensors that do not fit."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from vime.errors import WeightSyncError
from vime.observe.jsonl import Row
from vime.platforms.cpu.engine import ARGS
from vime.rollout.engine import ENGINE_NEEDS, EngineServer, EngineSpec
from vime.testing.tiny_models import make_tiny_qwen3_moe
from vime.weights.control import EngineControl
from vime.weights.manifest import build_manifest
from vime.weights.transports.host_shm import HostShmTrainer

from live_runs import rows, run, steps, write_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
TOKEN = "expert-tests"
EXPERTS_APART: dict[str, Any] = {  # Buckets smaller than a layer of experts.
    "schema": "vime.topology/v1",
    "name": "experts-apart",
    "pools": {"host": {"platform": "cpu", "nodes": 1, "devices_per_node": 4}},
    "roles": {
        "actor": {"kind": "train", "pool": "host", "devices": 2, "parallel": {"ep": 2}},
        "rollout": {"kind": "rollout", "pool": "host", "engines": 1, "parallel": {"tp": 2}},
    },
    "sync": [{"from": "actor", "to": "rollout", "prefer": ["collective"], "buffer": "64KiB"}],
}

SEQUENCES_APART = {
    **EXPERTS_APART,
    "name": "sequences-apart",
    "roles": {
        "actor": {"kind": "train", "pool": "host", "devices": 2, "parallel": {"cp": 2, "ep": 2}},
        "rollout": {"kind": "rollout", "pool": "host", "engines": 1},
    },
}


def value(row: Row, name: str) -> float:
    found = row.metrics[name]
    assert found is not None
    return found


@pytest.mark.parametrize(
    "topology", ["cpu-colocate", EXPERTS_APART, SEQUENCES_APART], ids=["one-rank", "ep2-to-tp2", "cp2-ep2-to-one"]
)
def test_experts_are_trained_and_served_as_one_policy(tmp_path: Path, topology: Any) -> None:
    make_tiny_qwen3_moe(tmp_path / "model", seed=1)
    prompts = [json.dumps({"prompt": f"{n} + {n % 7} =", "label": str(n + n % 7)}) for n in range(40)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(prompts) + "\n")
    run(write_run(tmp_path, schedule={"num_steps": 2}, topology=topology))
    seen = steps(tmp_path / "run")
    assert sorted(seen) == [1, 2]
    for row in seen.values():
        assert value(row, "train/train_rollout_logprob_abs_diff") <= 2e-6
        assert value(row, "train/train_rollout_logprob_abs_diff_max") <= 2e-4
        assert value(row, "train/grad_norm") > 0
    probed = [r for r in rows(tmp_path / "run") if r.kind == "sync" and "sync/probe_abs_diff" in r.metrics]
    assert [r.step for r in probed] == [0, 1, 2]
    assert all(value(r, "sync/probe_abs_diff") < 1e-5 for r in probed)
    before, after = (load_file(path / "model.safetensors") for path in (tmp_path / "model", tmp_path / "run" / "model"))
    assert before.keys() == after.keys()
    assert all((before[name] != after[name]).any() for name in before if "experts.3." in name)


SMALL_STEPS: dict[str, Any] = {"optimizer": {"lr": 3e-4}}
"""Routers of a random model are nearly tied: a larger step changes most of their choices."""

REPLAYED: dict[str, dict[str, Any]] = {
    "ep2-to-tp2": {"trainer": {"routing_replay": "rollout"}},
    "cp2-ep2": {"trainer": {"routing_replay": "rollout"}, "topology": SEQUENCES_APART},
    "in-flight": {
        "trainer": {"routing_replay": "rollout", **SMALL_STEPS},
        "weights": {"update": "in_flight"},
        "schedule": {"num_steps": 3, "max_staleness": 1},
    },
    "own-pass": {
        "trainer": {"routing_replay": "trainer", "updates_per_step": 2, **SMALL_STEPS},
        "algorithm": {"old_log_probs": "recompute"},
    },
}


@pytest.mark.parametrize("name", REPLAYED)
def test_an_update_takes_the_experts_that_were_prescribed(tmp_path: Path, name: str) -> None:
    make_tiny_qwen3_moe(tmp_path / "model", seed=1)
    prompts = [json.dumps({"prompt": f"{n} + {n % 7} =", "label": str(n + n % 7)}) for n in range(40)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(prompts) + "\n")
    sections = {"schedule": {"num_steps": 2}, "topology": EXPERTS_APART, **REPLAYED[name]}
    run(write_run(tmp_path, **sections))
    seen = steps(tmp_path / "run")
    assert sorted(seen) == list(range(1, sections["schedule"]["num_steps"] + 1))
    for row in seen.values():
        assert value(row, "train/grad_norm") > 0
    differing = [value(row, "train/routing_replay_differing") for row in seen.values()]
    if name in ("ep2-to-tp2", "cp2-ep2"):
        assert max(differing) <= 1e-3
        assert all(value(row, "train/train_rollout_logprob_abs_diff") <= 2e-6 for row in seen.values())
    else:
        assert max(differing) > 0, "other weights than those of the update chose"
        assert max(differing) < 0.4, "rows of the tokens beside them differ in four of five"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineServer]:
    folder = tmp_path_factory.mktemp("engine")
    spec = EngineSpec(
        model_path=make_tiny_qwen3_moe(folder / "model"),
        dtype="float32",
        log_path=folder / "engine.log",
        run_token=TOKEN,
        max_model_len=256,
        args={**ARGS, **ENGINE_NEEDS},
        env={
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            "TORCHDYNAMO_DISABLE": "1",
            "HF_HUB_OFFLINE": "1",
        },
        entry_points=("vime", "vime_cpu"),
        api_key="key",
        name="experts",
    )
    server = EngineServer(spec)
    try:
        server.start()
        asyncio.run(server.wait_ready(150))
        yield server
    finally:
        server.stop()


async def offer(engine: EngineServer, manifest: list[list[Any]], info: dict[str, Any]) -> None:
    control = EngineControl(engine.url, api_key="key", run_token=TOKEN, timeout_s=60, name="experts")
    async with control:
        await control.open("start")
        await control.init({**info, "manifest": manifest})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda rows: [r for r in rows if "layers.1.mlp.experts.5.up_proj" not in r[0]], r"experts\.\S*w13_weight has only"),
        (lambda rows: [r for r in rows if "experts.5.down_proj" not in r[0]], r"w2_weight has only"),
        (lambda rows: [r for r in rows if "mlp.gate.weight" not in r[0]], r"no tensor fills 2 .*mlp\.gate\.weight"),
        (
            lambda rows: [[*r[:2], [3, 64], *r[3:]] if "layers.0.mlp.experts.7.gate_proj" in r[0] else r for r in rows],
            r"layers\.0\.mlp\.experts\.\S*w13_weight has only",
        ),
        (
            lambda rows: [[*r[:2], [100, 64], *r[3:]] if "layers.0.mlp.experts.7.gate_proj" in r[0] else r for r in rows],
            r"layers\.0\.mlp\.experts\.7\.gate_proj",
        ),
        (
            lambda rows: [[*r[:2], [64, 100], *r[3:]] if "layers.0.mlp.experts.7.gate_proj" in r[0] else r for r in rows],
            r"layers\.0\.mlp\.experts\.7\.gate_proj",
        ),
        (lambda rows: [*rows, ["model.layers.0.mlp.experts.8.up_proj.weight", *rows[0][1:]]], r"experts\.8\.up_proj"),
    ],
    ids=["without-up", "without-down", "without-router", "low", "high", "wide", "one-too-many"],
)
async def test_expert_tensors_that_do_not_fit_are_refused_before_anything_is_touched(engine, change, words) -> None:
    tensors = load_file(engine.spec.model_path / "model.safetensors")
    manifest = build_manifest((name, "float32", tensor.shape) for name, tensor in tensors.items())
    half = HostShmTrainer(run_id="expert-tests", manifest=manifest)
    try:
        info = dict(half.init_info(1))
        with pytest.raises(WeightSyncError, match=words):
            await offer(engine, change(info["manifest"]), info)
    finally:
        half.close()
