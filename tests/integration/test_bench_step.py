"""`vime bench step` with real runs on a host: what it measures, and its drills."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from live_runs import environment


def bench(folder: Path, *words: str, record: str) -> tuple[dict[str, Any], str]:
    """Run it to success; returns the parts of its record and what it printed."""
    command = [sys.executable, "-m", "vime.cli.main", "bench", "step", "--platform", "cpu", "--shape", "tiny"]
    places = ["--out", folder, "--models", folder / "models", "--limit", "280"]
    done = subprocess.run([*command, *places, *words], capture_output=True, text=True, env=environment(), timeout=300)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return json.loads((folder / f"bench-{record}.json").read_text())["parts"], done.stdout


def test_two_steps_beside_their_plan(tmp_path: Path) -> None:
    parts, printed = bench(tmp_path, "--residency", "park", "--steps", "2", record="step")
    found = parts["park"]
    assert found["ended"] == "exit code 0"
    assert [row["step"] for row in found["walls"]] == [1, 2]
    assert all(row["seconds"]["save"] < 0.01 for row in found["walls"])
    assert [row["step"] for row in found["syncs"]] == [0, 1, 2]
    assert all(mean < 2e-6 for mean, _ in found["log_prob_differences"])
    assert {row["edge"] for row in found["memory"]} == {"serving", "training", "updating"}
    params = next(row for row in found["predicted"] if row["what"] == "training actor params")
    assert params["ratio"] == 1.0
    assert 0 < found["useful_share"] <= 1
    assert printed.splitlines()[-1].endswith("(floor: 1)")


@pytest.mark.slow
def test_altered_tensors_stop_a_run(tmp_path: Path) -> None:
    parts, _ = bench(tmp_path, "--drill", "negative", record="drills")
    assert all(parts[f"negative, {kind}"]["ok"] for kind in ("transit", "loaded"))


@pytest.mark.slow
@pytest.mark.parametrize("residency", ["park", "resident"])
def test_a_run_survives_the_death_of_its_engine(tmp_path: Path, residency: str) -> None:
    parts, _ = bench(tmp_path, "--drill", "kill", "--residency", residency, record="drills")
    assert parts[f"kill, {residency}"]["ok"]
