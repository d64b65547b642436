"""Real processes that work together: their results, and what is told of one that fails or does not end."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil
import pytest

from vime.benchmarks import children
from vime.benchmarks.children import together

CODE = """
import json, os, sys, time
from vime.benchmarks.children import tell
order = json.loads(open(sys.argv[1]).read())
open(order["pids"], "a").write(f"{os.getpid()}\\n")
print("child", order["number"], flush=True)
tell({"number": order["number"], "mask": os.environ.get("MASK"), "old": os.environ.get("OLD_MASK")})
if order.get("raise"):
    raise SystemExit("no such device")
def waits_for_ever():
    time.sleep(order.get("sleep", 0))
waits_for_ever()
tell({"last": True})
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "planted_child.py").write_text(CODE)
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setattr(children, "GRACE_S", 0.5)


def run(folder: Path, *orders: dict[str, object], limit_s: float = 30.0) -> children.Told:
    told = together(
        "planted_child",
        [{"number": number, "pids": str(folder / "pids"), **order} for number, order in enumerate(orders)],
        envs=[{"MASK": f"device-{number}"} for number in range(len(orders))],
        folder=folder,
        limit_s=limit_s,
        unset=["OLD_MASK"],
    )
    left = [int(pid) for pid in (folder / "pids").read_text().split()]
    assert not any(psutil.pid_exists(pid) for pid in left)
    return told


def test_each_child_has_its_order_and_its_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OLD_MASK", "9")
    told = run(tmp_path, {}, {})
    assert told.error is None
    assert [results[0] for results in told.results] == [{"number": n, "mask": f"device-{n}", "old": None} for n in (0, 1)]
    assert all(results[1] == {"last": True} for results in told.results)


def test_a_failure_ends_the_others_and_everybodys_last_words_are_kept(tmp_path: Path) -> None:
    began = time.monotonic()
    told = run(tmp_path, {"sleep": 60}, {"raise": True})
    assert time.monotonic() - began < 20
    assert told.error is not None
    assert told.error.startswith("process 1 ended with 1")
    assert "no such device" in told.error
    assert "child 0" in told.error
    assert "waits_for_ever" in told.error  # where the other stood
    assert [len(results) for results in told.results] == [1, 1]


def test_the_limit_ends_all_and_says_where_they_stood(tmp_path: Path) -> None:
    told = run(tmp_path, {"sleep": 60}, {}, limit_s=3.0)
    assert told.error is not None
    assert told.error.startswith("processes [0] were not done after 3 s")
    assert "waits_for_ever" in told.error
    assert [len(results) for results in told.results] == [1, 2]
