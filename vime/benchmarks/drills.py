"""Drills of `vime bench step --drill`: faults that must stop a run, and a death that must not.

negative: one tensor altered in an engine, on its way (the fingerprint names it) or after loading (the probe finds it); the run
must end with that error at that publication. kill: SIGKILL of an engine's core in the middle of a rollout; its device memory
must come back, the engine with the last published weights, and the run must finish with every group trained once.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from vime.benchmarks import faults
from vime.benchmarks.engines import Clock, look, open_record
from vime.benchmarks.step import Bench
from vime.benchmarks.watching import EngineFamily, Watch, engine_families

TENSORS: Mapping[faults.Kind, str] = {"transit": "mlp.down_proj.weight", "loaded": "layers.0.mlp.down_proj.weight"}
WORDS: Mapping[faults.Kind, tuple[str, ...]] = {
    "transit": ("altered on its way", "mlp.down_proj.weight"),
    "loaded": ("log-probs after the update differ", "engine 0"),
}
"""What the run must say as it ends."""

SPOILED_UPDATE = 2
"""The publication with the fault: the one after step 1, so that a good one comes before it."""

KILLED_IN_STEP = 2
FREED_WITHIN_S = 10.0
PATIENT = {"max_retries": 6}
"""A group gives up after 20 failures, which with three retries each come faster than a large engine starts again."""

DIFFERENCE = "train/train_rollout_logprob_abs_diff"
PROBE = "sync/probe_abs_diff"
EVERY_PUBLICATION = {"probe": {"first": 1_000_000}, "fingerprint": {"first": 1_000_000}}


def run_drills(args: argparse.Namespace) -> int:
    """Every asked drill, one part each. 1 where one did not show what it must."""
    args.response = args.response or 512
    args.steps = max(args.steps, KILLED_IN_STEP + 1)
    bench = Bench(args, look(args), Clock(args.limit))
    record = open_record(args, "drills")
    parts: dict[str, Callable[[], dict[str, Any]]] = {}
    if "negative" in args.drill:
        parts |= {f"negative, {kind}": lambda k=kind: negative(bench, k) for kind in TENSORS}
    if "kill" in args.drill:
        parts |= {f"kill, {residency}": lambda r=residency: kill(bench, r) for residency in args.residency}
    for name, work in parts.items():
        record.run(name, work)
    print("\n".join(report(record.parts)))
    return 0 if record.ok else 1


# ---- a tensor altered


def negative(bench: Bench, kind: faults.Kind) -> dict[str, Any]:
    """A run whose engine alters one tensor in its second update."""
    site = Path(tempfile.mkdtemp(prefix="vime-drill-"))
    env = faults.plant(site, kind, update=SPOILED_UPDATE, tensor=TENSORS[kind])
    try:
        watch = bench.start(
            bench.args.residency[0], env=env, weights=EVERY_PUBLICATION, rollout={"sampling": {"max_response_tokens": 16}}
        )
        try:
            how = watch.finish(bench.deadline())
        finally:
            watch.end()
    finally:
        shutil.rmtree(site, ignore_errors=True)
    said = error_of(watch.output())
    published = [row["step"] for row in watch.rows("sync")]
    checks = {
        "the run failed": how == "exit code 1",
        "it said why": all(word in said for word in WORDS[kind]),
        "at that publication": published == list(range(SPOILED_UPDATE - 1)),
        "nothing was trained after it": [row["step"] for row in watch.rows("step")] == list(range(1, SPOILED_UPDATE)),
    }
    return concluded(watch, checks, {"ended": how, "error_text": said, "published": published})


def error_of(output: str) -> str:
    """What `vime run` said as it failed; "" where it did not."""
    _, found, rest = output.rpartition("vime run: ")
    return (found + rest).strip()[:2000] if found else ""


# ---- an engine killed


def kill(bench: Bench, residency: str) -> dict[str, Any]:
    """A run of which one engine loses its core while it samples the second step's batch."""
    deadline = bench.deadline()
    watch = bench.start(residency, weights=EVERY_PUBLICATION, rollout=PATIENT)
    seen: dict[str, Any] = {"residency": residency}
    try:
        watch.wait(deadline, lambda: any(row["step"] == KILLED_IN_STEP - 1 for row in watch.rows("sync")))
        victim = busy_engine(watch, deadline)
        if victim is not None:
            seen |= shoot(watch, victim, deadline)
        seen["ended"] = watch.finish(deadline)
    finally:
        watch.end()
    rows = watch.rows()
    seen |= story(watch, rows, bench)
    checks = {"an engine was killed as it sampled": "killed_at_s" in seen}
    checks |= survival_checks(seen, rows, steps=bench.args.steps, batch=bench.args.batch) if "killed_at_s" in seen else {}
    return concluded(watch, checks, seen)


