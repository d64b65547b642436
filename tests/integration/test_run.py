"""Whole runs with real Ray, Megatron-core, vLLM and vllm-router on a host."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from safetensors.numpy import load_file

from vime.hooks.specs import RULES
from vime.testing.recording import read_trace

from live_runs import (
    alive,
    comparable,
    descendants,
    environment,
    finish,
    reached,
    rows,
    run,
    segments,
    start,
    steps,
    wait_for,
    write_run,
)

KEPT_STEPS = 6


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One uninterrupted colocated run, traced, with a proxy in the environment that answers nobody."""
    folder = tmp_path_factory.mktemp("finished")
    path = write_run(folder, checkpoint={"every": 2, "keep": 10}, schedule={"num_steps": KEPT_STEPS})
    run(path, VIME_TRACE_PLUGINS=str(folder / "trace.jsonl"), HTTP_PROXY="http://127.0.0.1:9", http_proxy="http://127.0.0.1:9")
    return folder


def test_every_runtime_hook_is_asked_in_a_real_run(finished: Path) -> None:
    asked = {call.hook for call in read_trace(finished / "trace.jsonl")}
    assert {name for name, rule in RULES.items() if rule.runtime} <= asked


def test_train_and_rollout_log_probs_stay_together(finished: Path) -> None:
    for row in steps(finished / "run").values():
        assert row.metrics["train/train_rollout_logprob_abs_diff"] <= 2e-6
        assert row.metrics["train/train_rollout_logprob_abs_diff_max"] <= 2e-4


def test_synchronous_training_is_on_policy(finished: Path) -> None:
    for step, row in steps(finished / "run").items():
        assert row.data["versions"] == [f"0.{step - 1}"]
        assert row.data["groups"] == list(range((step - 1) * 8, step * 8))


def test_the_probe_passes_after_every_checked_sync(finished: Path) -> None:
    probed = [r for r in rows(finished / "run") if r.kind == "sync" and "sync/probe_abs_diff" in r.metrics]
    assert [r.step for r in probed] == [0, 1, 2]
    assert all(r.metrics["sync/probe_abs_diff"] < 1e-5 for r in probed)


def test_report_of_the_run(finished: Path) -> None:
    command = [sys.executable, "-m", "vime.cli.main", "report", str(finished / "run"), "--json"]
    summary = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, env=environment()).stdout)
    assert summary["steps"] == KEPT_STEPS
    assert sum(summary["time_share"].values()) == pytest.approx(1.0)


@pytest.mark.slow
def test_the_same_seed_gives_the_same_run(finished: Path, tmp_path: Path) -> None:
    """Bit for bit: all metrics but times, the groups of each step, the final weights. Checkpoints on the way change nothing."""
    run(write_run(tmp_path, schedule={"num_steps": KEPT_STEPS}))
    again = comparable(tmp_path / "run")
    assert [row["step"] for row in again] == list(range(1, KEPT_STEPS + 1))
    assert again == comparable(finished / "run")
    assert_same_weights(tmp_path / "run", finished / "run")


def assert_same_weights(one: Path, other: Path) -> None:
    """The final models of two runs have the same tensors, bit for bit."""
    ours, theirs = (load_file(folder / "model" / "model.safetensors") for folder in (one, other))
    assert ours.keys() == theirs.keys()
    assert all(ours[name].tobytes() == theirs[name].tobytes() for name in ours)


