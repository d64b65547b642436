"""Whole runs and benchmarks over two devices: each layout in which trainer and engines can sit on them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import boards
import pytest
from test_acme_run import run_on_acme

from vime.observe.jsonl import Row

from live_runs import environment, rows, run, steps, write_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
EVERY_PUBLICATION = {"probe": {"first": 100}, "fingerprint": {"first": 100}}


def value(row: Row, name: str) -> float:
    found = row.metrics[name]
    assert found is not None
    return found


def check_publications(folder: Path, count: int) -> None:
    """Every publication was probed and found right."""
    synced = [row for row in rows(folder) if row.kind == "sync"]
    assert [row.step for row in synced] == list(range(count))
    assert max(value(row, "sync/probe_abs_diff") for row in synced) < 1e-5


@pytest.mark.parametrize("ahead", [0, 1])
def test_apart_by_collective(tmp_path: Path, ahead: int) -> None:
    """One ahead, the batch of step n is drawn from the weights of step n - 2; at 0 the engine draws from the newest."""
    topology = {
        "schema": "vime.topology/v1",
        "name": "apart",
        "pools": {"host": {"platform": "cpu", "nodes": 1, "devices_per_node": 2}},
        "roles": {"actor": {"kind": "train", "devices": 1}, "rollout": {"kind": "rollout", "engines": 1}},
        "sync": [{"from": "actor", "to": "rollout", "require": ["collective"]}],
    }
    schedule = {"num_steps": 5, "max_staleness": ahead}
    run(write_run(tmp_path, topology=topology, schedule=schedule, weights=EVERY_PUBLICATION))
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert (plan["transport"]["protocol"], plan["shared"]) == ("collective", False)
    check_publications(tmp_path / "run", 6)
    seen = steps(tmp_path / "run")
    assert sorted(seen) == list(range(1, 6))
    for step, row in seen.items():
        assert value(row, "rollout/staleness/max") == min(ahead, step - 1)
        assert row.data["versions"] == [f"0.{step - 1 - min(ahead, step - 1)}"]
        if not ahead:
            assert value(row, "train/train_rollout_logprob_abs_diff") <= 2e-6
            assert value(row, "train/train_rollout_logprob_abs_diff_max") <= 2e-4


def shared(axes: dict[str, int], engines: int, tp: int) -> dict[str, Any]:
    return {
        "schema": "vime.topology/v1",
        "name": "shared",
        "pools": {"node": {"platform": "acme"}},
        "roles": {
            "actor": {"kind": "train", "devices": 2, "parallel": axes},
            "rollout": {"kind": "rollout", "engines": engines, "parallel": {"tp": tp}},
        },
        "share": [{"roles": ["actor", "rollout"], "mode": "time", "residency": "park"}],
        "sync": [{"from": "actor", "to": "rollout", "require": ["device_ipc"]}],
    }


@pytest.mark.parametrize(
    "layout", [({"tp": 2}, 1, 2), ({}, 2, 1), ({"pp": 2}, 2, 1)], ids=["tp2-to-tp2", "dp2-to-two-engines", "pp2-to-two-engines"]
)
def test_shared_by_device_ipc(tmp_path: Path, acme_site: Path, layout: Any) -> None:
    """Each rank hands the weights to the engine worker on its own device, whose process sees no other rank's."""
    site, trace = boards.install(acme_site, tmp_path), tmp_path / "trace.jsonl"
    path = write_run(tmp_path, topology=shared(*layout), schedule={"num_steps": 3}, weights=EVERY_PUBLICATION)
    run_on_acme(path, site, timeout_s=300.0, **{boards.TRACE: str(trace)})
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert (plan["transport"]["protocol"], plan["residency"]) == ("device_ipc", "park")
    assert boards.taken(trace) == {("board 0", "board 0"), ("board 1", "board 1")}
    check_publications(tmp_path / "run", 4)
    seen = steps(tmp_path / "run")
    assert sorted(seen) == [1, 2, 3]
    for row in seen.values():
        assert value(row, "train/grad_norm") > 0
        assert value(row, "train/train_rollout_logprob_abs_diff") <= 2e-6
    edges = {row.data["edge"]: row.data["device"]["actor"] for row in rows(tmp_path / "run") if row.kind == "memory"}
    assert edges["serving"] == {"params": 0, "grads": 0, "optimizer": 0}


