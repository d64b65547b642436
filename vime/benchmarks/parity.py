"""`vime bench train --layouts tp2 dp2 ...`: ranks on devices of their own beside one rank, all on the same fixed samples.

Each rank is a process with the environment and the mask that a plan gives it, and builds the trainer as a run does, without
Ray. With `--parity` losses and gradient norms are compared step by step, in the asked dtype and in float32 on a small shape.
"""

from __future__ import annotations

import argparse
import base64
import copy
import json
import math
import pickle
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vime.benchmarks.children import together
from vime.benchmarks.comparing import JUDGED, axes_in, free_ports, relative, trainer_plan, world_of
from vime.benchmarks.engines import Clock, Here, look, model_of, open_record
from vime.errors import ConfigError, TrainerError

ALONE = "alone"
COMPARED = ("train/loss", "train/pg_loss", "train/entropy_loss", "train/grad_norm")
SMALL = {False: "tiny", True: "tiny-moe"}
"""The shape that is compared in float32, by whether the asked one has experts."""
LIMITS = {"float32": 1e-4}
OTHER_LIMIT = 0.05
"""Largest relative difference of loss and gradient norm from one process. In 16 bits every sum is rounded to 2^-8."""


def add_layout_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    about = "ranks beside one: axes and sizes, as tp2, dp2, cp2, ep2, pp2-vpp2, tp2-dp2"
    add("--layouts", nargs="+", default=[], type=axes_of, metavar="AXES", help=about)
    add("--parity", action="store_true", help="with --layouts: compare losses and gradients, also in float32")
    add("--models", type=Path, default=Path(tempfile.gettempdir()) / "vime-models", metavar="DIR", help="random weights")


