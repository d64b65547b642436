"""What every algorithm learns on the quick start: one `vime run` each, from one warm model, by the settings of its paper.

A case has learned when its score on the held-out questions rose by more than two standard errors of the difference of two
such scores. Cases are named on the command line or all run in turn; results are merged into one JSON file, so that cases may be
measured by several calls, also at once. Prints a Markdown table of all that are in the file and ends with 1 where one of the
called cases failed or did not learn.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import runpy
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from vime.benchmarks.record import Record, command
from vime.observe.jsonl import RowKind
from vime.observe.metrics import DIFF, DIFF_MAX, REWARD
from vime.observe.summary import RunRecord, finite, load_run, loop_seconds, mean

ROOT = Path(__file__).resolve().parents[1]
QUICKSTART = Path("examples") / "quickstart"
RUNS = Path("runs") / "algorithms"
RESULTS = ROOT / "bench" / "results" / "cpu" / "algorithms.json"
STANDARD_ERRORS = 2.0
ENDS = 10
"""Steps at the start and at the end over which a metric is averaged."""

UPDATES = ("trainer.updates_per_step=2", "trainer.optimizer.lr=1.0e-4", "algorithm.old_log_probs=recompute")
"""Two updates a batch, so that the ratio leaves 1 and clips bind, at half the rate: as far a step as with one update. The old
policy is the trainer's before the step, so that what is measured against the sampler is not the step's own way.
"""
AHEAD = ("topology=cpu-one-ahead", "schedule.max_staleness=1", *UPDATES)


@dataclass(frozen=True)
class Case:
    """One row: overrides of a run file of the quick start, the held-out score, and further metrics to keep."""

    words: tuple[str, ...] = ()
    file: str = "run.yaml"
    score: str = "sampled"
    watch: tuple[str, ...] = ()
    after: str | None = None
    """A case whose model this one needs."""


CASES = {
    "grpo": Case(),
    "dr_grpo": Case(("algorithm.normalize_std=false", "algorithm.loss_mean=constant", "algorithm.loss_tokens=8")),
    "dapo": Case(
        (
            "algorithm.clip_high=0.28",
            "algorithm.overlong={max_tokens: 8, buffer_tokens: 4, penalty: 1.0}",
            "rollout.filter=nonzero_std",
            *UPDATES,
        ),
        watch=("train/pg_clipfrac",),
    ),
    "gspo": Case(
        (
            "algorithm.kind=gspo",
            "algorithm.clip_low=3.0e-4",
            "algorithm.clip_high=4.0e-4",
            "algorithm.loss_mean=rollout",
            *UPDATES,
        ),
        watch=("train/pg_clipfrac",),
    ),
    "cispo": Case(
        ("algorithm.kind=cispo", "algorithm.clip_low=1.0", "algorithm.clip_high=4.0", *UPDATES), watch=("train/pg_clipfrac",)
    ),
    "rloo": Case(("algorithm.kind=rloo", "algorithm.loss_mean=constant", "algorithm.loss_tokens=8")),
    "reinforce_plus_plus": Case(
        (
            "algorithm.kind=reinforce_plus_plus",
            "algorithm.kl={coef: 0.001, estimator: k1, use: reward}",
            "topology=colocate-reference",
            *UPDATES,
        ),
        watch=("rollout/kl",),
    ),
    "reinforce_plus_plus_baseline": Case(
        (
            "algorithm.kind=reinforce_plus_plus_baseline",
            "algorithm.kl={coef: 0.001, estimator: k2}",
            "topology=colocate-reference",
            *UPDATES,
        ),
        watch=("rollout/kl",),
    ),
    "ppo": Case(
        (
            "algorithm.kind=ppo",
            "algorithm.critic={optimizer: {lr: 1.0e-3, betas: [0.9, 0.99]}, warmup_steps: 10}",
            "topology=colocate-critic",
            *UPDATES,
        ),
        watch=("train/critic-value_loss", "train/critic-explained_variance"),
    ),
    "distill": Case(
        ("algorithm.kind=distill", f"model.teacher={RUNS / 'grpo' / 'model'}", "topology=colocate-teacher"),
        watch=("rollout/opd_reverse_kl",),
        after="grpo",
    ),
    "sft": Case(
        (
            "model.path=runs/quickstart/warm-model",
            "schedule.stop_when=null",
            "evaluation={every: 0, at_start: true}",
            "trainer.optimizer.lr=5.0e-4",
        ),
        file="sft.yaml",
        score="exact_match",
        watch=("train/loss",),
    ),
    "grpo, token weights, one step ahead": Case(
        (*AHEAD, "algorithm.correction={level: token, high: 2.0}"),
        watch=("train/rollout_corr/rollout_is_mean", "train/tis_clipfrac", "rollout/staleness/mean"),
    ),
    "grpo, rejections, one step ahead": Case(
        (*AHEAD, "algorithm.correction={reject: [{statistic: token_k1, high: 2.0}, {statistic: seq_mean_k1, high: 1.2}]}"),
        watch=("train/rollout_corr/rollout_rs_masked_fraction", "rollout/staleness/mean"),
    ),
}


def measure(name: str, case: Case, steps: int) -> dict[str, Any]:
    """Train one case from the warm model."""
    folder = RUNS / name.replace(", ", "-").replace(" ", "-")
    words = [f"run.dir={folder}", f"schedule.num_steps={steps}", *case.words]
    told = ["run", "--platform", "cpu", str(QUICKSTART / case.file), *words]
    shutil.rmtree(folder, ignore_errors=True)
    began = time.perf_counter()
    ended = command([sys.executable, "-m", "vime.cli.main", *told], limit_s=1200)
    found: dict[str, Any] = {"ok": ended.code == 0, "command": ["vime", *told], "wall_s": round(time.perf_counter() - began, 1)}
    if not found["ok"]:
        tail = [line.replace(str(ROOT), ".") for line in ended.told()["tail"]]
        return {**found, "exit_code": ended.code, "tail": tail}
    return {**found, **learned(load_run(folder), case)}


def learned(record: RunRecord, case: Case) -> dict[str, Any]:
    """What a finished run shows; `gain_standard_errors` is the rise of the score in units of its own error."""
    held_out = yaml.safe_load(record.config_text)["evaluation"]["sets"][0]
    before, after = scores(record, f"eval/{held_out['name']}/{case.score}")
    error = math.sqrt((before * (1 - before) + after * (1 - after)) / held_out["num_rows"])
    gain = after - before
    return {
        "steps": len(record.steps),
        "held_out": {
            "score": case.score,
            "questions": held_out["num_rows"],
            "before": before,
            "after": after,
            "gain_standard_errors": round(gain / error, 2) if error else 0.0,
        },
        "learned": gain > STANDARD_ERRORS * error,
        "raw_reward": ends(record, REWARD),
        "log_prob_diff": {"largest_step_mean": largest(record, DIFF), "largest_token": largest(record, DIFF_MAX)},
        "watched": {name: ends(record, name) for name in case.watch},
        "step_s": loop_seconds(record)["step_median"],
    }


def scores(record: RunRecord, metric: str) -> tuple[float, float]:
    """A score before the first step and after the last one."""
    values = {row.step: row.metrics[metric] for row in record.of_kind(RowKind.EVAL)}
    before, after = values[0], values[record.steps[-1].step]
    assert before is not None
    assert after is not None
    return before, after


def ends(record: RunRecord, name: str) -> dict[str, float | None]:
    """Means of a metric over the first and over the last steps that have it."""
    values = finite(value for _, value in record.series(name))
    return {f"first{ENDS}": mean(values[:ENDS]), f"last{ENDS}": mean(values[-ENDS:])}


def largest(record: RunRecord, name: str) -> float | None:
    return max(finite(value for _, value in record.series(name)), default=None)


def prepare() -> None:
    """The data and the warm model of the quick start, unless they are there."""
    quickstart = runpy.run_path(str(QUICKSTART / "quickstart.py"))
    quickstart["WORK"].mkdir(parents=True, exist_ok=True)
    quickstart["prepare"]()


def table(parts: dict[str, Any]) -> str:
    """Markdown."""
    lines = ["| case | held-out, before and after | reward, first and last 10 steps | largest log-prob difference | learned |"]
    lines.append("|---|---|---|---|---|")
    for name, part in parts.items():
        if not part["ok"]:
            lines.append(f"| {name} | failed | | | no |")
            continue
        held_out, reward = part["held_out"], part["raw_reward"].values()
        diff = part["log_prob_diff"]["largest_step_mean"]
        rewards = " ".join(f"{value:.3f}" for value in reward if value is not None)
        cells = [f"{held_out['before']:.3f} {held_out['after']:.3f}", rewards, "" if diff is None else f"{diff:.1e}"]
        lines.append(f"| {name} | {' | '.join(cells)} | {'yes' if part['learned'] else 'no'} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="What every algorithm learns on the quick start.", allow_abbrev=False)
    parser.add_argument("--only", action="append", choices=list(CASES), help="this case; may be given several times")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    out = args.out.resolve()
    os.chdir(ROOT)
    prepare()
    good = True
    for name in args.only or CASES:
        case = CASES[name]
        if case.after and not (RUNS / case.after / "model").exists():
            parser.error(f"{name} learns from the model of {case.after}: measure that first")
        found = measure(name, case, args.steps)
        record = Record(out, "cpu")  # read now: another call may have added its cases meanwhile
        parts = {**record.parts, name: found}
        record.parts = {known: parts[known] for known in CASES if known in parts}
        record.save()
        good = good and found["ok"] and found["learned"]
        print(f"{name}: {json.dumps(found)}", file=sys.stderr, flush=True)
    print(table(json.loads(out.read_text())["parts"]))
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
