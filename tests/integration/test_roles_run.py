"""Whole runs with training roles beside the actor: a critic, a frozen reference, a teacher."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.numpy import load_file

from vime.testing.tiny_models import make_tiny_qwen3

from live_runs import (
    alive,
    comparable,
    descendants,
    finish,
    reached,
    rows,
    run,
    start,
    steps,
    wait_for,
    write_run,
)

PPO: dict[str, Any] = {"kind": "ppo", "critic": {"optimizer": {"lr": 1e-3}}}
ALL_IN_TURN = {
    "schema": "vime.topology/v1",
    "name": "all-in-turn",
    "pools": {"host": {"platform": "cpu", "nodes": 1, "devices_per_node": 1}},
    "roles": {
        "actor": {"kind": "train", "pool": "host", "devices": 1},
        "critic": {"kind": "train", "like": "actor"},
        "ref": {"kind": "train", "like": "actor"},
        "rollout": {"kind": "rollout", "pool": "host", "engines": 1},
    },
    "share": [{"roles": ["actor", "critic", "ref", "rollout"], "mode": "time", "residency": "park"}],
    "sync": [{"from": "actor", "to": "rollout"}],
}
"""Four roles on one slot, of which only one is there at a time."""


def own_devices(*others: str) -> dict[str, Any]:
    """Every role on slots of its own; the actor on two of them, so that roles split a batch differently."""
    beside = {other: {"kind": "train", "pool": "host", "devices": 1} for other in others}
    return {
        "schema": "vime.topology/v1",
        "name": "own-devices",
        "pools": {"host": {"platform": "cpu", "nodes": 1, "devices_per_node": 3 + len(others)}},
        "roles": {
            "actor": {"kind": "train", "pool": "host", "devices": 2},
            **beside,
            "rollout": {"kind": "rollout", "pool": "host", "engines": 1},
        },
        "sync": [{"from": "actor", "to": "rollout"}],
    }


def learned(folder: Path) -> float:
    """By how much the mean reward rose from the first five steps to the last five."""
    done = steps(folder)
    rewards = [done[step].metrics["rollout/raw_reward"] for step in sorted(done)]
    return (sum(rewards[-5:]) - sum(rewards[:5])) / 5


def test_critic_and_reference_take_turns_with_actor_and_engine(tmp_path: Path) -> None:
    """One slot for all, parked: the critic warms up alone, the divergence begins at 0, and nobody meets anybody."""
    algorithm = {**PPO, "critic": {**PPO["critic"], "warmup_steps": 1}, "kl": {"coef": 0.05}}
    path = write_run(tmp_path, topology=ALL_IN_TURN, schedule={"num_steps": 3})
    replace_section(path, "algorithm", algorithm)
    run(path)
    done = steps(tmp_path / "run")
    assert [("train/loss" in row.metrics, "train/critic-loss" in row.metrics) for row in done.values()] == [
        (False, True),
        (True, True),
        (True, True),
    ]
    assert done[2].metrics["train/kl_loss"] == 0.0, "the actor is the reference until its first update"
    assert done[3].metrics["train/kl_loss"] > 1e-4
    assert done[2].metrics["train/train_rollout_logprob_abs_diff"] <= 2e-6
    assert {"train/score_ref", "train/score_critic", "train/train_critic", "train/train_actor"} <= done[3].seconds.keys()
    edges = {row.data["edge"]: row.data["device"] for row in rows(tmp_path / "run") if row.kind == "memory"}
    there = {edge: {r for r, tags in device.items() if r != "rollout" and any(tags.values())} for edge, device in edges.items()}
    assert there == {
        "scoring ref": {"ref"},
        "scoring critic": {"critic"},
        "training critic": {"critic"},
        "training": {"actor"},
        "updating": {"actor"},
        "serving": set(),
    }
    probed = [r.metrics["sync/probe_abs_diff"] for r in rows(tmp_path / "run") if "sync/probe_abs_diff" in r.metrics]
    assert len(probed) == 3
    assert max(probed) < 1e-5
    (checkpoint,) = (tmp_path / "run" / "checkpoints").iterdir()
    assert {p.name for p in checkpoint.iterdir() if p.is_dir()} == {"trainer", "trainer-critic"}


def replace_section(path: Path, name: str, section: Any) -> None:
    """`write_run` merges sections; an algorithm of another kind takes another one's place."""
    import yaml

    content = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump({**content, name: section}))


def ppo_run(folder: Path, topology: Any, algorithm: Any = PPO, **sections: Any) -> Path:
    path = write_run(folder, topology=topology, **sections)
    replace_section(path, "algorithm", algorithm)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("topology", [own_devices("critic"), "cpu-critic", ALL_IN_TURN], ids=["own", "shipped", "shared"])