def test_engines_take_from_the_ranks_of_their_own_host(tmp_path: Path, acme_site: Path) -> None:
    """Each board on a planted host of its own, under a name that boards of all hosts have: the host alone tells them apart."""
    site, trace = boards.install(acme_site, tmp_path), tmp_path / "trace.jsonl"
    path = write_run(tmp_path, topology=shared({}, 2, 1), schedule={"num_steps": 2}, weights=EVERY_PUBLICATION)
    run_on_acme(path, site, timeout_s=300.0, **{boards.TRACE: str(trace), boards.HOSTS: "1"})
    assert boards.taken(trace) == {("board 0", "board 0"), ("board 1", "board 1")}
    check_publications(tmp_path / "run", 3)
    for row in steps(tmp_path / "run").values():
        assert value(row, "train/train_rollout_logprob_abs_diff") <= 2e-6


# ---- benchmarks


def bench(name: str, folder: Path, *words: str, record: str = "") -> tuple[dict[str, Any], str]:
    """Run a benchmark to success; the parts of its record and what it printed."""
    command = [sys.executable, "-m", "vime.cli.main", "bench", name, "--platform", "cpu", "--limit", "280"]
    places = ["--out", folder, "--models", folder / "models"]
    done = subprocess.run([*command, *places, *words], capture_output=True, text=True, env=environment(), timeout=320)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return json.loads((folder / f"bench-{record or name}.json").read_text())["parts"], done.stdout


def test_bench_step_apart(tmp_path: Path) -> None:
    words = ("--layout", "apart", "--max-staleness", "1", "--transport", "collective", "--steps", "3")
    parts, printed = bench("step", tmp_path, *words)
    found = parts["apart"]
    assert found["layout"] | {"kind": "apart", "actor_devices": 1, "engines": 1} == found["layout"]
    assert found["transport"] == "collective"
    assert [row["groups_by_steps"] for row in found["staleness"]] == [{"0": 8}, {"1": 8}, {"1": 8}]
    assert all(row["grad_norm"] > 0 for row in found["losses"])
    assert all(row["update_gb_per_s"] > row["whole_gb_per_s"] > 0 for row in found["syncs"])
    assert "weights by collective" in printed


def test_bench_step_shared_by_experts(tmp_path: Path) -> None:
    words = ("--shape", "tiny-moe", "--residency", "park", "--actor-ep", "2", "--engine-tp", "2", "--steps", "2")
    parts, _ = bench("step", tmp_path, *words)
    found = parts["park"]
    assert found["layout"] | {"devices": 2, "actor_ep": 2, "engine_tp": 2} == found["layout"]
    assert all(mean < 2e-6 for mean, _ in found["log_prob_differences"])
    assert [row["groups_by_steps"] for row in found["staleness"]] == [{"0": 8}] * 2


def test_bench_sync_apart(tmp_path: Path) -> None:
    parts, printed = bench("sync", tmp_path, "--apart", "--transport", "collective", "--repeats", "2")
    assert parts["publications"]["transport"] == "collective"
    assert parts["publications"]["checked"]["log_prob_differences"]["one set from the other"] > 0.01
    assert parts["broadcast"]["backend"] == "gloo"
    assert set(parts["publications"]["rates"]) == {"update_gb_per_s", "publication_gb_per_s"}
    assert printed.rstrip().splitlines()[-1].startswith("publication / broadcast between processes")


@pytest.mark.parametrize(
    "words",
    [("--shape", "tiny", "--dtype", "bfloat16", "--layouts", "tp2", "dp2"), ("--shape", "tiny-moe", "--layouts", "ep2")],
    ids=["dense", "experts"],
)
def test_bench_train_in_layouts(tmp_path: Path, words: tuple[str, ...]) -> None:
    parts, printed = bench("train", tmp_path, *words, "--parity", record="layouts")
    layouts = words[words.index("--layouts") + 1 :]
    assert set(parts) == {"words", "alone", *layouts}
    for name in layouts:
        for dtype, row in parts[name]["dtypes"].items():
            assert len(row["metrics"]) == len(row["relative"]) == 3
            limit = 2e-5 if dtype == "float32" else 0.01
            assert all(step[metric] <= limit for step in row["relative"] for metric in ("train/loss", "train/grad_norm"))
        assert "float32" in parts[name]["dtypes"]
    assert "one rank's:" in printed.rstrip().splitlines()[-1]
