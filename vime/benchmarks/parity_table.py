"""`make parity`: every layout beside one process, on the same samples of tiny models, ranks as processes of this host.

Each layout is planned as a run's is, its ranks are built from the plan, and a batch is split over them by the run's own
schedule. Loss and gradient norm of the first steps are compared with those of one rank. Ends with 1 beyond a bound.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vime.benchmarks.comparing import JUDGED, axes_in, free_ports, relative, trainer_plan, world_of
from vime.data.tiny_model import TinyShape, save_tiny
from vime.errors import ConfigError, VimeError

STEPS = 3
MAX_TOKENS = 72
LIMIT_S = 300.0
PRELOADED = ("vime.trainer.megatron.worker", "megatron.core.models.gpt", "megatron.core.dist_checkpointing")
"""Each rank is forked from a process that has imported what a trainer needs and done nothing else."""
BOUNDS = {"float32": 1e-5, "bfloat16": 2e-2}
"""Largest relative difference of loss and gradient norm: five digits in float32, hardly two in bfloat16, whose sums are rounded
to 2^-8 each.
"""

_SIZES: dict[str, Any] = {"vocab_size": 264, "hidden": 32, "head_dim": 16, "ffn": 48, "layers": 4, "init_std": 0.1}
MODELS: Mapping[str, TinyShape] = {
    "dense": TinyShape(**_SIZES),
    "experts": TinyShape(**_SIZES, tied=False, experts=8),
    "glm": TinyShape(**_SIZES, family="glm4_moe", tied=False, experts=8),
    "latent": TinyShape(**{**_SIZES, "head_dim": 32}, family="deepseek_v3", tied=False, experts=8, groups=2, rotary_factor=4.0),
    "llama": TinyShape(**_SIZES, family="llama", tied=False, rotary_factor=8.0),
}


@dataclass(frozen=True, slots=True)
class Layout:
    """Axes as a topology names them (`dp` too), and keys of the run file's `trainer` section."""

    model: str
    axes: Mapping[str, int]
    trainer: Mapping[str, Any] = field(default_factory=dict)
    dtype: str = "float32"

    @property
    def name(self) -> str:
        axes = "-".join(f"{axis}{size}" for axis, size in self.axes.items()) or "one"
        more = [f"{key}={value}" for key, value in self.trainer.items() if key != "megatron"]
        more += [f"{key}={value}" for key, value in self.trainer.get("megatron", {}).items()]
        return " ".join((axes, *more))

    @property
    def devices(self) -> int:
        return world_of(self.axes)


_PARALLEL = {"megatron": {"sequence_parallel": True}}
_DENSE: tuple[tuple[str, Mapping[str, Any]], ...] = (
    *((axes, {}) for axes in ("tp2", "pp2", "pp4", "pp2-vpp2", "dp2", "dp3", "cp2", "cp4")),
    *((axes, {}) for axes in ("tp2-pp2", "tp2-pp2-vpp2", "tp2-dp2", "tp2-cp2", "pp2-cp2", "cp2-dp2", "tp2-pp2-cp2")),
    *((axes, _PARALLEL) for axes in ("tp2", "tp2-cp2", "tp2-pp2")),
    *((axes, {"overlap": True}) for axes in ("dp2", "cp2", "pp2-vpp2-dp2")),
    *((axes, {"recompute": "full"}) for axes in ("dp1", "tp2-pp2", "cp2", "pp2-vpp2")),
    *((axes, {"recompute": "selective"}) for axes in ("dp1", "tp2-cp2")),
    ("dp2", {"updates_per_step": 2, "overlap": True}),
)
_EXPERTS: tuple[tuple[str, Mapping[str, Any]], ...] = (
    *((axes, {}) for axes in ("dp2", "dp2-ep2", "tp2", "tp2-ep2", "tp2-etp2", "pp2", "pp2-vpp2", "cp2", "cp2-ep2")),
    *((axes, {}) for axes in ("tp2-dp2-ep4", "tp2-cp2-ep4", "pp2-cp2-ep2", "pp2-dp2-ep2", "tp2-pp2-ep2", "tp2-pp2-vpp2")),
    *((axes, {"overlap": True}) for axes in ("dp2-ep2", "pp2-vpp2-dp2-ep2")),
    *((axes, {"recompute": "full"}) for axes in ("dp2-ep2", "pp2-cp2")),
    ("dp2-ep2", {"recompute": "selective"}),
)
_OTHERS = ("tp2", "cp2", "pp2-cp2")
_SHORT: tuple[tuple[str, Mapping[str, Any]], ...] = (
    *((axes, {}) for axes in ("tp2", "pp2-vpp2", "cp2", "tp2-cp2")),
    ("dp2", {"overlap": True}),
)
_GIVEN = {"routing_replay": "rollout"}
"""The experts of every token are given: a router's own choice may flip by a rounding, and then other experts are trained."""