def axes_of(text: str) -> str:
    """The text, if it reads as axes and sizes. Raises ArgumentTypeError, which argparse prints."""
    if not axes_in(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no layout: write axes and sizes, as tp2 or tp2-dp2")
    return text


def sizes_of(layout: str) -> dict[str, int]:
    """`tp2-dp2` -> its axes; experts are spread over data parallel ranks where none are named."""
    sizes = axes_in(layout)
    beside = sizes.get("tp", 1) * sizes.get("cp", 1)
    sizes.setdefault("dp", max(1, sizes.get("ep", 1) * sizes.get("etp", 1) // beside))
    return sizes


def ranks_of(layout: str) -> int:
    return world_of(sizes_of(layout))


@dataclass(frozen=True)
class Job:
    """One model in one dtype, and the sizes of its rows."""

    dtype: str
    model: Path
    tokens: int
    length: int


def run(args: argparse.Namespace) -> int:
    """One part for one rank alone and one for each layout; 1 where a part failed. `args` has the sizes filled in."""
    clock, here = Clock(args.limit), look(args)
    record = open_record(args, "layouts")
    jobs = list(_jobs(args, here, clock))
    for name in (ALONE, *args.layouts):
        record.run(name, lambda n=name: measured(args, here, jobs, n, clock))
        part = record.parts[name]
        if name != ALONE and part.get("dtypes"):
            beside(part, record.parts[ALONE], judged=args.parity)
            record.save()
    print("\n".join(report(record.parts)))
    return 0 if record.ok else 1


def _jobs(args: argparse.Namespace, here: Here, clock: Clock) -> Iterator[Job]:
    """The asked model in the asked dtype, then a small one in float32."""
    asked = Job(args.dtype, model_of(args, here, clock), args.tokens, args.length)
    yield asked
    if args.parity:
        config = json.loads((asked.model / "config.json").read_text())
        words = copy.copy(args)
        words.model, words.dtype, words.shape = None, "float32", SMALL["num_experts" in config]
        small = Job("float32", model_of(words, here, clock), *args.small)
        if small.model.resolve() != asked.model.resolve():
            yield small


def measured(args: argparse.Namespace, here: Here, jobs: Sequence[Job], layout: str, clock: Clock) -> dict[str, Any]:
    """Train with a layout -> by dtype what rank 0 told, and each rank's mask and device. Raises TrainerError."""
    sizes = sizes_of(layout) if layout != ALONE else {"dp": 1}
    world = ranks_of(layout) if layout != ALONE else 1
    if not here.node.virtual and len(here.node.devices) < world:
        raise TrainerError(f"{layout} needs {world} devices, here are {len(here.node.devices)}", fix="leave it out")
    with tempfile.TemporaryDirectory(prefix="vime-layouts-") as folder:
        plans = [_planned(args, here, job, sizes, Path(folder)) for job in jobs]
        refused = {job.dtype: why for job, (_, plan) in zip(jobs, plans, strict=True) if (why := why_not(job, plan))}
        taken = [(job, plan) for job, plan in zip(jobs, plans, strict=True) if job.dtype not in refused]
        if not taken:
            raise TrainerError("; ".join(refused.values()), fix="ask for another --dtype")
        jobs, plans = [job for job, _ in taken], [plan for _, plan in taken]
        role = plans[0][1].actor
        ports = free_ports(len(jobs))
        masks = [dict(role.masks[rank]) if role.masks else {} for rank in range(world)]
        envs = [{**role.env, **mask, **_left_alone(plans[0][1])} for mask in masks]
        told = together(
            "vime.benchmarks.parity_rank",
            [_order(args, here, list(zip(jobs, plans, ports, strict=True)), rank) for rank in range(world)],
            envs=envs,
            folder=Path(folder),
            limit_s=clock.left(),
            unset=_masked_out(plans[0][1]),
        )
    found = {
        "ranks": world,
        "axes": sizes,
        "masks": masks,
        "env": dict(role.env),
        "backend": role.collective.backend,
        "saw": [results[0]["saw"] if results else None for results in told.results],
        "dtypes": dict(_by_dtype(told.results)),
        "not_run": refused,
        "seconds": told.seconds,
    }
    wrong = told.error or _disagreement(told.results)
    return found if wrong is None else {**found, "ok": False, "error": wrong[:6000]}


def _by_dtype(results: Sequence[Sequence[Mapping[str, Any]]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """What rank 0 told of each dtype, with the tokens of all ranks over its median step."""
    for row in results[0]:
        step_s = statistics.median(row["step_s"][1:] or row["step_s"])
        yield row["dtype"], {**row, "median_step_s": step_s, "tokens_per_s": row["tokens_per_step"] / step_s}


def _disagreement(results: Sequence[Sequence[Mapping[str, Any]]]) -> str | None:
    """Metrics of a step are the same on all ranks."""
    for rows in zip(*results, strict=True):
        for rank, row in enumerate(rows):
            if row["metrics"] != rows[0]["metrics"]:
                return f"rank {rank} has other metrics than rank 0 ({row['dtype']}): {row['metrics']}, {rows[0]['metrics']}"
    return None


# ---- a plan without engines


def why_not(job: Job, plan: Any) -> str | None:
    """Why the platform's attention does not train in a job's dtype; None where it does."""
    attention = plan.actor.adaptation.core_attention
    if attention is None:
        return None
    names = getattr(attention.load(), "dtype_names", None)
    return None if names is None or job.dtype in names else f"{attention.target} takes {' and '.join(names)} only"


def _planned(args: argparse.Namespace, here: Here, job: Job, sizes: Mapping[str, int], folder: Path) -> tuple[Any, Any]:
    """(configuration, plan) of a trainer alone on its devices."""
    words = _run_file(args, here, job, sizes)
    return trainer_plan(words, folder / f"run-{job.dtype}.yaml", model=job.model, platform=here.platform, node=here.node)


def _run_file(args: argparse.Namespace, here: Here, job: Job, sizes: Mapping[str, int]) -> dict[str, Any]:
    world = world_of(sizes)
    slots = {"nodes": 1, "devices_per_node": world} if here.node.virtual else {}
    axes = {name: size for name, size in sizes.items() if name != "dp"}
    return {
        "run": {"dir": str(job.model / "unused"), "seed": 5},
        "model": {"path": str(job.model.resolve()), "dtype": job.dtype},
        "topology": {
            "schema": "vime.topology/v1",
            "name": "trainer-alone",
            "pools": {"node": {"platform": "auto", **slots}},
            "roles": {"actor": {"kind": "train", "devices": world, "parallel": axes}},
        },
        "data": {"path": str(job.model / "prompts.jsonl")},
        "reward": {"kind": "vime.benchmarks.even_ids:even"},
        "algorithm": {"kind": "grpo", "loss_mean": "token", "entropy_coef": 0.01},
        "trainer": {
            "optimizer": {"lr": 1e-4},
            "max_tokens_per_micro_batch": job.tokens,
            "log_prob_chunk_tokens": args.chunk,
            "recompute": args.recompute[0],
            "megatron": json.loads(args.megatron),
        },
        "schedule": {"num_steps": 1000},
        "observe": {"tensorboard": False},
    }


def _order(args: argparse.Namespace, here: Here, jobs: Sequence[tuple[Job, Any, int]], rank: int) -> dict[str, Any]:
    """What a rank is told: for each job its setup as a run makes it, a port of its own, and the sizes of the samples."""
    from vime.assemble.setups import trainer_setups
    from vime.platforms.discovery import PluginPolicy, discover

    setups = [trainer_setups(config, plan, plan.actor)[rank] for _, (config, plan), _ in jobs]
    parts = (setups, discover(PluginPolicy.read(platform=args.platform)).resolved())
    common = {"micro_batches": args.micro_batches, "steps": args.steps}
    return {
        "parts": base64.b64encode(pickle.dumps(parts)).decode(),
        "device": here.capabilities.device_type,
        "unset": list(_masked_out(jobs[0][1][1])),
        "sizes": [{"tokens": job.tokens, "length": job.length, "port": port, **common} for job, _, port in jobs],
    }


def _masked_out(plan: Any) -> tuple[str, ...]:
    from vime.cluster.placement import masked_out

    return masked_out(plan)


def _left_alone(plan: Any) -> Mapping[str, str]:
    from vime.planning.masks import scheduler_flags
    from vime.planning.plan import pool_of

    return scheduler_flags(pool_of(plan.pools, plan.actor.pool).binding)


# ---- what it means


def beside(part: dict[str, Any], alone: Mapping[str, Any], *, judged: bool) -> None:
    """Put relative differences from one process and the ratio of tokens per second into a layout's part.

    Where it is judged, a difference over its limit makes the part fail.
    """
    wrong: list[str] = []
    for dtype, row in part["dtypes"].items():
        floor = alone.get("dtypes", {}).get(dtype)
        if floor is None:
            wrong.append(f"{dtype}: nothing to compare with")
            continue
        row["tokens_per_s / alone"] = row["tokens_per_s"] / floor["tokens_per_s"]
        row["relative"] = [_apart(a, b) for a, b in zip(row["metrics"], floor["metrics"], strict=True)]
        limit = LIMITS.get(dtype, OTHER_LIMIT)
        for name in JUDGED:
            values = [step.get(name, math.nan) for step in row["relative"]]
            if not all(value <= limit for value in values):
                wrong.append(f"{dtype}: {name} differs by {values}, its limit is {limit:g}")
    if judged and wrong and part["ok"]:
        part |= {"ok": False, "error": "; ".join(wrong)}


def _apart(row: Mapping[str, float], floor: Mapping[str, float]) -> dict[str, float]:
    """Relative differences by metric."""
    return {name: relative(row[name], floor[name]) for name in COMPARED if name in row and name in floor}


def report(parts: Mapping[str, Any]) -> Iterator[str]:
    """A block for each dtype of each layout; its last line is the ratio to one rank."""
    for name, part in parts.items():
        for dtype, row in part.get("dtypes", {}).items():
            yield f"{name}, {dtype}: {row['tokens_per_s']:.0f} tokens/s on {part['ranks']} ranks ({part['backend']})"
            for step, metrics in enumerate(row["metrics"], start=1):
                apart = row["relative"][step - 1] if "relative" in row else {}
                yield f"  step {step}: " + ", ".join(_told(metrics, apart))
            if "tokens_per_s / alone" in row:
                yield f"  tokens per second / one rank's: {row['tokens_per_s / alone']:.3f}"
        yield from (f"{name}, {dtype}: not run: {why}" for dtype, why in part.get("not_run", {}).items())
        if not part["ok"]:
            yield f"{name} failed: {part.get('error', '')[-1500:]}"


def _told(metrics: Mapping[str, float], apart: Mapping[str, float]) -> Iterator[str]:
    for name in COMPARED:
        if name in metrics:
            beside_it = f" (differs by {apart[name]:.1e})" if name in apart else ""
            yield f"{name.removeprefix('train/')} {metrics[name]:.7g}{beside_it}"


def require_rows(args: argparse.Namespace) -> None:
    """Raises ConfigError unless every layout's data parallel ranks can have whole groups of rows."""
    from vime.benchmarks.parity_rank import GROUP

    groups = args.tokens // args.length * args.micro_batches // GROUP
    for layout in args.layouts:
        if groups < 1 or groups % sizes_of(layout)["dp"]:
            raise ConfigError(
                f"{groups} groups of {GROUP} rows cannot be shared out for {layout}",
                where="command line",
                fix="change --tokens, --length or --micro-batches",
            )
