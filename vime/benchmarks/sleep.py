"""How long engine and trainer take to leave a device and to come back, beside vLLM's own sleep and plain copies."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from typing import Any

from vime.benchmarks import bare, moves
from vime.benchmarks.engines import (
    Clock,
    Planned,
    add_engine_arguments,
    as_trainer,
    bounded,
    control_of,
    finish,
    look,
    model_of,
    open_record,
    plan_run,
    served,
    table,
    with_logs,
)
from vime.weights.protocol import CACHE, WEIGHTS

PHASES = ("sleep_s", "wake_weights_s", "wake_cache_s")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine_arguments(parser, residency="park", kv_gib=4)
    parser.add_argument("--repeats", type=int, default=3, help="measured repeats after a first one (3)")
    parser.add_argument(
        "--level", type=int, default=None, help="vLLM's sleep level (the platform's); a host answers and frees nothing"
    )


def run(args: argparse.Namespace) -> int:
    """Measure, print, record. 1 where a part failed."""
    clock, here = Clock(args.limit), look(args)
    record = open_record(args, "sleep")
    planned = plan_run(args, here, model := model_of(args, here, clock))
    record.parts["plan"] = {"ok": True, **planned.told()}
    sleep = planned.plan.engines[0].sleep
    level = sleep.level if args.level is None else args.level
    order = {"work": "sleep", "level": level, "repeats": args.repeats + 1}
    if level:
        record.run("server", lambda: with_logs(lambda: bounded(lambda: serve(planned, order, clock), clock), planned))
        record.run("bare", lambda: with_logs(lambda: best(bare.ask(planned, order, clock)["cycles"]), planned))
    else:
        record.parts["server"] = {"ok": True, "left_out": f"engines do not sleep here: {sleep.why}"}
    parking(record, planned, (model, args.repeats))
    record.parts.pop("ratios", None)
    if record.ok:
        record.run("ratios", lambda: ratios(record.parts))
    return finish(record, planned, report(record.parts))


def parking(record: Any, planned: Planned, what: tuple[Any, int]) -> None:
    """The parts that need this process to use the device: they come last, so that engines start on an empty one."""
    as_trainer(planned)
    (model, repeats), plan = what, planned.plan
    where, sizes = moves.Where(planned.device_type, plan.dtype), moves.sizes_of(model)
    record.run("copies", lambda: moves.copies(where, sizes))
    backend = plan.actor.memory
    if not hasattr(backend, "factory"):
        record.parts["park"] = {"ok": True, "left_out": f"trainers do not park here: {backend.reason}"}
        return
    where.tidy()
    record.run("park", lambda: moves.park(where, sizes, backend.factory, repeats))


async def serve(planned: Planned, order: Mapping[str, Any], clock: Clock) -> dict[str, Any]:
    """Sleep and wake a paused engine server, as a run's publications do."""
    async with served(planned, clock) as server, control_of(planned, server, clock) as control:
        await control.open("0.0")
        await control.shut("drain")
        found = await cycles(control, planned, order)
    return found


async def cycles(control: Any, planned: Planned, order: Mapping[str, Any]) -> dict[str, Any]:
    """`repeats` cycles of sleep at `level`, weights awake, caches awake."""
    where, rows = moves.Where(planned.device_type, planned.plan.dtype), []
    for _ in range(order["repeats"]):
        before, row = where.free_bytes(), {}
        for name, call in (
            ("sleep_s", lambda: control.sleep(order["level"])),
            ("wake_weights_s", lambda: control.wake([WEIGHTS])),
            ("wake_cache_s", lambda: control.wake([CACHE])),
        ):
            began = time.perf_counter()
            await call()
            row[name] = time.perf_counter() - began
            if before is not None:
                row[name.replace("_s", "_freed_bytes")] = (where.free_bytes() or 0) - before
        rows.append(row)
    return best(rows)


def best(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Medians by phase of all cycles but the first."""
    medians = {name: moves.median(row[name] for row in rows[1:]) for name in PHASES}
    return {**medians, "first": rows[0], "later": list(rows[1:]), "cycle_s": sum(medians.values())}


# ---- what it means


def ratios(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Above 1 is slower than the floor."""
    found, plain = {}, parts["copies"]
    if "bare" in parts:
        found |= {f"{name.removesuffix('_s')} / vLLM's own": parts["server"][name] / parts["bare"][name] for name in PHASES}
        found["cycle / vLLM's own"] = parts["server"]["cycle_s"] / parts["bare"]["cycle_s"]
    if "park_s" in parts["park"]:
        found["park / copy to host"] = plain["to_host_bytes_per_s"] / parts["park"]["park_bytes_per_s"]
        found["wake / copy from host"] = plain["from_host_bytes_per_s"] / parts["park"]["wake_bytes_per_s"]
    return found


def report(parts: Mapping[str, Any]) -> str:
    rows: list[Sequence[Any]] = []
    for name, title in (("server", "engine server"), ("bare", "vLLM alone")):
        part = parts.get(name, {})
        rows += [(f"{title}: {phase.removesuffix('_s')}", part[phase], "s") for phase in PHASES if phase in part]
    freed = parts.get("server", {}).get("first", {}).get("sleep_freed_bytes")
    rows += [] if freed is None else [("freed by the engine's sleep", freed / 1e9, "GB")]
    plain, park = parts.get("copies", {}), parts.get("park", {})
    if plain.get("ok"):
        rows += [
            (f"copy {way.replace('_', ' ')}", plain[f"{way}_bytes_per_s"] / 1e9, "GB/s") for way in ("to_host", "from_host")
        ]
    if "park_s" in park:
        rows += [(f"trainer: {way}", park[f"{way}_bytes_per_s"] / 1e9, "GB/s") for way in ("park", "wake")]
    rows += [(part["left_out"],) for part in parts.values() if "left_out" in part]
    rows += [(f"{name} failed: {part['error']}",) for name, part in parts.items() if not part["ok"]]
    ratio = {name: value for name, value in parts.get("ratios", {}).items() if "/" in name}
    return table("sleep", [*rows, *((name, value, "of the floor's time") for name, value in ratio.items())])
