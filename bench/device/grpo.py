"""A few GRPO steps of `vime run` on random weights, trainer and engine taking turns on the devices of one node.

For each residency: seconds by phase and bytes by tag at each edge as the run itself logs them, the probe of every publication,
how far the trainer's and the engine's log-probs are apart in each step, and the device's memory in use as its driver sees it.
When a run fails or does not end in time, the last lines of its logs are kept; stacks of its processes too where it hangs.

Large shapes: `--interrupt` ends a run after its last measured step instead of writing a checkpoint.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml

from vime.benchmarks.record import TAIL_LINES, Record, arguments, command, vime
from vime.benchmarks.shapes import SHAPES, write_model, write_prompts

PROMPT_TOKENS = 32
DIFFERENCES = ("train/train_rollout_logprob_abs_diff", "train/train_rollout_logprob_abs_diff_max")


def topology(residency: str, platform: str) -> dict[str, Any]:
    """One node of a platform; on a host one slot."""
    slots = {"nodes": 1, "devices_per_node": 1} if platform == "cpu" else {}
    return {
        "schema": "vime.topology/v1",
        "name": f"{residency}-on-one-node",
        "pools": {"node": {"platform": "auto", **slots}},
        "roles": {"actor": {"kind": "train", "devices": "all"}, "rollout": {"kind": "rollout", "devices": "all"}},
        "share": [{"roles": ["actor", "rollout"], "mode": "time", "residency": residency}],
        "sync": [{"from": "actor", "to": "rollout"}],
    }


def engine_args(args: argparse.Namespace) -> dict[str, Any]:
    """The engine's bounds: its cache is set, so that it measures nothing while the trainer is beside it."""
    if args.platform == "cpu":
        return {}
    found = {"kv_cache_memory_bytes": args.kv_gib << 30, "gpu_memory_utilization": args.utilization, "max_num_seqs": 128}
    return found | ({} if args.graphs else {"enforce_eager": True})


