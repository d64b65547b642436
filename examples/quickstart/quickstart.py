"""The quick start from an empty machine: install, make data, warm up, train, evaluate, report. Standard library only."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
WORK = ROOT / "runs" / "quickstart"
VIME = ROOT / ".venv" / "bin" / "vime"


def call(*words: str | Path) -> None:
    """Run one command in the repository; the first that fails ends the quick start with its exit code."""
    done = subprocess.run([str(w) for w in words], cwd=ROOT, env={**os.environ, "PYTHONUNBUFFERED": "1"}, check=False)
    if done.returncode:
        sys.exit(done.returncode)


def prepare() -> None:
    """Make the data and the warm model unless an earlier call did. A half-made folder is never taken for a finished one."""
    if not (WORK / "data" / "eval.jsonl").exists():
        making = WORK / "data.making"
        settings = ("min_terms=2", "max_terms=2", "min_digits=1", "max_digits=2", "allow_negation=false")
        words = ["reasoning_gym:chain_sum", "--n", "60000", "--seed", "7", "--split", "eval=1500,sft=6000,rl", "--out", making]
        call(VIME, "data", "make", *words, *(word for setting in settings for word in ("--config", setting)))
        shutil.rmtree(WORK / "data", ignore_errors=True)
        making.rename(WORK / "data")
    if not (WORK / "warm-model" / "model.safetensors").exists():
        shutil.rmtree(WORK / "tiny-model", ignore_errors=True)
        call(VIME, "data", "tiny-model", "--out", WORK / "tiny-model", "--prompts", WORK / "data" / "sft.jsonl")
        shutil.rmtree(WORK / "sft", ignore_errors=True)
        call(VIME, "run", "--platform", "cpu", HERE / "sft.yaml")
        (WORK / "sft" / "model").rename(WORK / "warm-model")


def last_line(report: dict, seconds: float) -> str:
    """The summary: accuracy before and after, from the report of the RL run."""
    modes = report["eval"]["held-out"]
    sampled, greedy = modes["sampled"], modes["greedy"]
    return (
        f"quickstart: held-out accuracy {sampled['first']:.3f} -> {sampled['last']:.3f} (sampled), "
        f"{greedy['first']:.3f} -> {greedy['last']:.3f} (greedy) in {report['steps']} steps, {seconds:.0f} s; "
        f"report {WORK / 'rl' / 'report.html'}"
    )


def main() -> None:
    start = time.perf_counter()
    call("make", "--no-print-directory", "install", f"PYTHON={sys.executable}")
    installed = time.perf_counter()
    print(f"quickstart: installation {installed - start:.0f} s", flush=True)
    WORK.mkdir(parents=True, exist_ok=True)
    prepare()
    prepared = time.perf_counter()
    print(f"quickstart: data and warm model {prepared - installed:.0f} s", flush=True)
    shutil.rmtree(WORK / "rl", ignore_errors=True)
    call(VIME, "run", "--platform", "cpu", HERE / "run.yaml")
    call(VIME, "report", WORK / "rl")
    text = subprocess.run(
        [str(VIME), "report", str(WORK / "rl"), "--json"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    print(last_line(json.loads(text.stdout), time.perf_counter() - start), flush=True)


if __name__ == "__main__":
    main()
