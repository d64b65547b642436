"""CPU seconds and wall time per GRPO step: vime's processes all together, beside TRL in one process.

Prints one JSON document. Each variant is run once, in turn, first steps left out; a ratio counts only inside one call.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from pathlib import Path

from async_ratio import ROOT, watch


def vime_steps(config: Path, steps: int, *words: str) -> dict[str, float]:
    """All processes of a run together."""
    seen = watch(config, steps, words)
    return {"steps": steps, "wall_s": seen.wall_s / steps, "cpu_s": sum(seen.cpu_s.values()) / steps}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, default=ROOT / "examples" / "quickstart" / "run.yaml")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--trl-python", type=Path)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="for every vime variant")
    parser.add_argument("--trl", action="append", default=[], metavar="FLAG=VALUE", help="for trl_steps.py")
    args = parser.parse_args()
    result: dict[str, dict[str, float]] = {
        "vime": vime_steps(args.config, args.steps, *args.set),
        "vime, flat groups trained": vime_steps(args.config, args.steps, "algorithm.flat_groups=train", *args.set),
        "vime, one step ahead": vime_steps(
            args.config, args.steps, "topology=cpu-one-ahead", "schedule.max_staleness=1", *args.set
        ),
    }
    if args.trl_python:
        from vime.config.load import load_config

        config = load_config(args.config, overrides=args.set).config
        for threads in (1, 2):
            command = [
                args.trl_python,
                ROOT / "bench" / "trl_steps.py",
                "--model",
                config.model.path,
                "--prompts",
                config.data.path,
            ]
            command += [
                "--threads",
                str(threads),
                "--steps",
                str(args.steps),
                *(w for f in args.trl for w in f"--{f}".split("=")),
            ]
            env = {**os.environ, "OMP_NUM_THREADS": str(threads)}
            done = subprocess.run([str(w) for w in command], check=True, capture_output=True, text=True, env=env)
            result[f"trl, {threads} threads"] = json.loads(done.stdout.strip().splitlines()[-1])
        cpu = min(result[f"trl, {n} threads"]["cpu_s"] for n in (1, 2))
        wall = min(result[f"trl, {n} threads"]["wall_s"] for n in (1, 2))
        result["ratios"] = {
            "cpu": result["vime"]["cpu_s"] / cpu,
            "cpu, flat groups trained": result["vime, flat groups trained"]["cpu_s"] / cpu,
            "wall, one step ahead": result["vime, one step ahead"]["wall_s"] / wall,
            "wall, flat groups trained": result["vime, flat groups trained"]["wall_s"] / wall,
        }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
