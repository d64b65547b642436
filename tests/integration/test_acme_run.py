"""A whole run on a third-party platform: its own resource, memory backend and weight transport, from its own wheel."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from vime.testing.recording import HookCall, read_trace, unasked

from live_runs import environment, rows, steps, wait_for, write_run

NUM_STEPS = 20
ROOT = Path(__file__).resolve().parents[2]


def acme_environment(site: Path, **extra: str) -> dict[str, str]:
    """The plugin installed, on a machine with two devices."""
    env = environment(**extra)
    table = site / "acme_accelerator" / "testing" / "tables" / "a1x2.json"
    return {**env, "PYTHONPATH": os.pathsep.join([str(site), env["PYTHONPATH"]]), "ACME_DEVICE_TABLE": str(table)}


def topology(site: Path) -> str:
    return str(site / "acme_accelerator" / "topologies" / "acme-colocate.yaml")


def run_on_acme(path: Path, site: Path, *, timeout_s: float = 150.0, **extra: str) -> None:
    command = [sys.executable, "-m", "vime.cli.main", "run", "--platform", "acme", str(path)]
    done = subprocess.run(command, env=acme_environment(site, **extra), capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


def orphans() -> set[Path]:
    """Sockets and segments of runs in shared memory whose process is gone; a killed run's last until its guardian has ended."""
    found = (path for path in Path("/dev/shm").glob("vime-*-w") if not psutil.pid_exists(int(path.name.split("-")[-2])))
    return set(found)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, acme_site: Path) -> Path:
    """A run in which trainer and engine take turns on one device and the trainer leaves it in between."""
    folder = tmp_path_factory.mktemp("acme")
    path = write_run(folder, topology=topology(acme_site), schedule={"num_steps": NUM_STEPS})
    before = orphans()
    run_on_acme(path, acme_site, VIME_TRACE_PLUGINS=str(folder / "trace.jsonl"))
    wait_for(lambda: orphans() <= before, timeout_s=20, what="the removal of all shared memory")
    return folder


@pytest.fixture(scope="module")
def calls(finished: Path) -> tuple[HookCall, ...]:
    return read_trace(finished / "trace.jsonl")


def test_the_plan_chose_the_platforms_own_transport_and_parking(finished: Path) -> None:
    plan: dict[str, Any] = json.loads((finished / "run" / "plan.json").read_text())
    assert plan["transport"]["protocol"] == "acme_link"
    assert {rejected["protocol"] for rejected in plan["transport"]["rejected"]} == {"host_shm", "disk"}
    assert plan["residency"] == "park"
    assert [(pool["platform"], pool["resource"]) for pool in plan["pools"]] == [("acme", "ACME")]


def test_every_runtime_hook_is_asked_and_the_platform_answers_it(calls: tuple[HookCall, ...]) -> None:
    assert unasked(calls) == ()
    assert {call.platform for call in calls} == {"acme"}
    assert all("acme" in call.plugins and call.error is None for call in calls)


def test_training_moves_the_policy_and_its_reward(finished: Path) -> None:
    done = steps(finished / "run")
    assert sorted(done) == list(range(1, NUM_STEPS + 1))
    assert all(row.data["versions"] == [f"0.{step - 1}"] for step, row in done.items())
    assert all(row.metrics["train/grad_norm"] > 0 for row in done.values())
    rewards = [done[step].metrics["rollout/raw_reward"] for step in sorted(done)]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.03, rewards


def test_the_engine_computes_with_what_came_over_the_link(finished: Path) -> None:
    for row in steps(finished / "run").values():
        assert row.metrics["train/train_rollout_logprob_abs_diff"] <= 2e-6
        assert row.metrics["train/train_rollout_logprob_abs_diff_max"] <= 2e-4
    synced = [row.metrics for row in rows(finished / "run") if row.kind == "sync"]
    assert len(synced) == NUM_STEPS + 1
    probed = [metrics["sync/probe_abs_diff"] for metrics in synced if "sync/probe_abs_diff" in metrics]
    assert probed
    assert max(probed) < 1e-5


def test_the_trainer_really_leaves_the_device_between_its_turns(finished: Path) -> None:
    edges = {row.data["edge"]: row.data["device"]["actor"] for row in rows(finished / "run") if row.kind == "memory"}
    assert edges["serving"] == {"params": 0, "grads": 0, "optimizer": 0}
    assert edges["updating"]["params"] > 0 == edges["updating"]["optimizer"]
    assert min(edges["training"].values()) > 0


@pytest.mark.slow
def test_the_quick_start_learns_on_acme(acme_site: Path, tmp_path: Path) -> None:
    """The quick start's task on an acme device. Data and warm model are the quick start's; what it made before is reused."""
    prepare = [sys.executable, "-c", "import quickstart as q; q.WORK.mkdir(parents=True, exist_ok=True); q.prepare()"]
    subprocess.run(
        prepare, check=True, capture_output=True, env={**os.environ, "PYTHONPATH": str(ROOT / "examples/quickstart")}
    )
    env = acme_environment(acme_site)
    words = ["--platform", "acme", "--topology", topology(acme_site), f"run.dir={tmp_path / 'run'}"]
    command = [sys.executable, "-m", "vime.cli.main", "run", str(ROOT / "examples/quickstart/run.yaml"), *words]
    done = subprocess.run(command, env=env, capture_output=True, text=True, cwd=ROOT, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
    report = [sys.executable, "-m", "vime.cli.main", "report", str(tmp_path / "run"), "--json"]
    summary = json.loads(subprocess.run(report, check=True, capture_output=True, text=True, env=env).stdout)
    sampled = summary["eval"]["held-out"]["sampled"]
    assert sampled["last"] - sampled["first"] >= 0.12
