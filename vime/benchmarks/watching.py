"""Runs `vime run` as a child, watches it from outside and says what it left: rows, device memory, the ends of its logs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from vime.benchmarks.record import TAIL_LINES, vime
from vime.types import PolicyVersion

LOOK_S = 0.25
"""Between two looks at the device."""

Row = Mapping[str, Any]
UsedGib = Callable[[], float]


@dataclass
class Watch:
    """A running driver. `memory` is (seconds since the start, GiB in use) of the first device; empty where nobody counts it."""

    process: subprocess.Popen[str]
    folder: Path
    began: float = field(default_factory=time.time)
    memory: list[tuple[float, float]] = field(default_factory=list)
    _stopped: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    @property
    def run_dir(self) -> Path:
        return self.folder / "run"

    def now(self) -> float:
        """Seconds since the start."""
        return time.time() - self.began

    def rows(self, *kinds: str) -> list[Row]:
        """What the run has written so far, of these kinds (none given: of all). A torn last line is left out."""
        path = self.run_dir / "metrics.jsonl"
        if not path.exists():
            return []
        found: list[Row] = []
        for line in path.read_text().splitlines():
            with suppress(ValueError):
                found.append(json.loads(line))
        return [row for row in found if not kinds or row["kind"] in kinds]

    def events(self) -> list[Row]:
        """Rows of kind event with `t`, seconds since the start."""
        return [{"t": self.at(row), **row["data"]} for row in self.rows("event")]

    def at(self, row: Row) -> float:
        return round(row["time"] - self.began, 3)

    def follow(self, open_device: Callable[[], UsedGib | None]) -> None:
        """Begin to look at the device; `open_device` runs in a thread of its own, because it may take seconds."""
        thread = threading.Thread(target=self._look, args=(open_device,), daemon=True)
        thread.start()
        self._threads.append(thread)

    def _look(self, open_device: Callable[[], UsedGib | None]) -> None:
        used = open_device()
        while used is not None and not self._stopped.wait(LOOK_S):
            self.memory.append((round(self.now(), 2), used()))

    def descendants(self) -> list[psutil.Process]:
        try:
            return psutil.Process(self.process.pid).children(recursive=True)
        except psutil.Error:
            return []

    def wait(self, deadline: float, until: Callable[[], bool] = lambda: False) -> bool:
        """Poll until the run has ended or `until()` holds. False where `deadline` (of `time.monotonic`) came first."""
        while self.process.poll() is None and not until():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True

    def finish(self, deadline: float) -> str:
        """Wait for the end, which is brought about at the deadline; returns how it ended: `exit code 0`."""
        how = f"exit code {self.process.returncode}" if self.wait(deadline) else f"stopped after {self.now():.0f} s"
        if self.process.poll() is None:
            self._stacks()
            self.end()
        else:
            how = f"exit code {self.process.returncode}"
        return how

    def end(self) -> None:
        """Stop what still runs: politely, then by force (the guardians of its children end with it)."""
        self._stopped.set()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(40)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(10)
        for thread in self._threads:
            thread.join(5)

    def _stacks(self) -> None:
        """Have every Python process below the driver print its stacks: they run with PYTHONFAULTHANDLER."""
        for child in self.descendants():
            with suppress(psutil.Error):
                if "python" in child.name() or child.name().startswith(("ray::", "VLLM")):
                    child.send_signal(signal.SIGABRT)
        time.sleep(2)

    def output(self) -> str:
        """What the driver printed."""
        path = self.folder / "driver.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def tails(self) -> dict[str, list[str]]:
        """The last lines of the driver, the engines, the router, and of Ray's processes."""
        files = [self.folder / "driver.log", *sorted((self.run_dir / "logs").rglob("*"))]
        return {f.name: f.read_text(errors="replace").splitlines()[-TAIL_LINES:] for f in files if f.is_file()}