def run_file(args: argparse.Namespace, residency: str, folder: Path, model: Path) -> Path:
    config = {
        "run": {"dir": str(folder / "run"), "seed": 5},
        "model": {"path": str(model), "dtype": args.dtype},
        "topology": topology(residency, args.platform),
        "data": {"path": str(model / "prompts.jsonl"), "max_prompt_tokens": PROMPT_TOKENS},
        "rollout": {
            "batch_size": args.batch,
            "group_size": args.group,
            "sampling": {"max_response_tokens": args.response},
            "start_timeout_s": args.start_limit,
            "request_timeout_s": 120,
            "vllm": engine_args(args),
        },
        "reward": {"kind": "vime.benchmarks.even_ids:even"},
        "algorithm": {"kind": "grpo", "loss_mean": "token"},
        "trainer": {
            "optimizer": {"lr": args.lr},
            "recompute": args.recompute,
            "max_tokens_per_micro_batch": args.micro_batch,
            "step_timeout_s": 240,
        },
        "schedule": {"num_steps": args.steps + (1 if args.interrupt else 0)},
        "observe": {"tensorboard": False},
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


# ---- watching a run


@dataclass
class Watch:
    """Looks at a running driver: its rows, the device's memory, the logs of its Ray session, which vanish with it."""

    process: subprocess.Popen[str]
    folder: Path
    began: float = field(default_factory=time.time)
    memory: list[tuple[float, float]] = field(default_factory=list)
    logs: dict[str, str] = field(default_factory=dict)
    stopped: threading.Event = field(default_factory=threading.Event)

    def rows(self) -> list[dict[str, Any]]:
        path = self.folder / "run" / "metrics.jsonl"
        if not path.exists():
            return []
        found = []
        for line in path.read_text().splitlines():
            with suppress(ValueError):
                found.append(json.loads(line))
        return found

    def look(self) -> None:
        """The body of a thread."""
        device = Nvml.open()
        tick = 0
        while not self.stopped.wait(0.25):
            if device is not None:
                self.memory.append((round(time.time() - self.began, 2), device.used_gib()))
            if tick % 12 == 0:
                self.read_logs()
            tick += 1

    def read_logs(self) -> None:
        """The ends of what Ray's processes print, of the session that this driver's children run."""
        for folder in sessions(self.process.pid):
            for path in (folder / "session_latest" / "logs").glob("*.*"):
                if path.name.startswith(("worker-", "raylet", "gcs_server", "monitor")):
                    with suppress(OSError):
                        self.logs[path.name] = path.read_text(errors="replace")[-8000:]

    def stacks(self) -> None:
        """Have every Python process below the driver print its stacks (they run with PYTHONFAULTHANDLER), then read them."""
        for child in psutil.Process(self.process.pid).children(recursive=True):
            with suppress(psutil.Error):
                if "python" in child.name() or child.name().startswith(("ray::", "VLLM")):
                    child.send_signal(signal.SIGABRT)
        time.sleep(2)
        self.read_logs()


def sessions(pid: int) -> Iterator[Path]:
    """Temporary folders of the Ray heads below a process."""
    with suppress(psutil.Error):
        words = {w for child in psutil.Process(pid).children(recursive=True) for w in child.cmdline()}
        yield from {Path(w.partition("=")[2]) for w in words if w.startswith("--temp-dir=") or w.startswith("--temp_dir=")}


class Nvml:
    """Used memory of the first device, where its driver has NVML."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._handle = module.nvmlDeviceGetHandleByIndex(0)

    @classmethod
    def open(cls) -> Nvml | None:
        try:
            import pynvml

            pynvml.nvmlInit()
            return cls(pynvml)
        except Exception:  # noqa: BLE001  no library, no driver, no device: nothing to look at
            return None

    def used_gib(self) -> float:
        return round(self._module.nvmlDeviceGetMemoryInfo(self._handle).used / 2**30, 2)


def go(args: argparse.Namespace, residency: str, model: Path) -> dict[str, Any]:
    """One run, watched and ended in time -> what it left."""
    folder = Path(tempfile.mkdtemp(prefix=f"vime-grpo-{residency}-"))
    path = run_file(args, residency, folder, model)
    plan = command(vime("plan", "--platform", args.platform, path), limit_s=60)
    env = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
    with (folder / "driver.log").open("w") as log:
        words = [str(w) for w in vime("run", "--platform", args.platform, path)]
        process = subprocess.Popen(
            words, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, text=True, start_new_session=True
        )
    watch = Watch(process, folder)
    thread = threading.Thread(target=watch.look, daemon=True)
    thread.start()
    how = wait(watch, args)
    watch.stopped.set()
    thread.join(5)
    found = {
        "ended": how,
        "seconds": time.time() - watch.began,
        "plan": plan.output.splitlines(),
        **gathered(watch, args.steps),
    }
    wanted = "interrupted" if args.interrupt else "exit code 0"
    found["ok"] = how == wanted and len(found["steps"]) >= args.steps
    if not found["ok"]:
        found["logs"] = tails(watch)
    return found


def wait(watch: Watch, args: argparse.Namespace) -> str:
    """Until the run ends, its last measured step is over, or its time is up."""
    process, deadline = watch.process, time.monotonic() + args.limit
    while process.poll() is None:
        over = {row["step"] for row in watch.rows() if row["kind"] == "wall"}
        done = args.interrupt and args.steps in over
        if done or time.monotonic() > deadline:
            if not done:
                watch.stacks()
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(40)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10)
            return "interrupted" if done else f"stopped after {args.limit:g} s"
        time.sleep(0.25)
    return f"exit code {process.returncode}"


def gathered(watch: Watch, steps: int) -> dict[str, Any]:
    """What the rows say, by kind."""
    rows = watch.rows()
    found: dict[str, Any] = {"steps": [], "syncs": [], "walls": [], "memory": [], "events": []}
    for row in rows:
        at = {"step": row["step"], "t": round(row["time"] - watch.began, 2)}
        match row["kind"]:
            case "step":
                metrics = {n: v for n, v in row["metrics"].items() if n.startswith(("train/", "rollout/", "perf/"))}
                found["steps"].append({**at, "metrics": metrics, "seconds": row["seconds"]})
            case "sync":
                found["syncs"].append({**at, "metrics": row["metrics"], "seconds": row["seconds"]})
            case "wall":
                found["walls"].append({**at, "seconds": row["seconds"]})
            case "memory":
                found["memory"].append({**at, **row["data"]})
            case "event":
                found["events"].append({**at, **row["data"], "seconds": row["seconds"]})
    found["log_prob_differences"] = [[s["metrics"].get(name) for name in DIFFERENCES] for s in found["steps"][:steps]]
    if watch.memory:
        found["device_used_gib"] = {"peak": max(used for _, used in watch.memory), "samples": thinned(watch.memory)}
    return found


def thinned(samples: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Where the memory in use changed by more than 0.2 GiB."""
    kept: list[tuple[float, float]] = []
    for sample in samples:
        if not kept or abs(sample[1] - kept[-1][1]) > 0.2:
            kept.append(sample)
    return kept


def tails(watch: Watch) -> dict[str, list[str]]:
    """The last lines of the driver, the engines, the router, and of Ray's processes."""
    files = [watch.folder / "driver.log", *sorted((watch.folder / "run" / "logs").glob("*"))]
    found = {f.name: f.read_text(errors="replace").splitlines()[-TAIL_LINES:] for f in files if f.is_file()}
    rays = {name: text.splitlines()[-TAIL_LINES:] for name, text in watch.logs.items() if text.strip()}
    return {**found, **rays}


def main() -> int:
    args = words()
    record = Record(args.out / f"grpo-{args.shape}{'-graphs' if args.graphs else ''}.json", args.platform, again=args.again)
    model, shape = args.models / f"{args.shape}-{args.dtype}", SHAPES[args.shape]

    def make() -> dict[str, Any]:
        if (model / "prompts.jsonl").exists():
            return {"parameters": None, "note": "it was there"}
        count = write_model(model, shape, device=args.platform, dtype=args.dtype)
        write_prompts(model / "prompts.jsonl", shape, rows=256, tokens=PROMPT_TOKENS)
        return {"parameters": count, "bytes": (model / "model.safetensors").stat().st_size}

    if not (model / "prompts.jsonl").exists():
        record.parts.pop("model", None)
    record.run("model", make)
    for residency in args.residency:
        record.run(residency, lambda r=residency: go(args, r, model))
    return 0 if record.ok else 1


def words() -> argparse.Namespace:
    parser = arguments(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--dtype", help="of model and training (bfloat16; float32 on a host)")
    parser.add_argument("--residency", nargs="+", choices=("park", "resident"), default=["park", "resident"])
    parser.add_argument("--steps", type=int, default=3, help="measured steps (3)")
    parser.add_argument("--batch", type=int, default=8, help="prompts a step (8)")
    parser.add_argument("--group", type=int, default=4, help="responses to a prompt (4)")
    parser.add_argument("--response", type=int, default=64, help="longest response in tokens (64)")
    parser.add_argument("--micro-batch", type=int, default=4096, help="trainer.max_tokens_per_micro_batch (4096)")
    parser.add_argument("--recompute", default="none", choices=("none", "selective", "full"))
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--kv-gib", type=int, default=4, help="the engine's cache (4)")
    parser.add_argument("--utilization", type=float, default=0.2, help="of the device, free when vLLM starts (0.2)")
    parser.add_argument("--graphs", action="store_true", help="let vLLM compile and capture graphs")
    parser.add_argument("--interrupt", action="store_true", help="end after the last measured step, save nothing")
    parser.add_argument("--limit", type=float, default=240.0, metavar="S", help="seconds for one run (240)")
    parser.add_argument("--start-limit", type=float, default=150.0, metavar="S", help="seconds for each part to start (150)")
    parser.add_argument("--models", type=Path, default=Path(tempfile.gettempdir()) / "vime-models", metavar="DIR")
    args = parser.parse_args()
    args.dtype = args.dtype or ("float32" if args.platform == "cpu" else "bfloat16")
    return args


if __name__ == "__main__":
    sys.exit(main())
