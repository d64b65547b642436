"""Planning and control at up to 10,000 devices, by simulation: what grows with the devices, and how fast.

Real parts: the planner, `Publisher`, the driver's `TrainerLink`, `EngineControl` above its HTTP call, a `device_ipc` half (for
one ring), merging, `VllmRollout`, `Buffer`, `PromptSource`, and with `--router` the router. Stand-ins are ranks, engines'
servers and rollout workers, in this process. Nothing is computed from a formula except where a name says `nominal`.

    python bench/scale_sim.py --out bench/results/scale.json --router
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import itertools
import json
import math
import random
import sys
import time
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scale_sync import PER_NODE, TP, Row, model_rows, publish_row

import vime
from vime.data.buffer import Buffer
from vime.data.source import PromptSource
from vime.facts.model import ModelShape
from vime.models.registry import read_shape
from vime.planning.make import make_plan
from vime.planning.needs import PlanNeeds
from vime.rollout.vllm_rollout import GroupOutcome, VllmRollout
from vime.testing.fakes import fake_group
from vime.testing.platforms import GIB, FakePlatform
from vime.topology.load import load_topology
from vime.types import PolicyVersion, PromptId

SIZES = (8, 64, 512, 4096, 10_000)
ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "examples" / "qwen3-30b-a3b-dapo" / "model"
DEVICES_PER_WORKER = 64
GROUPS_PER_DEVICE = 1
TOKENS_PER_S, ANSWER_TOKENS, GROUP = 15_000, 4096, 8
LAYOUTS = ("colocate", "disaggregated")


@dataclass(frozen=True)
class Cluster:
    """A layout of so many devices: TP 4 everywhere; `ranks` train, `engines` serve."""

    devices: int
    layout: str

    @property
    def ranks(self) -> int:
        return self.devices if self.layout == "colocate" else self.devices // 2

    @property
    def engines(self) -> int:
        return max(1, self.ranks // TP)

    @property
    def workers(self) -> int:
        return max(1, self.devices // DEVICES_PER_WORKER)

    @property
    def groups(self) -> int:
        return self.devices * GROUPS_PER_DEVICE

    def topology(self) -> dict[str, Any]:
        shared = self.layout == "colocate"
        pool = {"platform": "acme", "nodes": self.devices // PER_NODE, "devices_per_node": PER_NODE}
        actor = {"kind": "train", "pool": "p", "devices": self.ranks, "parallel": {"tp": TP}}
        rollout = {"kind": "rollout", "pool": "p", "engines": self.engines, "parallel": {"tp": TP}}
        share = {"share": [{"roles": ["actor", "rollout"], "mode": "time", "residency": "auto"}]} if shared else {}
        roles = {"actor": actor, "rollout": rollout}
        return {"name": "scale", "pools": {"p": pool}, "roles": roles, "sync": [{"from": "actor", "to": "rollout"}], **share}


# ---- planning


def plan_row(cluster: Cluster, model: ModelShape) -> Row:
    """Seconds of one plan, from text to plan, and the peak of Python's memory in a second one."""
    needs = PlanNeeds(batch_size=cluster.groups, max_response_tokens=ANSWER_TOKENS, recompute="full")
    platforms = {"acme": FakePlatform(memory_bytes=180 * GIB)}

    def plan() -> Any:
        return make_plan(load_topology(cluster.topology()), model=model, needs=needs, platforms=platforms)

    wall, cpu = timed(plan, repeats=3 if cluster.devices <= 512 else 1)
    tracemalloc.start()
    plan()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return {
        "plan_wall_s": wall,
        "plan_cpu_s": cpu,
        "plan_peak_bytes": peak,
        "plan_lines": count_lines(plan, "planning", "topology"),
    }


def timed(work: Callable[[], Any], *, repeats: int = 1) -> tuple[float, float]:
    """(wall, CPU) seconds: the smallest of some repeats."""
    spans: list[tuple[float, float]] = []
    for _ in range(repeats):
        wall, cpu = time.perf_counter(), time.process_time()
        work()
        spans.append((time.perf_counter() - wall, time.process_time() - cpu))
    return min(w for w, _ in spans), min(c for _, c in spans)