def start(path: Path, *words: str, platform: str, env: Mapping[str, str] | None = None) -> Watch:
    """Start `vime run` on a run file whose `run.dir` is the folder `run` beside it; its output goes to `driver.log` there."""
    folder = path.parent
    surroundings = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", **(env or {})}
    with (folder / "driver.log").open("w") as log:
        command = [str(word) for word in vime("run", "--platform", platform, path, *words)]
        process = subprocess.Popen(
            command, env=surroundings, stdin=subprocess.DEVNULL, stdout=log, stderr=log, text=True, start_new_session=True
        )
    return Watch(process, folder)


def device_counter(platform_name: str) -> UsedGib | None:
    """Reads the memory in use of the first device as its driver counts it, this process's own context included.

    None on a platform whose devices are slots of the host: there the machine's memory is everybody's.
    """
    from vime.benchmarks.rank import ask_platform

    asked = ask_platform(platform_name)
    if asked.inventory.virtual:
        return None
    runtime = asked.platform.trainer_runtime(asked.request).bootstrap.build()
    runtime.set_device(0)

    def used_gib() -> float:
        memory = runtime.memory()
        return round((memory["total"] - memory["free"]) / 2**30, 3)

    return used_gib


def thinned(samples: Sequence[tuple[float, float]], by_gib: float = 0.2) -> list[tuple[float, float]]:
    """Where the memory in use changed by more than `by_gib`."""
    kept: list[tuple[float, float]] = []
    for sample in samples:
        if not kept or abs(sample[1] - kept[-1][1]) > by_gib:
            kept.append(sample)
    return kept


def used_at(samples: Sequence[tuple[float, float]], t: float) -> float | None:
    """GiB in use at the look nearest to `t`; None where nobody looked within a second."""
    near = min(samples, key=lambda sample: abs(sample[0] - t), default=None)
    return None if near is None or abs(near[0] - t) > 1.0 else near[1]


def staleness(row: Row) -> dict[str, Any]:
    """How far the groups of a step's row lag behind, in steps: mean, largest, and how many by how far.

    A row has the versions of its groups and their mean, which give the counts where there are at most two versions.
    """
    metrics, data = row["metrics"], row.get("data", {})
    behind = sorted({row["step"] - 1 - PolicyVersion.parse(version).step for version in data.get("versions", ())})
    mean, groups = metrics.get("rollout/staleness/mean"), len(data.get("groups", ()))
    counts = {behind[0]: groups} if len(behind) == 1 else None
    if len(behind) == 2 and mean is not None:
        low, high = behind
        further = round(groups * (mean - low) / (high - low))
        counts = {low: groups - further, high: further}
    return {"mean": mean, "max": metrics.get("rollout/staleness/max"), "groups_by_steps": counts}


# ---- engines


@dataclass(frozen=True)
class EngineFamily:
    """An engine server below a driver and the process that holds its device."""

    server: psutil.Process
    core: psutil.Process
    url: str


def engine_families(watch: Watch) -> Iterator[EngineFamily]:
    """Engines that run now. A server is known by vime's gate on its command line, its core by the pid in its own log."""
    cores = set(core_pids(watch.run_dir / "logs"))
    for process in watch.descendants():
        with suppress(psutil.Error):
            words = process.cmdline()
            if "vime.weights.gate.Gate" not in words or any(word.endswith("guardian.py") for word in words):
                continue
            port = words[words.index("--port") + 1]
            below = process.children(recursive=True)
            named = [child for child in below if child.name().startswith("VLLM::Engine")]
            inner = [child for child in below if child.pid in cores] or named
            if inner:
                yield EngineFamily(process, inner[-1], f"http://127.0.0.1:{port}")


def core_pids(logs: Path) -> Iterator[int]:
    """Pids that engines' logs give as their cores', oldest first."""
    for path in sorted(logs.glob("engine-*.log")):
        for line in path.read_text(errors="replace").splitlines():
            head, found, rest = line.partition("(EngineCore")
            pid = rest.partition("pid=")[2].partition(")")[0]
            if found and not head and pid.isdigit():
                yield int(pid)
