"""`vime bench step`: GRPO steps of `vime run` on random weights, trainer and engines on the devices of one node.

Roles take turns on shared devices, in each residency, or have devices of their own. For each run: seconds by phase and bytes by
tag at each edge as the run logs them, losses, staleness, the rate and the probe of every publication, how far the trainer's and
the engines' log-probs are apart in each step, the device's memory as its driver counts it, and what the plan said beside that.
`--drill` runs the drills of `drills.py` in place of it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from vime.benchmarks import predicted, watching
from vime.benchmarks.engines import Clock, Here, look, model_of, open_record
from vime.benchmarks.layouts import ACTOR, Layout, add_layout_arguments, layout_of, topology
from vime.benchmarks.record import command, vime
from vime.benchmarks.shapes import write_prompts

LOSSES = ("loss", "grad_norm")
DIFFERENCES = ("train/train_rollout_logprob_abs_diff", "train/train_rollout_logprob_abs_diff_max")
RESIDENCIES = ("park", "resident", "auto")
DRILLS = ("negative", "kill")
LEFT_TO_END_S = 60.0
"""Kept of the limit for ending a run that must be stopped."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--drill", nargs="+", choices=DRILLS, default=(), help="plant faults and kill an engine instead of measuring")
    add("--dtype", help="of model and training (the platform's)")
    add(
        "--residency",
        nargs="+",
        choices=RESIDENCIES,
        default=["park", "resident"],
        help="where shared, in turn (park resident)",
    )
    add_layout_arguments(parser)
    add("--steps", type=int, default=3, help="steps of a run (3)")
    add("--batch", type=int, default=8, help="prompts a step (8)")
    add("--group", type=int, default=4, help="responses to a prompt (4)")
    add("--prompt", type=int, default=32, help="words of a prompt, each a token of a model with random weights (32)")
    add("--response", type=int, help="longest response in tokens (64; in a drill 512)")
    add("--micro-batch", type=int, default=4096, help="trainer.max_tokens_per_micro_batch (4096)")
    add("--recompute", default=None, help="trainer.recompute (vime's default)")
    add("--lr", type=float, default=1e-5)
    add("--kv-gib", type=float, default=4, help="the engine's cache; a host keeps its own (4)")
    add("--utilization", type=float, default=0.2, help="of the device, free when the engine starts (0.2)")
    add("--graphs", action="store_true", help="let the engine compile and capture graphs")
    add("--start-limit", type=float, default=150.0, metavar="S", help="seconds for each part of a run to start (150)")
    add("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE", help="a value of the run file")
    add("--models", type=Path, default=Path(tempfile.gettempdir()) / "vime-models", metavar="DIR", help="random weights")


def run(args: argparse.Namespace) -> int:
    """Measure, or drill; 1 where a part failed."""
    if args.drill:
        from vime.benchmarks.drills import run_drills

        return run_drills(args)
    args.response = args.response or 64
    bench = Bench(args, look(args), Clock(args.limit))
    record = open_record(args, "step")
    for residency in args.residency if bench.layout.shared else [args.layout]:
        record.run(residency, lambda r=residency: bench.measure(r))
    print("\n".join(report(record.parts)))
    return 0 if record.ok else 1