# ---- rollout and buffer


class _Gate:
    async def wait_open(self) -> None:
        await asyncio.sleep(0)


class ShuffledWorker:
    """A rollout worker that hands groups over one by one, in random order; the share `dropped` is refused by a filter."""

    def __init__(self, seed: int, turn: asyncio.Lock, *, dropped: float) -> None:
        self._random, self._turn, self._dropped = random.Random(seed), turn, dropped
        self._waiting: list[PromptId] = []
        self._there = asyncio.Event()
        self.calls = self.most = 0
        self.version = PolicyVersion(0, 0)

    async def submit(self, prompts: Sequence[PromptId]) -> None:
        self.calls += 1
        self._waiting += prompts
        self.most = max(self.most, len(self._waiting))
        self._there.set()

    async def finished(self) -> Sequence[GroupOutcome]:
        await self._there.wait()
        async with self._turn:
            await asyncio.sleep(0)
        self.calls += 1
        at = self._random.randrange(len(self._waiting))
        self._waiting[at], self._waiting[-1] = self._waiting[-1], self._waiting[at]
        prompt = self._waiting.pop()
        if not self._waiting:
            self._there.clear()
        if self._random.random() < self._dropped:
            return [GroupOutcome(prompt, dropped="flat")]
        return [GroupOutcome(prompt, fake_group(prompt, self.version, rewards=(0.0,) * GROUP))]


def rollout_row(cluster: Cluster, *, staleness: int, buffer_class: type[Buffer] = Buffer) -> Row:
    """`rollout_steps`, and once more with lines counted."""

    def steps() -> Row:
        return asyncio.run(rollout_steps(cluster, staleness=staleness, buffer_class=buffer_class))

    lines = f"rollout_lines_staleness{staleness}"
    return {**steps(), lines: count_lines(steps, "data", "rollout", inspect.getfile(buffer_class))}


async def rollout_steps(cluster: Cluster, *, staleness: int, buffer_class: type[Buffer], steps: int = 2) -> Row:
    """CPU seconds of the driver per step, with half of the groups dropped and every hand-over apart from the others."""
    source = PromptSource(100_000, identity="scale", seed=0, shuffle=False)
    buffer = buffer_class(source, batch_size=cluster.groups, max_staleness=staleness)
    turn = asyncio.Lock()
    workers = [ShuffledWorker(i, turn, dropped=0.5) for i in range(cluster.workers)]
    rollout = VllmRollout(workers, source, gate=_Gate(), on_count=lambda *_: None, chunk=cluster.groups)

    async def collect() -> None:
        async for group in rollout.groups(buffer.room()):
            await buffer.put(group)

    collecting = asyncio.create_task(collect())
    cpu = time.process_time()
    for step in range(1, steps + 1):
        await buffer.take(step)
        for worker in workers:
            worker.version = PolicyVersion(0, step)
        buffer.advance(PolicyVersion(0, step))
    cpu = (time.process_time() - cpu) / steps
    collecting.cancel()
    await asyncio.gather(collecting, return_exceptions=True)
    journal = len(
        json.dumps([[[*g.prompt.__getstate__()], g.samples] for b in buffer.rewind(0) for g in b.groups], default=str)
    )
    return {
        f"buffer_cpu_s_staleness{staleness}": cpu,
        f"worker_calls_staleness{staleness}": sum(w.calls for w in workers) / steps,
        f"sockets_per_worker_staleness{staleness}": max(w.most for w in workers),
        f"journal_bytes_staleness{staleness}": journal / steps,
        f"state_bytes_staleness{staleness}": len(json.dumps(buffer.state(steps))),
    }


def nominal_load(cluster: Cluster) -> Row:
    """Requests a second at the router, where every engine samples at the nominal rate and a request brings a group."""
    rate = cluster.engines * TP * TOKENS_PER_S / ANSWER_TOKENS / GROUP
    return {"nominal_router_requests_per_s": rate}


