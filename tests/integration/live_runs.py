"""Runs `vime run` in a process of its own, as a user does, and reads what it left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import yaml

from vime.observe.jsonl import Row, read_rows, reproducible
from vime.testing.tiny_models import make_tiny_qwen3

HERE = Path(__file__).parent
SHARED_MEMORY = Path("/dev/shm")


def write_run(folder: Path, **sections: Any) -> Path:
    """A run file with a random tiny model and 40 prompts; `sections` are merged over the defaults."""
    model = folder / "model"
    if not model.exists():
        make_tiny_qwen3(model, seed=1)
        lines = [json.dumps({"prompt": f"{n} + {n % 7} =", "label": str(n + n % 7)}) for n in range(40)]
        (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    run: dict[str, Any] = {
        "run": {"dir": str(folder / "run"), "seed": 3},
        "model": {"path": str(model)},
        "topology": "cpu-colocate",
        "data": {"path": str(folder / "prompts.jsonl")},
        "rollout": {"batch_size": 8, "group_size": 4, "sampling": {"max_response_tokens": 8}},
        "reward": {"kind": "graders:digits"},
        "algorithm": {"kind": "grpo", "loss_mean": "token", "entropy_coef": 0.01},
        "trainer": {"optimizer": {"lr": 3e-3, "betas": [0.9, 0.95]}},
        "schedule": {"num_steps": 6},
        "observe": {"tensorboard": False},
    }
    for name, section in sections.items():
        run[name] = {**run[name], **section} if isinstance(section, dict) and isinstance(run.get(name), dict) else section
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(run))
    return path


def environment(**extra: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE), "PYTHONUNBUFFERED": "1", **extra}


def start(path: Path, *words: str, **env: str) -> subprocess.Popen[str]:
    """Start `vime run`; its output goes to `<folder>/out.log`."""
    with (path.parent / "out.log").open("a") as log:
        command = [sys.executable, "-m", "vime.cli.main", "run", "--platform", "cpu", str(path), *words]
        return subprocess.Popen(
            command, env=environment(**env), stdout=log, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )


def finish(process: subprocess.Popen[str], path: Path, *, timeout_s: float = 150.0) -> None:
    """Wait for a run that must succeed."""
    try:
        code = process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(30)
        raise
    assert code == 0, (path.parent / "out.log").read_text()[-4000:]


def run(path: Path, *words: str, **env: str) -> None:
    finish(start(path, *words, **env), path)


def rows(folder: Path) -> list[Row]:
    return list(read_rows(folder / "metrics.jsonl"))


def steps(folder: Path) -> dict[int, Row]:
    return {row.step: row for row in rows(folder) if row.kind == "step"}


def comparable(folder: Path) -> list[dict[str, Any]]:
    """Everything that two equal runs share."""
    return [content for row in rows(folder) if (content := reproducible(row)) is not None]


def wait_for(condition: Callable[[], Any], *, timeout_s: float, what: str) -> Any:
    """Poll until the condition gives something true."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.02)
    raise AssertionError(f"{what} did not happen within {timeout_s:.0f} s")


def reached(folder: Path, step: int) -> bool:
    """The row of `step` is written."""
    return (folder / "metrics.jsonl").exists() and step in steps(folder)


def descendants(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def segments(processes: list[psutil.Process]) -> set[Path]:
    """Shared-memory files that these processes map or made: a vime file carries its maker's process id in its name."""
    mapped = {Path(m.path) for p in processes for m in _maps(p) if m.path.startswith(f"{SHARED_MEMORY}/")}
    makers = {str(process.pid) for process in processes}
    made = {path for path in SHARED_MEMORY.glob("vime-*") if makers & set(path.name.split("-"))}
    return {path for path in mapped | made if path.exists()}


def _maps(process: psutil.Process) -> list[Any]:
    try:
        return process.memory_maps()
    except psutil.Error:
        return []


def alive(processes: list[psutil.Process]) -> Iterator[str]:
    """Those that still run; a zombie has ended."""
    for process in processes:
        try:
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                yield f"{process.pid} {process.name()} {' '.join(process.cmdline())[:120]}"
        except psutil.NoSuchProcess:
            continue