def busy_engine(watch: Watch, deadline: float) -> EngineFamily | None:
    """An engine that has requests running now, in the step in which it is to die."""
    while watch.process.poll() is None and time.monotonic() < deadline:
        if any(row["step"] >= KILLED_IN_STEP for row in watch.rows("step")):
            return None
        for family in engine_families(watch):
            if running_requests(family.url) > 0:
                return family
        time.sleep(0.02)
    return None


def running_requests(url: str) -> int:
    """What the gate of an engine says; 0 where none answers."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with suppress(urllib.error.URLError, OSError, ValueError), opener.open(f"{url}/vime/identity", timeout=2.0) as answer:
        return int(json.load(answer)["running"])
    return 0


def shoot(watch: Watch, victim: EngineFamily, deadline: float) -> dict[str, Any]:
    """SIGKILL the core and watch what becomes of its process and of the device's memory."""
    with suppress(psutil.Error):
        resident = victim.core.memory_info().rss
        before, at = latest(watch), watch.now()
        victim.core.kill()
        gone = None
        until = min(deadline, time.monotonic() + FREED_WITHIN_S)
        while time.monotonic() < until and gone is None:
            gone = None if alive(victim.core) else watch.now() - at
            time.sleep(0.02)
        return {
            "killed_at_s": round(at, 3),
            "killed_pid": victim.core.pid,
            "gone_after_s": gone,
            "host_bytes_before": resident,
            "device_gib_before": before,
        }
    return {}


def alive(process: psutil.Process) -> bool:
    """A zombie holds nothing any more."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def latest(watch: Watch) -> float | None:
    """GiB in use at the last look."""
    return watch.memory[-1][1] if watch.memory else None


def story(watch: Watch, rows: Sequence[Mapping[str, Any]], bench: Bench) -> dict[str, Any]:
    """What the run recorded around the death."""
    events = watch.events()
    found: dict[str, Any] = {"events": events, "device_gib": [*watch.memory] if watch.memory else None}
    steps = [row for row in rows if row["kind"] == "step"]
    found["groups"] = {row["step"]: row["data"]["groups"] for row in steps}
    found["versions"] = {row["step"]: row["data"]["versions"] for row in steps}
    found["regenerated"] = {row["step"]: row["metrics"].get("rollout/regenerated", 0) for row in steps}
    found["log_prob_differences"] = {row["step"]: row["metrics"].get(DIFFERENCE) for row in steps}
    found["probes"] = {row["step"]: row["metrics"].get(PROBE) for row in rows if row["kind"] == "sync"}
    plan = watch.run_dir / "plan.json"
    if plan.exists():
        memory = json.loads(plan.read_text())["memory"]["rows"]
        engine = [row for row in memory if (row["role"], row["phase"]) == ("rollout", "serving")]
        found["engine_gib_planned"] = sum(row["num_bytes"] for row in engine) / 2**30
    return found


def survival_checks(seen: dict[str, Any], rows: Sequence[Mapping[str, Any]], *, steps: int, batch: int) -> dict[str, bool]:
    """What must hold of a run that survived. Adds the seconds of the recovery and the freed memory to `seen`."""
    times = {event["name"]: event["t"] - seen["killed_at_s"] for event in seen["events"] if "t" in event}
    seen["noticed_after_s"], seen["serving_after_s"] = times.get("engine_died"), times.get("engine_restarted")
    trained = [group for groups in seen["groups"].values() for group in groups]
    differences = dict(seen["log_prob_differences"])
    hit = differences.pop(KILLED_IN_STEP, None)
    others = [value for value in differences.values() if value is not None]
    checks = {
        "the run finished": seen.get("ended") == "exit code 0",
        "every step was trained": sorted(seen["groups"]) == list(range(1, steps + 1)),
        "every group was trained once": sorted(trained) == list(range(steps * batch)),
        "the killed process is gone": seen["gone_after_s"] is not None,
        "the engine came back": seen["serving_after_s"] is not None,
        "it came back in mid-rollout": seen["serving_after_s"] is not None and came_back_in_rollout(seen, rows),
        "all tokens are of the last published weights": all(seen["versions"][s] == [f"0.{s - 1}"] for s in seen["versions"]),
        "log-probs stay as near as in other steps": bool(others) and hit is not None and hit <= 2 * max(others),
        "every publication was probed": bool(seen["probes"]) and None not in seen["probes"].values(),
    }
    if seen["device_gib_before"] is not None:
        seen["device_gib_freed"] = freed(seen)
        checks["the device's memory came back"] = seen["device_gib_freed"] >= 0.9 * seen["engine_gib_planned"]
    return checks


def came_back_in_rollout(seen: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the step that it died in was trained after it served again: it sampled from the weights that it was given."""
    restarted = next(row["time"] for row in rows if row["kind"] == "event" and row["data"]["name"] == "engine_restarted")
    return any(row["kind"] == "step" and row["step"] == KILLED_IN_STEP and row["time"] > restarted for row in rows)