class Bench:
    """Makes run files of one shape on this machine and starts them. The whole of it ends with the clock."""

    def __init__(self, args: argparse.Namespace, here: Here, clock: Clock) -> None:
        self.args, self.here, self.clock = args, here, clock
        self.layout: Layout = layout_of(args, here.node)

    @property
    def dtype(self) -> str:
        return self.args.dtype or self.here.capabilities.default_dtype

    def measure(self, residency: str) -> dict[str, Any]:
        """One run -> what it left. Raises what a model or a platform that is not there raises."""
        watch = self.start(residency)
        try:
            how = watch.finish(self.deadline())
        finally:
            watch.end()
        found = {"ended": how, "seconds": watch.now(), "layout": self.layout.told(), "max_staleness": self.args.max_staleness}
        found |= {**gathered(watch, shared=self.layout.shared), "predicted": self.compared(watch)}
        found["ok"] = how == "exit code 0" and len(found["steps"]) == self.args.steps
        found |= {} if found["ok"] else {"error": f"the run ended with {how}", "logs": watch.tails(), "kept": str(watch.folder)}
        if found["ok"]:
            shutil.rmtree(watch.folder, ignore_errors=True)
        return found

    def compared(self, watch: watching.Watch) -> Any:
        """`vime plan --compare`: what the plan predicted beside what the rows say; the words of the failure where it fails."""
        args = self.args
        words = vime("plan", "--platform", args.platform, watch.folder / "run.yaml", *args.overrides)
        ended = command([*words, "--compare", watch.run_dir, "--json"], limit_s=60)
        try:
            return json.loads(ended.output)
        except ValueError:
            return ended.told()

    def deadline(self) -> float:
        """Of `time.monotonic`, early enough that a run can still be ended within the limit."""
        return time.monotonic() + self.clock.left() - min(LEFT_TO_END_S, self.clock.limit_s / 5)

    def start(self, residency: str, *, env: Mapping[str, str] | None = None, **sections: Mapping[str, Any]) -> watching.Watch:
        """Start a run in a new folder; `sections` are merged over those of the run file."""
        folder = Path(tempfile.mkdtemp(prefix=f"vime-step-{residency}-"))
        model = model_of(self.args, self.here, self.clock)
        config = json.loads((model / "config.json").read_text())
        prompts = folder / "prompts.jsonl"
        write_prompts(prompts, config["vocab_size"], rows=256, tokens=self.args.prompt)
        settings = self.run_file(residency, folder, model)
        for name, section in sections.items():
            settings[name] = {**settings.get(name, {}), **section}
        path = folder / "run.yaml"
        path.write_text(yaml.safe_dump(settings))
        watch = watching.start(path, *self.args.overrides, platform=self.args.platform, env=env)
        watch.follow(lambda: watching.device_counter(self.args.platform))
        return watch

    def run_file(self, residency: str, folder: Path, model: Path) -> dict[str, Any]:
        args = self.args
        longest = args.prompt * (1 if args.model is None else 8)
        recompute = {} if args.recompute is None else {"recompute": args.recompute}
        return {
            "run": {"dir": str(folder / "run"), "seed": 5},
            "model": {"path": str(model), "dtype": self.dtype},
            "topology": topology(
                self.layout, residency, virtual=self.here.node.virtual, transport=args.transport, rates=args.rate
            ),
            "data": {"path": str(folder / "prompts.jsonl"), "max_prompt_tokens": longest},
            "rollout": {
                "batch_size": args.batch,
                "group_size": args.group,
                "sampling": {"max_response_tokens": args.response},
                "start_timeout_s": args.start_limit,
                "request_timeout_s": 120,
                "vllm": self.engine_args(),
            },
            "reward": {"kind": "vime.benchmarks.even_ids:even"},
            "algorithm": {"kind": "grpo", "loss_mean": "token"},
            "trainer": {
                "optimizer": {"lr": args.lr},
                "max_tokens_per_micro_batch": args.micro_batch,
                "step_timeout_s": 240,
                **recompute,
            },
            "schedule": {"num_steps": args.steps, "max_staleness": args.max_staleness},
            "weights": CHECKS,
            "checkpoint": {"last": False},
            "observe": {"tensorboard": False},
        }

    def engine_args(self) -> dict[str, Any]:
        """The engine's bounds: its cache is set, so that it measures nothing while the trainer is beside it."""
        args = self.args
        if self.here.node.virtual:
            return {}
        bounds = {"kv_cache_memory_bytes": int(args.kv_gib * 2**30), "gpu_memory_utilization": args.utilization}
        return {**bounds, "max_num_seqs": 128, "enforce_eager": not args.graphs}


CHECKS = {"probe": {"every": 1}, "fingerprint": {"first": 1, "every": 0}}
"""Every publication is probed, in phases of its own; digests read all weights once more: the first publication has them."""


# ---- what a run left


def gathered(watch: watching.Watch, *, shared: bool) -> dict[str, Any]:
    """What the rows say, by kind, and the plan beside it."""
    rows = watch.rows()
    found: dict[str, Any] = {"steps": [], "syncs": [], "walls": [], "memory": [], "events": []}
    for row in rows:
        head = {"step": row["step"], "t": watch.at(row)}
        match row["kind"]:
            case "step":
                metrics = {n: v for n, v in row["metrics"].items() if n.startswith(("train/", "rollout/", "perf/"))}
                found["steps"].append({**head, "metrics": metrics, "seconds": row["seconds"], **row.get("data", {})})
            case "sync":
                found["syncs"].append({**head, "metrics": row["metrics"], "seconds": row["seconds"], **rates(row)})
            case "wall":
                found["walls"].append({**head, "seconds": row["seconds"]})
            case "memory":
                found["memory"].append({**head, **row["data"], "device_gib": watching.used_at(watch.memory, head["t"])})
            case "event":
                found["events"].append({**head, **row["data"], "seconds": row["seconds"]})
    found["log_prob_differences"] = [[s["metrics"].get(name) for name in DIFFERENCES] for s in found["steps"]]
    found["losses"] = [{"step": s["step"], **{n: s["metrics"].get(f"train/{n}") for n in LOSSES}} for s in found["steps"]]
    found["staleness"] = [watching.staleness(row) for row in watch.rows("step")]
    return found | _beside_the_plan(watch, rows, shared=shared)


def rates(row: Mapping[str, Any]) -> dict[str, float]:
    """GB/s of a publication: what an engine received over the seconds of its update, over the whole of it, and over all of it
    but `hold`, in which engines finish what they were asked for.
    """
    nbytes, seconds = row["metrics"].get("perf/update_weights_wire_bytes", 0.0), row["seconds"]
    whole = seconds["sync"]
    spans = {"update": seconds.get("sync/update", 0.0), "whole": whole, "without_hold": whole - seconds.get("sync/hold", 0.0)}
    return {f"{name}_gb_per_s": nbytes / span / 1e9 for name, span in spans.items() if span > 0}


