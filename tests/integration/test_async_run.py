"""Whole fully asynchronous runs: sampling ahead on devices of its own, updates that meet running requests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from vime.data.snapshot import latest_snapshot
from vime.observe.jsonl import Row

from live_runs import alive, descendants, environment, finish, reached, rows, run, start, steps, wait_for, write_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = ROOT / "examples" / "quickstart"
BOUND = 2


def staleness(found: dict[int, Row]) -> Counter[int]:
    """Groups by staleness over a whole run."""
    name = "rollout/staleness/count_"
    counts: Counter[int] = Counter()
    for row in found.values():
        ages = {int(key.removeprefix(name)): int(n or 0) for key, n in row.metrics.items() if key.startswith(name)}
        counts.update(ages or {0: len(row.data["groups"])})
    return counts


def assert_bounded(found: dict[int, Row]) -> None:
    """The histogram ends at the bound; a batch's oldest version is as old as its staleness says; nothing is trained twice."""
    assert max(staleness(found)) <= BOUND
    trained: list[int] = []
    for step, row in found.items():
        oldest = min(int(version.partition(".")[2]) for version in row.data["versions"])
        assert 0 <= step - 1 - oldest <= BOUND
        assert row.metrics["rollout/staleness/max"] == step - 1 - oldest
        trained += row.data["groups"]
    assert len(trained) == len(set(trained))


def mean(found: dict[int, Row], name: str, among: range) -> float:
    values = [value for step in among if (value := found[step].metrics[name]) is not None]
    return sum(values) / len(values)


def test_the_asynchronous_quick_start_learns(tmp_path: Path) -> None:
    """The ready example, with the warm model that the quick start makes; 100 of its steps."""
    code = "import quickstart as q; q.WORK.mkdir(parents=True, exist_ok=True); q.prepare()"
    subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(QUICKSTART)!r}); {code}"],
        check=True,
        capture_output=True,
        cwd=ROOT,
        env=environment(),
    )
    path = tmp_path / "run.yaml"
    path.write_text(
        f"include: {QUICKSTART / 'async.yaml'}\nrun: {{dir: run}}\nschedule: {{num_steps: 100}}\nevaluation: {{sets: []}}\n"
    )
    finish(start(path), path, timeout_s=400)
    found = steps(tmp_path / "run")
    assert sorted(found) == list(range(1, 101))
    assert_bounded(found)
    assert any(row.metrics["rollout/mixed_versions"] for row in found.values())
    first, last = (mean(found, "rollout/raw_reward", among) for among in (range(1, 11), range(91, 101)))
    print(f"reward {first:.3f} -> {last:.3f}; groups by staleness {dict(staleness(found))}")
    assert last > first + 0.05, (first, last)


AHEAD: dict[str, Any] = {
    "topology": "cpu-one-ahead",
    "weights": {"update": "in_flight"},
    "rollout": {"batch_size": 8, "group_size": 4, "sampling": {"max_response_tokens": 24}},
}


def finished_and_unfinished(folder: Path) -> tuple[list[int], list[int], int]:
    """Groups that the run trained, those that its last checkpoint still owes, and how many were ever started."""
    trained = [group for row in steps(folder).values() for group in row.data["groups"]]
    snapshot = latest_snapshot(folder / "checkpoints")
    assert snapshot is not None
    source = snapshot.state["buffer"]["source"]
    return trained, [group for group, *_ in source["unfinished"]], source["next_group"]


@pytest.mark.parametrize(("at_step", "moment_s"), [(3, 0.0), (9, 0.05), (14, 0.11)])
def test_a_killed_run_goes_on_with_nothing_lost_or_repeated(tmp_path: Path, at_step: int, moment_s: float) -> None:
    """SIGKILL of the driver while requests run through updates; the resumed run keeps the ledger and the bound."""
    schedule = {"num_steps": 20, "max_staleness": BOUND}
    path = write_run(tmp_path, **AHEAD, schedule=schedule, checkpoint={"every": 2, "keep": 3})
    process = start(path)
    run_dir = tmp_path / "run"
    wait_for(lambda: reached(run_dir, at_step), timeout_s=240, what=f"step {at_step}")
    time.sleep(moment_s)
    family = descendants(process.pid)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    wait_for(lambda: not list(alive(family)), timeout_s=20, what="the end of every process")
    run(path, "--resume")
    found = steps(run_dir)
    assert sorted(found) == list(range(1, 21))
    assert_bounded(found)
    incarnations = {int(row.version.partition(".")[0]) for row in found.values() if row.version is not None}
    assert incarnations == {0, 1}
    assert any(row.metrics["rollout/mixed_versions"] for row in found.values())
    trained, unfinished, started = finished_and_unfinished(run_dir)
    assert sorted(trained + unfinished) == list(range(started))


def test_an_engine_that_dies_amid_updates_loses_no_group(tmp_path: Path) -> None:
    topology = "cpu-disaggregated"
    schedule = {"num_steps": 25, "max_staleness": BOUND}
    path = write_run(tmp_path, **{**AHEAD, "topology": topology}, schedule=schedule)
    process = start(path)
    run_dir = tmp_path / "run"
    wait_for(lambda: reached(run_dir, 4), timeout_s=240, what="step 4")
    servers = [
        p for p in descendants(process.pid) if "api_server" in " ".join(p.cmdline()) and "guardian" not in " ".join(p.cmdline())
    ]
    max(servers, key=lambda p: p.pid).kill()
    finish(process, path)
    found = steps(run_dir)
    assert sorted(found) == list(range(1, 26))
    assert_bounded(found)
    assert {"engine_died", "engine_restarted"} & {row.data["name"] for row in rows(run_dir) if row.kind == "event"}
    trained, unfinished, started = finished_and_unfinished(run_dir)
    assert sorted(trained + unfinished) == list(range(started))
