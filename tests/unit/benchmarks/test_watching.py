"""A run seen from outside: its rows, its end, its engines."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from vime.benchmarks.watching import Watch, core_pids, device_counter, engine_families, staleness, thinned, used_at


def watch(folder: Path, code: str) -> Watch:
    with (folder / "driver.log").open("w") as log:
        return Watch(subprocess.Popen([sys.executable, "-c", code], stdout=log, stderr=log, text=True), folder)


def test_a_torn_last_row_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    seen = watch(tmp_path, "pass")
    assert seen.rows() == []
    (tmp_path / "run" / "metrics.jsonl").write_text('{"kind":"step","step":1}\n{"kind":"sync","step":1}\n{"kind":"st')
    assert [row["kind"] for row in seen.rows()] == ["step", "sync"]
    assert [row["kind"] for row in seen.rows("sync")] == ["sync"]
    assert seen.finish(time.monotonic() + 20) == "exit code 0"
    seen.end()


def test_the_deadline_ends_a_run_and_its_output_is_kept(tmp_path: Path) -> None:
    seen = watch(tmp_path, "import time; print('here', flush=True); time.sleep(60)")
    seen.wait(time.monotonic() + 20, lambda: "here" in seen.output())
    assert seen.finish(time.monotonic() + 0.2).startswith("stopped after")
    assert seen.process.returncode is not None
    assert seen.tails()["driver.log"] == ["here"]


def test_a_failing_run_says_so(tmp_path: Path) -> None:
    seen = watch(tmp_path, "raise SystemExit(3)")
    assert seen.finish(time.monotonic() + 20) == "exit code 3"
    seen.end()


def test_samples_are_thinned_and_found_by_time() -> None:
    samples = [(0.0, 1.0), (0.25, 1.1), (0.5, 4.0), (0.75, 4.1), (1.0, 1.0)]
    assert thinned(samples) == [(0.0, 1.0), (0.5, 4.0), (1.0, 1.0)]
    assert used_at(samples, 0.6) == 4.0
    assert used_at(samples, 2.5) is None
    assert used_at([], 0.0) is None


@pytest.mark.parametrize(
    ("versions", "mean", "counts"),
    [
        (["0.4"], 0.0, {0: 8}),
        (["0.3"], 1.0, {1: 8}),
        (["0.3", "0.4"], 0.25, {0: 6, 1: 2}),
        (["0.2", "0.4"], 0.25, {0: 7, 2: 1}),
        (["1.2", "0.2"], 2.0, {2: 8}),
        (["0.2", "0.3", "0.4"], 1.0, None),
        ([], None, None),
    ],
)
def test_groups_are_counted_by_how_far_they_lag(versions: list[str], mean: float | None, counts: dict[int, int] | None) -> None:
    metrics = {} if mean is None else {"rollout/staleness/mean": mean, "rollout/staleness/max": 2.0}
    row: dict[str, Any] = {"step": 5, "metrics": metrics, "data": {"versions": versions, "groups": list(range(8))}}
    assert staleness(row)["groups_by_steps"] == counts
    assert staleness(row)["mean"] == mean


def test_slots_of_a_host_have_no_driver_to_ask() -> None:
    assert device_counter("cpu") is None


def test_cores_are_read_from_the_engines_logs(tmp_path: Path) -> None:
    (tmp_path / "engine-0.log").write_text("(APIServer pid=3) INFO\n(EngineCore pid=41) INFO\nx (EngineCore pid=7)\n")
    (tmp_path / "engine-1.log").write_text("(EngineCore_DP0 pid=52) WARNING\n")
    assert list(core_pids(tmp_path)) == [41, 52]


SERVER = """
import subprocess, sys, time
core = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(f"(EngineCore pid={core.pid}) up", flush=True)
time.sleep(60)
"""


def test_an_engine_is_found_below_the_driver(tmp_path: Path) -> None:
    """A driver whose child looks like an engine server: its log names the core, its command line the port."""
    logs = tmp_path / "run" / "logs"
    logs.mkdir(parents=True)
    words = ["--middleware", "vime.weights.gate.Gate", "--port", "4321"]
    code = f"import subprocess, sys\nlog = open({str(logs / 'engine-0.log')!r}, 'w')\n"
    code += f"subprocess.Popen([sys.executable, '-c', {SERVER!r}, *{words!r}], stdout=log).wait()"
    seen = watch(tmp_path, code)
    try:
        assert seen.wait(time.monotonic() + 20, lambda: bool(list(engine_families(seen))))
        (family,) = engine_families(seen)
        assert family.url == "http://127.0.0.1:4321"
        assert family.core.pid == next(core_pids(logs))
        assert family.core.ppid() == family.server.pid
    finally:
        for process in seen.descendants():
            process.kill()
        seen.end()