def layouts() -> tuple[Layout, ...]:
    """All that are compared, those of one model and dtype next to each other."""
    return (
        *(Layout("dense", axes_in(axes), more) for axes, more in _DENSE),
        *(Layout("experts", axes_in(axes), more) for axes, more in _EXPERTS),
        *(Layout(model, axes_in(axes)) for model in ("llama", "glm", "latent") for axes in _OTHERS),
        *(Layout("dense", axes_in(axes), more, "bfloat16") for axes, more in _SHORT),
        *(Layout("experts", axes_in(axes), _GIVEN, "bfloat16") for axes in ("dp2-ep2", "tp2-ep2", "cp2-ep2")),
    )


# ---- one layout


def planned(layout: Layout, folder: Path) -> list[Any]:
    """A `TrainerSetup` for every rank. Raises the plan's own error for what a run would refuse."""
    from vime.assemble.setups import trainer_setups
    from vime.facts.diagnosis import ProbeContext
    from vime.platforms.discovery import PluginPolicy, discover

    platform = discover(PluginPolicy.read(platform="cpu")).platform("cpu")
    node = platform.inventory(ProbeContext(dict(os.environ)))
    words, model = _run_file(layout, folder), folder / layout.model
    config, plan = trainer_plan(words, folder / "run.yaml", model=model, platform=platform, node=node)
    return trainer_setups(config, plan, plan.actor)


def _run_file(layout: Layout, folder: Path) -> dict[str, Any]:
    model, axes = folder / layout.model, {axis: size for axis, size in layout.axes.items() if axis != "dp"}
    host = {"platform": "cpu", "nodes": 1, "devices_per_node": layout.devices}
    return {
        "run": {"dir": str(folder / "unused"), "seed": 5},
        "model": {"path": str(model), "dtype": layout.dtype},
        "topology": {
            "schema": "vime.topology/v1",
            "name": "trainer-alone",
            "pools": {"host": host},
            "roles": {"actor": {"kind": "train", "devices": layout.devices, "parallel": axes}},
        },
        "data": {"path": str(model / "prompts.jsonl")},
        "reward": {"kind": "vime.benchmarks.even_ids:even"},
        "rollout": {"sampling": {"max_response_tokens": 40}},
        "algorithm": {"kind": "grpo", "entropy_coef": 0.01},
        "trainer": {
            "optimizer": {"lr": 1e-4},
            "max_tokens_per_micro_batch": MAX_TOKENS,
            "recompute": "none",
            **layout.trainer,
        },
        "schedule": {"num_steps": 20},
        "observe": {"tensorboard": False},
    }


def trained(layout: Layout, folder: Path, *, limit_s: float = LIMIT_S) -> list[dict[str, float]]:
    """Metrics of every step, the same on all ranks. Raises RuntimeError with what a rank said last."""
    from vime.benchmarks import parity_process

    setups = planned(layout, folder)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([parity_process.__name__, *PRELOADED])
    with tempfile.TemporaryDirectory(dir=folder) as work:
        files = [(Path(work) / f"{rank}.json", Path(work) / f"{rank}.log") for rank in range(len(setups))]
        (port,) = free_ports(1)
        ranks = [
            context.Process(target=parity_process.run, args=(setup, port, STEPS, *file), daemon=True)
            for setup, file in zip(setups, files, strict=True)
        ]
        for process in ranks:
            process.start()
        deadline = time.monotonic() + limit_s
        for process in ranks:
            process.join(timeout=max(0.1, deadline - time.monotonic()))
        ended = [process.exitcode for process in ranks]
        for process in ranks:
            process.kill()
        if any(ended):
            words = [log.read_text()[-1500:] for (_, log), code in zip(files, ended, strict=True) if code and log.exists()]
            raise RuntimeError("\n".join(words) or f"ranks ended with {ended}")
        if None in ended:
            raise RuntimeError(f"not done after {limit_s:g} s")
        told = [json.loads(out.read_text()) for out, _ in files]
    for rank, rows in enumerate(told):
        if rows != told[0]:
            raise RuntimeError(f"rank {rank} has other metrics than rank 0: {rows} {told[0]}")
    return told[0]