def test_ppo_with_a_critic_learns(topology: Any, tmp_path: Path) -> None:
    algorithm = {**PPO, "kl": {"coef": 0.001}} if topology is ALL_IN_TURN else PPO
    run(ppo_run(tmp_path, topology, algorithm, schedule={"num_steps": 30}))
    assert learned(tmp_path / "run") > 0.05
    done = steps(tmp_path / "run")
    losses = [done[step].metrics["train/critic-value_loss"] for step in sorted(done)]
    assert sum(losses[-5:]) < sum(losses[:5])


@pytest.mark.slow
@pytest.mark.parametrize("topology", [own_devices("ref"), "cpu-reference"], ids=["own", "shared"])
def test_a_penalty_to_a_reference_begins_at_nothing_and_holds_the_policy(topology: Any, tmp_path: Path) -> None:
    """The same run twice: a heavy penalty keeps the policy nearer to the reference than a light one."""
    ends = {}
    for coef in (0.001, 1.0):
        folder = tmp_path / str(coef)
        folder.mkdir()
        algorithm = {"kind": "grpo", "loss_mean": "token", "kl": {"coef": coef}}
        run(ppo_run(folder, topology, algorithm, schedule={"num_steps": 10}))
        done = steps(folder / "run")
        assert abs(done[1].metrics["train/kl_loss"]) < 1e-9
        ends[coef] = done[10].metrics["train/kl_loss"]
    assert 0 < ends[1.0] < ends[0.001]


@pytest.mark.slow
def test_a_policy_comes_nearer_to_its_teacher(tmp_path: Path) -> None:
    make_tiny_qwen3(tmp_path / "teacher", seed=2)
    path = ppo_run(tmp_path, "cpu-teacher", {"kind": "distill"}, schedule={"num_steps": 20})
    run(path, f"model.teacher={tmp_path / 'teacher'}")
    done = steps(tmp_path / "run")
    apart = [done[step].metrics["rollout/opd_reverse_kl"] for step in sorted(done)]
    assert sum(apart[-3:]) / 3 < 0.8 * apart[0]


@pytest.mark.slow
@pytest.mark.parametrize("topology", [own_devices("critic"), ALL_IN_TURN], ids=["own", "shared"])
def test_a_killed_ppo_run_goes_on_bit_for_bit(topology: Any, tmp_path: Path) -> None:
    algorithm = {**PPO, "critic": {**PPO["critic"], "warmup_steps": 1}}
    if topology is ALL_IN_TURN:
        algorithm["kl"] = {"coef": 0.05, "use": "reward", "estimator": "k1"}
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        folder.mkdir()
    sections: dict[str, Any] = {"checkpoint": {"every": 2, "keep": 10}, "schedule": {"num_steps": 6}}
    run(ppo_run(whole, topology, algorithm, **sections))
    path = ppo_run(killed, topology, algorithm, **sections)
    process = start(path)
    wait_for(lambda: reached(killed / "run", 3), timeout_s=120, what="step 3")
    time.sleep(0.1)
    family = descendants(process.pid)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    wait_for(lambda: not list(alive(family)), timeout_s=15, what="the end of all processes")
    run(path, "--resume")
    assert comparable(killed / "run") == comparable(whole / "run")
    expected, got = (load_file(d / "run" / "model" / "model.safetensors") for d in (whole, killed))
    assert all((expected[name] == got[name]).all() for name in expected)


@pytest.mark.slow
def test_the_death_of_a_critic_s_rank_ends_the_run_and_names_it(tmp_path: Path) -> None:
    path = ppo_run(tmp_path, "cpu-critic", schedule={"num_steps": 200}, checkpoint={"every": 1, "keep": 2})
    process = start(path)
    wait_for(lambda: reached(tmp_path / "run", 2), timeout_s=120, what="step 2")
    ranks = sorted((p for p in descendants(process.pid) if "TrainerProcess" in " ".join(p.cmdline())), key=started)
    assert len(ranks) == 2
    family = descendants(process.pid)
    ranks[1].kill()
    assert process.wait(60) == 1
    out = (tmp_path / "out.log").read_text()
    assert "trainer rank 0 of " in out
    assert "died" in out
    wait_for(lambda: not list(alive(family)), timeout_s=15, what="the end of all processes")
    last = max(steps(tmp_path / "run"))
    replace_section(path, "schedule", {"num_steps": last + 1})
    finish(start(path, "--resume"), path)
    assert max(steps(tmp_path / "run")) == last + 1


def started(process: psutil.Process) -> float:
    return process.create_time()
