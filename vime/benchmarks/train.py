"""`vime bench train`: a trainer rank's speed beside the device's own matrix product, its memory beside the planned one.

One child measures part after part; where it dies, another goes on with the next. Weights are drawn where they are; no engine,
no Ray. With `--layouts` several ranks are measured beside one instead (`parity.py`), with `--against` one rank beside a plain
training loop (`against.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from vime.benchmarks import against, parity
from vime.benchmarks.engines import open_record
from vime.benchmarks.shapes import SHAPES
from vime.data.tiny_model import tiny_config
from vime.errors import ConfigError

RECOMPUTE = ("none", "selective", "full")
MARK = "\x1e"
"""Before a line of the child that is a result."""

LENGTHS = {True: (512, 128), False: (8192, 2048)}
"""(tokens of a micro-batch, of a row) on slots of a host, on a device."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtype", help="default: the platform's")
    parser.add_argument("--tokens", type=int, help="of a micro-batch (8192; on a host 512)")
    parser.add_argument("--length", type=int, help="of a row (2048; on a host 128)")
    parser.add_argument("--micro-batches", type=int, default=2, help="of a step (2)")
    parser.add_argument("--steps", type=int, default=3, help="measured steps after the first (3)")
    parser.add_argument("--recompute", nargs="+", default=list(RECOMPUTE), choices=RECOMPUTE, help="in turn (all)")
    parser.add_argument("--chunk", type=int, default=1024, help="rows of logits at once (1024)")
    parser.add_argument("--product", type=int, help="size of the reference product (8192; on a host 1024)")
    parser.add_argument("--threads", type=int, default=1, help="host threads (1)")
    parser.add_argument("--megatron", default="{}", help="JSON for trainer.megatron")
    parity.add_layout_arguments(parser)
    against.add_against_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """One part each: the head, accuracy (tiny only), every kind of recomputation; or the layouts, or pairs with a plain loop.

    1 where one failed.
    """
    from vime.benchmarks.rank import ask_platform

    if args.against:
        return against.run(args)
    asked = ask_platform(args.platform, dtype=args.dtype)
    host = asked.inventory.virtual
    args.tokens, args.length = (given or known for given, known in zip((args.tokens, args.length), LENGTHS[host], strict=True))
    args.product = args.product or (1024 if host else 8192)
    args.dtype = asked.request.dtype
    if args.tokens < args.length:
        raise ConfigError("--tokens must hold at least one row of --length tokens", where="command line", fix="raise --tokens")
    if args.layouts:
        args.small = LENGTHS[True]
        parity.require_rows(args)
        return parity.run(args)
    record = open_record(args, "train")
    with tempfile.TemporaryDirectory(prefix="vime-bench-") as folder:
        config = (
            json.loads((args.model / "config.json").read_text())
            if args.model
            else tiny_config(SHAPES[args.shape], dtype=args.dtype)
        )
        (Path(folder) / "config.json").write_text(json.dumps(config))
        names = [
            *(("accuracy",) if args.model is None and args.shape == "tiny" else ()),
            *(f"recompute {kind}" for kind in args.recompute),
            "head",
        ]
        left = [part for part in names if not record.parts.get(part, {}).get("ok")]
        parts = Parts(words_of(args, Path(folder)), left, limit_s=args.limit)
        try:
            for part in names:
                record.run(part, lambda p=part: parts.result(p))
        finally:
            parts.close()
    for part in record.parts.values():
        if "memory" in part:
            part["planned_bytes"] = planned_bytes(args, config, part["recompute"])
    record.save()
    print("\n".join(report(record.parts)))
    return 0 if record.ok else 1