# ---- the table

_THEIRS = ("updates_per_step", "routing_replay")
"""Settings that change what is trained, so that one process has them too."""


@dataclass(frozen=True, slots=True)
class Line:
    """A layout beside one process: the largest relative difference of each judged metric, or why there is none."""

    layout: Layout
    apart: Mapping[str, float]
    seconds: float
    error: str | None = None

    @property
    def worst(self) -> float:
        return max(self.apart.values(), default=float("inf"))

    @property
    def good(self) -> bool:
        return self.error is None and self.worst <= BOUNDS[self.layout.dtype]

    def __str__(self) -> str:
        told = ", ".join(f"{name.removeprefix('train/')} {value:.1e}" for name, value in self.apart.items())
        verdict = "" if self.good else f"  BEYOND {BOUNDS[self.layout.dtype]:g}" if self.error is None else f"  {self.error}"
        head = f"{self.layout.model:<8}{self.layout.dtype:<9} {self.layout.devices} {self.layout.name:<42}"
        return f"{head} {told:<36} {self.seconds:5.1f} s{verdict}"


def compared(chosen: Sequence[Layout], folder: Path) -> Iterator[Line]:
    """A line for each layout. One process is measured once for each model, dtype and setting of `_THEIRS`."""
    alone: dict[tuple[str, str, str], list[dict[str, float]]] = {}
    for layout in chosen:
        begin, same = time.monotonic(), {name: layout.trainer[name] for name in _THEIRS if name in layout.trainer}
        key = (layout.model, layout.dtype, str(same))
        try:
            if not (folder / layout.model).exists():
                save_tiny(folder / layout.model, MODELS[layout.model], seed=1)
            if key not in alone:
                one = Layout(layout.model, {"dp": 1}, same, layout.dtype)
                alone[key] = trained(one, folder)
            rows = trained(layout, folder)
        except (VimeError, RuntimeError, OSError) as error:
            # A layout that fails is a line of the table; the others are compared all the same.
            yield Line(layout, {}, time.monotonic() - begin, str(error))
            continue
        apart = {
            name: max(relative(row[name], floor[name]) for row, floor in zip(rows, alone[key], strict=True)) for name in JUDGED
        }
        yield Line(layout, apart, time.monotonic() - begin)


def summary(lines: Sequence[Line]) -> str:
    """The last line: the worst difference in float32, and in 16 bits where that was compared."""
    worst = {dtype: max((line.worst for line in lines if line.layout.dtype == dtype), default=None) for dtype in sorted(BOUNDS)}
    found = [f"{value:.1e} ({dtype})" for dtype, value in sorted(worst.items(), reverse=True) if value is not None]
    return f"parity: {len(lines)} layouts, worst relative difference {', '.join(found)}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m vime.benchmarks.parity_table", description=__doc__)
    parser.add_argument("--only", nargs="+", default=[], metavar="TEXT", help="layouts whose line begins so, as `experts dp2`")
    args = parser.parse_args(argv)
    chosen = [one for one in layouts() if not args.only or any(f"{one.model} {one.name}".startswith(t) for t in args.only)]
    if not chosen:
        raise ConfigError("no layout has such a name", where="command line", fix="leave --only out to see all")
    lines = []
    with tempfile.TemporaryDirectory(prefix="vime-parity-") as folder:
        for line in compared(chosen, Path(folder)):
            lines.append(line)
            print(line, flush=True)
    print(summary(lines))
    return 0 if all(line.good for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