def _beside_the_plan(watch: watching.Watch, rows: Sequence[watching.Row], *, shared: bool) -> dict[str, Any]:
    """The transport, and the first device's memory beside what the plan has there: all roles, or the trainer alone."""
    found: dict[str, Any] = {"useful_share": predicted.useful_share(rows)}
    if watch.memory:
        peak = max(used for _, used in watch.memory)
        found["device_used_gib"] = {"peak": peak, "samples": watching.thinned(watch.memory)}
    plan_file = watch.run_dir / "plan.json"
    if plan_file.exists():
        found["plan"] = plan = json.loads(plan_file.read_text())
        found["transport"] = plan["transport"]["protocol"] if plan.get("transport") else None
        there = [row for row in plan["memory"]["rows"] if shared or row["role"] == ACTOR]
        since_epoch = [(watch.began + t, used) for t, used in watch.memory]
        found["device_gib_by_phase"] = predicted.device_by_phase({"memory": {"rows": there}}, rows, since_epoch)
    return found


# ---- the table


def report(parts: Mapping[str, Any]) -> Iterator[str]:
    """A table for each residency; its last line is the ratio to the floor."""
    for name, part in parts.items():
        if "steps" not in part:
            if not part["ok"]:
                yield f"{name} failed: {part.get('error', '')[-600:]}"
            continue
        chosen = part.get("plan", {}).get("residency")
        also = f" ({chosen})" if chosen and chosen != name else ""
        yield f"{name}{also}: {part['ended']} after {part['seconds']:.0f} s, weights by {part.get('transport')}"
        yield from _walls(part)
        yield from _publications(part["syncs"])
        yield from _trained(part)
        yield from _log_probs(part)
        yield from _predicted(part)
        if not part["ok"]:
            yield "  last lines of the driver: " + " | ".join(part["logs"].get("driver.log", [])[-4:])
        elif part["useful_share"] is not None:
            yield f"  generation and training are {part['useful_share']:.3f} of a step's wall time (floor: 1)"


def _walls(part: Mapping[str, Any]) -> Iterator[str]:
    names = ("wall", "generate", "train", "sync", "save", "other")
    yield "  step   " + "".join(f"{name:>10}" for name in names)
    for row in part["walls"]:
        yield f"  {row['step']:<7}" + "".join(f"{row['seconds'].get(name, 0.0):>10.3f}" for name in names)


def _publications(syncs: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for row in syncs:
        parts = ", ".join(f"{n.removeprefix('sync/')} {s:.3f}" for n, s in row["seconds"].items() if n != "sync" and s >= 5e-4)
        probe = row["metrics"].get("sync/probe_abs_diff")
        checked = "not probed" if probe is None else f"probe {probe:.2e}"
        ends = "_gb_per_s"
        gb_s = ", ".join(f"{name.removesuffix(ends)} {value:.3g}" for name, value in row.items() if name.endswith(ends))
        yield f"  publication {row['step']}: {row['seconds']['sync']:.3f} s ({parts}), {checked}; GB/s: {gb_s or 'unknown'}"


def _trained(part: Mapping[str, Any]) -> Iterator[str]:
    for loss, stale in zip(part["losses"], part["staleness"], strict=True):
        numbers = ", ".join(f"{name} {loss[name]:.6g}" for name in LOSSES if loss[name] is not None)
        behind = ", ".join(f"{count} by {steps}" for steps, count in (stale["groups_by_steps"] or {}).items())
        yield f"  step {loss['step']}: {numbers}; groups behind: {behind or stale}"


def _log_probs(part: Mapping[str, Any]) -> Iterator[str]:
    means = [f"{mean:.2e}" for mean, _ in part["log_prob_differences"] if mean is not None]
    if means:
        yield f"  log-probs, trainer to engine, mean difference by step: {', '.join(means)}"
    if "device_used_gib" in part:
        yield f"  device memory, peak of the whole run: {part['device_used_gib']['peak']:.1f} GiB"


def _predicted(part: Mapping[str, Any]) -> Iterator[str]:
    compared = part["predicted"]
    if not isinstance(compared, list):
        yield "  `vime plan --compare` failed: " + " ".join(compared["tail"][-3:])
        compared = []
    yield f"  {'planned beside measured':<40}{'planned':>12}{'measured':>12}{'ratio':>8}"
    for row in compared:
        unit, scale = ("MiB", 2**20) if row["unit"] == "bytes" else (row["unit"], 1)
        yield _line(f"{row['what']}, {unit}", row, scale=scale, note=row["note"])
    for phase, entry in part.get("device_gib_by_phase", {}).items():
        yield _line(f"{phase}, the whole device, GiB", entry)


def _line(label: str, entry: Mapping[str, Any], *, scale: float = 1.0, note: str = "") -> str:
    cells = ("-" if entry[name] is None else f"{entry[name] / scale:.3f}" for name in ("predicted", "measured"))
    last = "-" if entry["ratio"] is None else f"{entry['ratio']:.2f}"
    return f"  {label:<40}" + "".join(f"{cell:>12}" for cell in cells) + f"{last:>8}{f'  {note}' if note else ''}"