def freed(seen: Mapping[str, Any]) -> float:
    """GiB that the device had less in use at its lowest until the engine served again."""
    end = seen["killed_at_s"] + (seen["serving_after_s"] or FREED_WITHIN_S)
    after = [used for t, used in seen["device_gib"] if seen["killed_at_s"] < t <= end]
    return seen["device_gib_before"] - min(after, default=seen["device_gib_before"])


# ---- what a drill leaves


def concluded(watch: Watch, checks: Mapping[str, bool], seen: Mapping[str, Any]) -> dict[str, Any]:
    """The part of the record: what held, what was seen, and the logs where something did not hold."""
    ok = all(checks.values())
    found: dict[str, Any] = {"ok": ok, "checks": dict(checks), "seconds": watch.now(), **seen}
    if ok:
        shutil.rmtree(watch.folder, ignore_errors=True)
        return found
    failed = ", ".join(name for name, held in checks.items() if not held)
    return {**found, "error": f"does not hold: {failed}", "logs": watch.tails(), "kept": str(watch.folder)}


def report(parts: Mapping[str, Any]) -> Iterator[str]:
    """One block a drill."""
    for name, part in parts.items():
        if "checks" not in part:
            if not part["ok"]:
                yield f"{name}: {part.get('error', '')[-600:]}"
            continue
        yield f"{name}: {'passed' if part['ok'] else 'FAILED'} in {part['seconds']:.0f} s"
        yield from (f"  {'ok ' if held else 'NOT'} {check}" for check, held in part["checks"].items())
        if part.get("error_text"):
            yield f"  the run said: {part['error_text'].splitlines()[0][:300]}"
        if part.get("serving_after_s") is not None:
            yield f"  noticed after {part['noticed_after_s']:.1f} s, serving again after {part['serving_after_s']:.1f} s"
        if part.get("device_gib_freed") is not None:
            yield f"  {part['device_gib_freed']:.1f} GiB of the device came back, planned {part['engine_gib_planned']:.1f}"
        if not part["ok"]:
            yield "  last lines of the driver: " + " | ".join(part["logs"].get("driver.log", [])[-4:])
    total = [part for part in parts.values() if "checks" in part]
    yield f"{sum(part['ok'] for part in total)} of {len(total)} drills passed"
