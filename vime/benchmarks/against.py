"""`vime bench train --against transformers`: a trainer rank beside a plain training loop, step for step in turn.

Each side is a process with one thread. Both take the same optimizer steps on the same samples from the same weights; a loss
or a gradient norm that differs fails the part, because the work was not the same then.
"""

from __future__ import annotations

import argparse
import copy
import json
import multiprocessing
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from vime.benchmarks.against_side import GROUP, KINDS, SIDES, serve
from vime.benchmarks.comparing import relative
from vime.benchmarks.engines import Clock, Here, look, model_of, open_record
from vime.benchmarks.shapes import SHAPES
from vime.errors import ConfigError, TrainerError

OURS, THEIRS = SIDES
TOKENS, LENGTH = 1024, 128
"""Of a micro-batch and of a row."""
LOSS_LIMIT, NORM_LIMIT, ROUNDING = 1e-5, 1e-4, 1e-7
"""Largest relative differences of losses and of gradient norms; losses may differ by what rounding leaves near 0."""

Ask = Callable[[str, str, int], dict[str, float]]


def add_against_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--against", choices=(THEIRS,), help="compare with a plain training loop on the same host, in float32")
    add("--shapes", nargs="+", default=["2m", "17m"], choices=list(SHAPES), help="with --against (2m 17m)")
    add("--pairs", type=int, default=8, help="with --against: measured steps of each side (8)")


def run(args: argparse.Namespace) -> int:
    """One part for each model; 1 where one failed. Raises ConfigError for what cannot be compared."""
    clock, here = Clock(args.limit), look(args)
    args.tokens, args.length = args.tokens or TOKENS, args.length or LENGTH
    check(args, here)
    args.dtype = "float32"
    record = open_record(args, f"train-against-{args.against}")
    for name, words in models(args, here, clock):
        record.run(name, lambda w=words: compared(w, args.pairs, clock))
    print("\n".join(report(record.parts)))
    return 0 if record.ok else 1


def check(args: argparse.Namespace, here: Here) -> None:
    """Raises ConfigError unless both sides can do the same work and processor seconds count it."""
    wrong = None
    if not here.node.virtual:
        wrong = "--against counts processor seconds, which say nothing about an accelerator", "use --platform cpu"
    elif args.dtype not in (None, "float32"):
        wrong = f"--against compares losses in float32, not in {args.dtype}", "leave --dtype out"
    elif args.threads != 1:
        wrong = "--against has one thread a side", "leave --threads out"
    elif args.length < 8 or args.tokens // args.length < 1 or args.tokens // args.length * args.micro_batches % GROUP:
        wrong = f"a step of --against has whole groups of {GROUP} rows", "change --tokens, --length or --micro-batches"
    elif args.pairs < 1:
        wrong = "--pairs must be at least 1", "raise it"
    if wrong is not None:
        raise ConfigError(wrong[0], where="command line", fix=wrong[1])