@pytest.mark.parametrize("moment", [0.35])
def test_a_killed_run_goes_on_bit_for_bit(finished: Path, tmp_path: Path, moment: float) -> None:
    """SIGKILL of the driver in the middle of a step; afterwards nothing is left over and --resume equals the whole run."""
    drill(finished, tmp_path, at_step=3, moment=moment)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_killed_at_random_moments(finished: Path, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    drill(finished, tmp_path, at_step=rng.randrange(0, KEPT_STEPS), moment=rng.random())


def drill(finished: Path, folder: Path, *, at_step: int, moment: float) -> None:
    (folder / "model").symlink_to(finished / "model")
    (folder / "prompts.jsonl").symlink_to(finished / "prompts.jsonl")
    path = write_run(folder, checkpoint={"every": 2, "keep": 10}, schedule={"num_steps": KEPT_STEPS})
    process = start(path)
    run_dir = folder / "run"
    if at_step:
        wait_for(lambda: reached(run_dir, at_step), timeout_s=120, what=f"step {at_step}")
    else:
        wait_for((run_dir / "metrics.jsonl").exists, timeout_s=60, what="the start")
    time.sleep(moment * 0.3)
    os.kill(process.pid, signal.SIGSTOP)  # to look takes longer than a step
    family = descendants(process.pid)
    mine = segments(family)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert (family and mine) or not at_step
    deadline = time.monotonic() + 15
    while (left := list(alive(family))) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert left == []
    assert [path for path in mine if path.exists()] == []
    run(path, "--resume")
    assert comparable(run_dir) == comparable(finished / "run")
    assert_same_weights(run_dir, finished / "run")


def test_two_engines_one_step_ahead_survive_the_death_of_one(tmp_path: Path) -> None:
    """Disaggregated, max_staleness 1; an engine is killed in mid-rollout and no sample is lost or trained twice."""
    path = write_run(
        tmp_path,
        topology="cpu-disaggregated",
        schedule={"num_steps": 25, "max_staleness": 1},
        rollout={"batch_size": 8, "group_size": 4, "sampling": {"max_response_tokens": 24}},
    )
    process = start(path)
    run_dir = tmp_path / "run"
    wait_for(lambda: reached(run_dir, 3), timeout_s=120, what="step 3")
    servers = [
        p for p in descendants(process.pid) if "api_server" in " ".join(p.cmdline()) and "guardian" not in " ".join(p.cmdline())
    ]
    victim = max(servers, key=lambda p: p.pid)
    victim.kill()
    finish(process, path)
    done = steps(run_dir)
    assert sorted(done) == list(range(1, 26))
    trained = [group for row in done.values() for group in row.data["groups"]]
    assert len(trained) == len(set(trained))
    assert set(trained) >= set(range(max(trained) + 1 - 16))
    assert all(row.metrics["rollout/staleness/max"] <= 1 for row in done.values())
    assert all(row.data["versions"] for row in done.values())
    events = [row.data["name"] for row in rows(run_dir) if row.kind == "event"]
    assert "engine_restarted" in events or "engine_died" in events
    rewards = [done[step].metrics["rollout/raw_reward"] for step in sorted(done)]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.05


def layout(trainer: dict[str, int], engine: dict[str, int]) -> dict[str, object]:
    devices = 2 if trainer else 1
    return {
        "schema": "vime.topology/v1",
        "name": "layout",
        "pools": {"host": {"platform": "cpu", "device": "cpu"}},
        "roles": {
            "actor": {
                "kind": "train",
                "pool": "host",
                "devices": devices,
                "parallel": {k: v for k, v in trainer.items() if k != "dp"},
            },
            "rollout": {"kind": "rollout", "pool": "host", "engines": 1, "parallel": engine},
        },
    }


@pytest.mark.parametrize(
    "axes",
    [{"tp": 2}, pytest.param({"pp": 2}, marks=pytest.mark.slow), pytest.param({"dp": 2}, marks=pytest.mark.slow)],
    ids=["tp2", "pp2", "dp2"],
)
def test_layouts_give_the_same_first_step(finished: Path, tmp_path: Path, axes: dict[str, int]) -> None:
    """Trainer on two ranks, engine at TP 2: loss and gradient norm of one process, and the probe passes after every sync."""
    path = write_run(
        tmp_path,
        topology=layout(axes, {"tp": 2}),
        schedule={"num_steps": 2},
        weights={"probe": {"first": 10}, "fingerprint": {"first": 10}},
    )
    run(path)
    expected, got = steps(finished / "run")[1].metrics, steps(tmp_path / "run")[1].metrics
    assert got["train/grad_norm"] == pytest.approx(expected["train/grad_norm"], rel=1e-5)
    assert got["train/loss"] == pytest.approx(expected["train/loss"], rel=1e-5, abs=1e-8)
    probed = [r.metrics["sync/probe_abs_diff"] for r in rows(tmp_path / "run") if r.kind == "sync"]
    assert len(probed) == 3
    assert max(probed) < 1e-5


@pytest.mark.slow
def test_time_sharing_with_parking_changes_no_bit(finished: Path, tmp_path: Path) -> None:
    """With residency `park` the trainer leaves the device between steps; the run is the resident one."""
    share = [{"roles": ["actor", "rollout"], "mode": "time", "residency": "park"}]
    topology = layout({}, {}) | {"share": share}
    path = write_run(tmp_path, topology=topology, schedule={"num_steps": 3})
    run(path)
    expected = [row for row in comparable(finished / "run") if row["step"] <= 3]
    assert comparable(tmp_path / "run") == expected
    edges = {r.data["edge"]: r.data["device"]["actor"] for r in rows(tmp_path / "run") if r.kind == "memory"}
    assert edges["serving"] == {"params": 0, "grads": 0, "optimizer": 0}
    assert edges["updating"]["params"] > 0 == edges["updating"]["optimizer"]
    assert min(edges["training"].values()) > 0


def test_nothing_is_left_after_a_run(finished: Path) -> None:
    mine = [p for p in psutil.process_iter(["cmdline"]) if str(finished) in " ".join(p.info["cmdline"] or [])]
    assert mine == []


@pytest.mark.slow
def test_the_quick_start_learns() -> None:
    """The whole quick start in this checkout; what it made before is reused."""
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, root / "examples/quickstart/quickstart.py"], capture_output=True, text=True, cwd=root
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    last = done.stdout.strip().splitlines()[-1]
    found = re.match(r"quickstart: held-out accuracy ([\d.]+) -> ([\d.]+) \(sampled\), ([\d.]+) -> ([\d.]+) \(greedy\)", last)
    assert found is not None, last
    before, after, *_ = map(float, found.groups())
    assert after - before >= 0.12
