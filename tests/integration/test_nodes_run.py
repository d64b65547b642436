"""Whole runs over several Ray nodes: one to its end, then one whose driver is killed."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from live_runs import SHARED_MEMORY, alive, descendants, finish, reached, segments, start, steps, wait_for, write_run
from ray_nodes import RayNodes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

GONE_WITHIN_S = 30.0
TOPOLOGY = {
    "pools": {"p": {"platform": "cpu", "nodes": 4}},
    "roles": {"actor": {"kind": "train", "devices": 3}, "rollout": {"kind": "rollout", "engines": 2}},
}
"""The actor on n1, n2, n2, the engines on n3 and n4."""


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayNodes]:
    started = RayNodes(tmp_path_factory.mktemp("nodes"), (1, 2, 1, 2))
    try:
        started.start()
        yield started
    finally:
        started.close()


def of_run(nodes: RayNodes) -> dict[int, list[psutil.Process]]:
    """Actors and what they started, by the number of their node."""
    wanted = re.compile(r"ray::(TrainerProcess|EngineProcess|RolloutProcess)|vllm|EngineCore|--segments vime-")
    found: dict[int, list[psutil.Process]] = {}
    for number, process in enumerate(nodes.processes):
        if process.poll() is None:
            found[number] = [p for p in descendants(process.pid) if wanted.search(_words(p))]
    return found


def _words(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def counted(processes: list[psutil.Process], word: str) -> int:
    return sum(word in _words(process) for process in processes)


def test_a_run_over_four_nodes_and_one_whose_driver_is_killed(nodes: RayNodes, tmp_path: Path) -> None:
    path = write_run(tmp_path, topology=TOPOLOGY, schedule={"num_steps": 2}, rollout={"start_timeout_s": 400.0})
    driver = start(path, "--ray-address", nodes.address)
    finish(driver, path, timeout_s=400)
    rows = steps(tmp_path / "run")
    assert sorted(rows) == [1, 2]
    wait_for(lambda: not any(of_run(nodes).values()), timeout_s=GONE_WITHIN_S, what="the end of the run's processes")
    assert nodes.alive() == [True] * 4

    second = write_run(tmp_path, topology=TOPOLOGY, run={"dir": str(tmp_path / "killed")}, schedule={"num_steps": 500})
    driver = start(second, "--ray-address", nodes.address)
    wait_for(lambda: reached(tmp_path / "killed", 1) or driver.poll() is not None, timeout_s=300, what="step 1")
    assert driver.poll() is None, (tmp_path / "out.log").read_text()[-3000:]
    there = of_run(nodes)
    assert [counted(there[n], "ray::TrainerProcess") for n in range(4)] == [1, 2, 0, 0]
    assert [counted(there[n], "ray::EngineProcess") for n in range(4)] == [0, 0, 1, 1]
    assert [counted(there[n], f"--host 127.0.0.{n + 2}") > 0 for n in range(4)] == [False, False, True, True]
    everything = [process for processes in there.values() for process in processes]
    everything += descendants(driver.pid)
    mine = segments(everything)
    os.kill(driver.pid, signal.SIGKILL)
    driver.wait(10)
    wait_for(lambda: not list(alive(everything)), timeout_s=GONE_WITHIN_S, what=f"the end of {list(alive(everything))}")
    wait_for(lambda: not [p for p in mine if p.exists() and "vime-" in p.name], timeout_s=10, what="the end of segments")
    assert not [path for path in mine if path.exists()]
    makers = {str(process.pid) for process in everything}
    assert not [path for path in SHARED_MEMORY.glob("vime-*") if makers & set(path.name.split("-"))]
    assert nodes.alive() == [True] * 4