def models(args: argparse.Namespace, here: Here, clock: Clock) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, words for both sides) of `--model`, or of random weights of each of `--shapes`."""
    names = ("platform", "tokens", "length", "micro_batches", "chunk")
    common = {**{name: getattr(args, name) for name in names}, "megatron": json.loads(args.megatron)}
    for shape in args.shapes if args.model is None else (None,):
        own = copy.copy(args)
        own.shape = shape
        folder = model_of(own, here, clock)
        vocab = json.loads((folder / "config.json").read_text())["vocab_size"]
        yield shape or folder.name, {**common, "model": str(folder.resolve()), "vocab": vocab}


# ---- both sides in turn


def turns(pairs: int) -> Iterator[tuple[str, str]]:
    """Who goes first and second in each pair: A B, B A, A B, ..."""
    for pair in range(pairs):
        yield (OURS, THEIRS) if pair % 2 == 0 else (THEIRS, OURS)


def compared(words: Mapping[str, Any], pairs: int, clock: Clock) -> dict[str, Any]:
    """By kind of batch: a first step of each side, which is not counted, then pairs. Raises TrainerError where work differs."""
    found: dict[str, Any] = {}
    with both_sides(words, clock) as ask:
        for kind in KINDS:
            rows: dict[str, list[dict[str, float]]] = {name: [] for name in SIDES}
            for number, pair in enumerate(turns(pairs + 1)):
                for name in pair:
                    rows[name].append(ask(name, kind, number))
            found[kind] = summary(rows)
    return {"batches": found}


@contextmanager
def both_sides(words: Mapping[str, Any], clock: Clock) -> Iterator[Ask]:
    """`ask(side, kind of batch, number of step)` gives that step's figures; one side works at a time. Both end here."""
    spawn = multiprocessing.get_context("spawn")
    calls: dict[str, Connection] = {}
    processes = []

    def answer(name: str) -> dict[str, Any]:
        while not calls[name].poll(clock.left(1.0)):
            pass
        try:
            found = calls[name].recv()
        except EOFError:
            raise TrainerError(f"the process of {name} ended without an answer", fix="look for a kill for memory") from None
        if "error" in found:
            raise TrainerError(found["error"])
        return found

    def ask(name: str, kind: str, number: int) -> dict[str, float]:
        calls[name].send((kind, number))
        return answer(name)

    try:
        for name in SIDES:
            calls[name], theirs = spawn.Pipe()
            processes.append(spawn.Process(target=serve, args=(theirs, name, dict(words)), daemon=True))
            processes[-1].start()
            theirs.close()
        for name in SIDES:
            answer(name)
        yield ask
    finally:
        for process in processes:
            process.kill()
            process.join()


def summary(rows: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, Any]:
    """Tokens per processor second of each side and the ratio of each pair, without the first step.

    Raises TrainerError where loss or gradient norm of any step differ by more than their limits.
    """
    steps = list(zip(rows[OURS], rows[THEIRS], strict=True))
    losses = [relative(ours["loss"], theirs["loss"]) for ours, theirs in steps]
    norms = [relative(ours["grad_norm"], theirs["grad_norm"]) for ours, theirs in steps]
    for number, (loss, norm) in enumerate(zip(losses, norms, strict=True)):
        ours, theirs = steps[number]
        near = abs(ours["loss"] - theirs["loss"]) <= ROUNDING
        if not ((near or loss <= LOSS_LIMIT) and norm <= NORM_LIMIT):
            raise TrainerError(
                f"step {number} was not the same work: losses differ by {loss:.1e} (limit {LOSS_LIMIT:g}), gradient norms by"
                f" {norm:.1e} (limit {NORM_LIMIT:g}); {OURS} {dict(ours)}, {THEIRS} {dict(theirs)}"
            )
    ratios = [theirs["cpu_s"] / ours["cpu_s"] for ours, theirs in steps[1:]]
    return {
        "tokens_per_cpu_s": {name: statistics.median(r["tokens"] / r["cpu_s"] for r in own[1:]) for name, own in rows.items()},
        "ratios": ratios,
        "ratio": statistics.median(ratios),
        "largest_relative_loss_difference": max(losses),
        "largest_relative_norm_difference": max(norms),
        "steps": {name: [dict(row) for row in own] for name, own in rows.items()},
    }


def report(parts: Mapping[str, Any]) -> Iterator[str]:
    """Two lines for each kind of batch; the second is the ratio."""
    for name, part in parts.items():
        for kind, found in part.get("batches", {}).items():
            speeds = ", ".join(f"{side} {speed:.0f}" for side, speed in found["tokens_per_cpu_s"].items())
            apart = f"losses differ by {found['largest_relative_loss_difference']:.1e} at most"
            yield f"{name}, {kind}: {speeds} tokens per processor second; {apart}"
            low, high = min(found["ratios"]), max(found["ratios"])
            yield f"  {OURS} / {THEIRS}: {found['ratio']:.3f} ({low:.3f} to {high:.3f} in {len(found['ratios'])} pairs)"
        if not part["ok"]:
            yield f"{name} failed: {part.get('error', '')[-1500:]}"