class Parts:
    """Results of parts, each measured when it is asked for. One child measures them in turn and prints a line for each."""

    def __init__(self, words: Mapping[str, Any], names: Sequence[str], *, limit_s: float) -> None:
        self._words, self._names, self._limit_s = words, list(names), limit_s
        self._deadline = time.monotonic() + limit_s
        self._child: subprocess.Popen[str] | None = None
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._tail: deque[str] = deque(maxlen=25)

    def result(self, name: str) -> dict[str, Any]:
        """Raises RuntimeError with the child's last lines where it ended before, TimeoutError at the limit."""
        if self._child is None:
            self._start(name)
        while True:
            try:
                line = self._lines.get(timeout=max(0.1, self._deadline - time.monotonic()))
            except queue.Empty:
                self.close()
                raise TimeoutError(f"stopped at the limit of {self._limit_s:g} s: " + "\n".join(self._tail)) from None
            if line is None:
                self.close()
                raise RuntimeError(f"the process that measured {name} ended: " + "\n".join(self._tail))
            if line.startswith(MARK):
                found = json.loads(line.removeprefix(MARK))
                if not found.get("ok", True):
                    self.close()  # What failed half-way may have left groups and memory behind.
                return found
            self._tail.append(line.rstrip())

    def _start(self, first: str) -> None:
        """With the parts from `first` on: what came before is done or has failed."""
        words = {**self._words, "parts": self._names[self._names.index(first) :]}
        self._lines, self._tail = queue.Queue(), deque(maxlen=25)
        self._child = subprocess.Popen(
            [sys.executable, "-m", "vime.benchmarks.train_parts", json.dumps(words)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        threading.Thread(target=self._read, args=(self._child, self._lines), daemon=True).start()

    @staticmethod
    def _read(child: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
        for line in child.stdout or ():
            lines.put(line)
        lines.put(None)

    def close(self) -> None:
        """End the child and what it started."""
        if self._child is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._child.pid, signal.SIGKILL)
            self._child.wait()
            self._child = None


def words_of(args: argparse.Namespace, model: Path) -> dict[str, Any]:
    """What the child needs to know."""
    names = ("platform", "dtype", "threads", "tokens", "length", "micro_batches", "steps", "chunk", "product")
    return {**{name: getattr(args, name) for name in names}, "model": str(model), "megatron": json.loads(args.megatron)}


# ---- what the plan says of the same rank


def planned_bytes(args: argparse.Namespace, config: Mapping[str, Any], recompute: str) -> dict[str, int]:
    """Bytes by tag that the planner expects of this rank."""
    from vime.facts.process import Parallel
    from vime.models.registry import family_of
    from vime.planning.amounts import trainer_amounts
    from vime.planning.needs import PlanNeeds

    needs = PlanNeeds(
        dtype=args.dtype, micro_batch_tokens=args.tokens, log_prob_chunk_tokens=args.chunk, recompute=recompute, samples=False
    )
    found: dict[str, int] = {}
    for amount in trainer_amounts(family_of(config).shape(config), args.dtype, Parallel(), needs):
        found[str(amount.tag)] = found.get(str(amount.tag), 0) + amount.num_bytes
    return found


def compared(part: Mapping[str, Any]) -> dict[str, tuple[int, int | None]]:
    """(planned, measured) bytes by tag. Activations are the peak over what is held; a host does not count them."""
    held = part["memory"]["bytes_by_tag"]
    counted = part["memory"]["held_bytes"] > 0
    measured: dict[str, int | None] = {
        **held,
        "activations": part["memory"]["peak_bytes"] - sum(held.values()) if counted else None,
    }
    return {tag: (size, measured.get(tag)) for tag, size in part["planned_bytes"].items()}


def report(parts: Mapping[str, Any]) -> Iterator[str]:
    """The table; the last line of each kind of recomputation is its ratio to the matrix product."""
    if (accuracy := parts.get("accuracy")) and accuracy["ok"]:
        yield f"log-probs against float64: mean {accuracy['mean_abs']:.2e}, max {accuracy['max_abs']:.2e} ({accuracy['dtype']})"
    if (head := parts.get("head")) and head["ok"]:
        for rows, chunk in head["chunks"].items():
            over = chunk["peak_over_held_bytes"]
            more = "" if over is None else f", {over / 2**30:.2f} GiB over what is held"
            yield f"head, {head['rows']} rows, {rows} at once: {chunk['seconds']:.4f} s{more}"
    yield from _trainings(part for part in parts.values() if part["ok"] and "memory" in part)
    for name, part in parts.items():
        if not part["ok"]:
            yield f"{name} failed: {part.get('error', '')[-400:]}"


def _trainings(parts: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    for part in parts:
        yield f"recompute {part['recompute']}: {part['tokens_per_s']:.0f} tokens/s, {part['tflops_6n']:.2f} TFLOP/s (6N)"
        for tag, (planned, measured) in compared(part).items():
            beside = "not counted" if measured is None else f"{measured / 2**20:10.1f} MiB  {_ratio(measured, planned)}"
            yield f"  {tag:<14} planned {planned / 2**20:10.1f} MiB, measured {beside}"
        for turn in part["park"]["rounds"]:
            yield f"  parked in {turn['park_s']:.3f} s, back in {turn['wake_s']:.3f} s ({part['park']['bytes'] / 1e9:.2f} GB)"
        yield (
            f"  with attention {part['tflops_with_attention']:.2f} TFLOP/s of {part['product']['tflops']:.2f} of a product: "
            f"ratio {part['ratio_to_product']:.3f}"
        )


def _ratio(measured: int, planned: int) -> str:
    return f"x {measured / planned:.2f}" if planned else ""