# ---- the table


def simulate(cluster: Cluster, model: ModelShape, rows: list[list[Any]]) -> Row:
    """All measures of one cluster."""

    def publish() -> Row:
        shared = cluster.layout == "colocate"
        return asyncio.run(publish_row(cluster.ranks, cluster.engines, rows, every_rank=shared))

    found: Row = {**plan_row(cluster, model), **publish(), **nominal_load(cluster)}
    found["sync_lines"] = count_lines(publish, "weights", "cluster")
    for staleness in (0, 1):
        found |= rollout_row(cluster, staleness=staleness)
    return found


def count_lines(work: Callable[[], Any], *packages: str) -> int:
    """Lines that run of these packages of vime, or files; every turn of a loop counts. Time without noise."""
    folders = tuple(str(Path(vime.__file__).parent / package) for package in packages)
    count = 0

    def line(frame: Any, event: str, value: Any) -> Any:
        nonlocal count
        count += event == "line"
        return line

    def call(frame: Any, event: str, value: Any) -> Any:
        return line if frame.f_code.co_filename.startswith(folders) else None

    before = sys.gettrace()
    sys.settrace(call)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def exponent(small: tuple[int, float], large: tuple[int, float], *, floor: float = 0.0) -> float:
    """How a measure grows between (devices, value) pairs: 1 is linear. Values below `floor` count as `floor`."""
    before, after = max(small[1], floor), max(large[1], floor)
    return math.log(after / before) / math.log(large[0] / small[0]) if before > 0 and after > 0 else 0.0


def exponents(table: Mapping[int, Row], *, floors: Callable[[str], float]) -> dict[str, list[float]]:
    """By measure, the exponent between each size and the next."""
    sizes = sorted(table)
    pairs = list(itertools.pairwise(sizes))
    return {
        name: [exponent((a, table[a][name]), (b, table[b][name]), floor=floors(name)) for a, b in pairs]
        for name in table[sizes[0]]
    }


def floor_of(name: str) -> float:
    """Below this a measure is noise or a constant part."""
    return 0.1 if name.endswith("_s") or "_cpu_s" in name else 0.0


def table_text(table: Mapping[int, Row]) -> str:
    """A Markdown table of the sizes, with the exponent of the last step."""
    grown = exponents(table, floors=floor_of)
    lines = ["| measure | " + " | ".join(f"{n:,}" for n in table) + " | exponents |", "|---|" + "---:|" * (len(table) + 1)]
    for name in next(iter(table.values())):
        values = " | ".join(f"{row[name]:,.3g}" if row[name] < 1000 else f"{row[name]:,.0f}" for row in table.values())
        lines.append(f"| `{name}` | {values} | {' '.join(f'{e:.2f}' for e in grown[name])} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--out", type=Path, default=None, help="write JSON here after every size")
    parser.add_argument("--router", action="store_true", help="load one router as well, for about ten seconds")
    args = parser.parse_args()
    model, rows = read_shape(MODEL), model_rows(json.loads((MODEL / "config.json").read_text()))
    result: dict[str, Any] = {"command": " ".join(["bench/scale_sim.py", *sys.argv[1:]]), "tensors": len(rows), "layouts": {}}
    for layout in LAYOUTS:
        table: dict[int, Row] = {}
        for size in args.sizes:
            began = time.perf_counter()
            table[size] = simulate(Cluster(size, layout), model, rows)
            print(f"{layout} {size}: {time.perf_counter() - began:.1f} s", file=sys.stderr, flush=True)
            result["layouts"][layout] = table
            if args.out is not None:
                args.out.write_text(json.dumps(result, indent=1) + "\n")
        print(f"\n{layout}\n\n{table_text(table)}", flush=True)
    if args.router:
        from scale_router import router_row

        sizes = ((ANSWER_TOKENS, GROUP), (64, GROUP))
        result["router"] = [asyncio.run(router_row(seconds=5.0, tokens=tokens, group=group)) for tokens, group in sizes]
        print(json.dumps(result["router"], indent=1))
        if args.out is not None:
            args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
