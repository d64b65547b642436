"""Wall time of a fully asynchronous run beside the synchronous one of the same work: same steps, batch, lengths and devices.

Runs come in pairs, close together and in alternating order, because a machine's other load changes. The first steps of each run
are left out. Prints one JSON document: seconds a step of every run, the ratio of each pair, their median and spread, and how
many processors each side used. `--baseline ahead` compares with a run that is as far ahead and drains its engines for every
update, so that only what updates in flight bring is left.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
VIME = Path(sys.executable).with_name("vime")
FIRST = 5
ASYNC = ("weights.update=in_flight",)
BASELINES = {
    "sync": ("schedule.max_staleness=0", "weights.update=drain"),
    "ahead": ("weights.update=drain",),
}


def side(process: psutil.Process) -> str:
    words = " ".join(process.cmdline())
    if "TrainerProcess" in words:
        return "trainer"
    if "api_server" in words or "VLLM" in words or "EngineCore" in words or "EngineProcess" in words:
        return "engines"
    return "rollout worker" if "RolloutProcess" in words else "router" if "vllm-router" in words else "driver and Ray"


def cpu_seconds(root: int) -> dict[str, float]:
    """User and system seconds by side of everything below a driver, itself included."""
    found: defaultdict[str, float] = defaultdict(float)
    for process in [psutil.Process(root), *psutil.Process(root).children(recursive=True)]:
        try:
            times = process.cpu_times()
            found[side(process)] += times.user + times.system
        except psutil.Error:
            continue
    return found


def following(path: Path, run: subprocess.Popen[bytes]) -> Iterator[dict[str, Any]]:
    """Rows as they are written, until the run has ended. A line counts when it is whole."""
    while not path.exists():
        if run.poll() is not None:
            return
        time.sleep(0.05)
    begun = ""
    with path.open() as file:
        while True:
            ended = run.poll() is not None
            *whole, begun = (begun + file.read()).split("\n")
            yield from map(json.loads, whole)
            if ended:
                return
            time.sleep(0.005)


@dataclass(frozen=True)
class Watched:
    """Metrics of each step after `FIRST`, and what passed between the row of that step and the last one's."""

    rows: Sequence[Mapping[str, float]]
    wall_s: float
    cpu_s: Mapping[str, float]


def watch(config: Path, steps: int, words: Sequence[str]) -> Watched:
    """One run of `FIRST` steps, `steps` that are looked at, and one more, so that its end counts in none."""
    folder = Path(tempfile.mkdtemp(prefix="vime-bench-"))
    last = FIRST + steps
    settings = [f"run.dir={folder / 'run'}", f"schedule.num_steps={last + 1}", "evaluation.sets=[]", "checkpoint.last=false"]
    with (folder / "log").open("w") as log:
        command = [VIME, "run", "--platform", "cpu", config, *settings, *words]
        run = subprocess.Popen([str(w) for w in command], stdout=log, stderr=log)
    seen: dict[int, tuple[float, dict[str, float]]] = {}
    rows: dict[int, Mapping[str, float]] = {}
    metrics = folder / "run" / "metrics.jsonl"
    for row in following(metrics, run):
        if row["kind"] == "step":
            rows[row["step"]] = row["metrics"]
            if row["step"] in (FIRST, last):
                seen[row["step"]] = (row["time"], cpu_seconds(run.pid))
    if run.returncode or len(seen) < 2:
        sys.exit((folder / "log").read_text()[-3000:])
    shutil.rmtree(folder)
    (t0, c0), (t1, c1) = seen[FIRST], seen[last]
    return Watched(
        [rows[step] for step in range(FIRST + 1, last + 1)],
        t1 - t0,
        {name: spent - c0.get(name, 0.0) for name, spent in c1.items()},
    )


def summary(watched: Watched) -> dict[str, Any]:
    rows, wall_s = watched.rows, watched.wall_s
    third = max(1, len(rows) // 3)
    reward = [row["rollout/raw_reward"] for row in rows]
    return {
        "step_s": wall_s / len(rows),
        "load": os.getloadavg()[0],
        "response_tokens_per_step": statistics.mean(row["rollout/response_tokens"] for row in rows),
        "processors": {name: round(seconds / wall_s, 3) for name, seconds in sorted(watched.cpu_s.items())},
        "staleness_max": max(row["rollout/staleness/max"] for row in rows),
        "mixed_versions": statistics.mean(row["rollout/mixed_versions"] for row in rows),
        "reward_first_third": statistics.mean(reward[:third]),
        "reward_last_third": statistics.mean(reward[-third:]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Wall time of a fully asynchronous run beside the synchronous one.")
    parser.add_argument("--config", type=Path, default=ROOT / "examples" / "quickstart" / "async.yaml")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--baseline", choices=sorted(BASELINES), default="sync")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="for both runs of a pair")
    args = parser.parse_args()
    variants = {args.baseline: BASELINES[args.baseline], "in_flight": ASYNC}
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in variants}
    for pair in range(args.pairs):
        for name in list(variants) if pair % 2 == 0 else reversed(list(variants)):
            runs[name].append(summary(watch(args.config, args.steps, [*args.set, *variants[name]])))
            print(f"pair {pair + 1}, {name}: {runs[name][-1]['step_s']:.3f} s a step", file=sys.stderr)
    ratios = [base["step_s"] / ahead["step_s"] for base, ahead in zip(runs[args.baseline], runs["in_flight"], strict=True)]
    result = {
        "processors_of_machine": len(os.sched_getaffinity(0)),
        "runs": runs,
        "ratios": ratios,
        "ratio": {"median": statistics.median(ratios), "least": min(ratios), "most": max(ratios)},
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
