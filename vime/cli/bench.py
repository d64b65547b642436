"""`vime bench NAME`: measurements, each a ratio to a floor of the same run. A name's module is imported when it is run."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path
from typing import Any

BENCHES: dict[str, str] = {
    "sync": "a publication of weights beside copies of the same bytes",
    "sleep": "an engine's sleep and a trainer's parking beside vLLM's own sleep and plain copies",
    "rollout": "tokens per second through engine server, router and client beside bare vLLM",
    "train": "a trainer rank's tokens per second beside the device's own matrix product; several ranks beside one",
    "step": "whole steps of a run, phase by phase, beside what its plan says",
}


def add_parser(commands: Any) -> None:
    """Add `bench`. What stands after the name is read by `parser_of` once the name is known."""
    parser = commands.add_parser(
        "bench",
        help="measure a part beside its floor",
        description="Measure a part of vime beside its floor. `vime bench NAME --help` lists the words of one.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="\n".join(f"  {name:<9} {about}" for name, about in BENCHES.items()),
        allow_abbrev=False,
    )
    parser.add_argument("name", choices=BENCHES, metavar="NAME", help=", ".join(BENCHES))
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="...", help="words of NAME")
    parser.set_defaults(handler=handle)


def handle(args: argparse.Namespace) -> int:
    """Run one benchmark; 1 where a part of it failed."""
    return int(_module(args.name).run(parser_of(args.name).parse_args(args.words)))


def parser_of(name: str) -> argparse.ArgumentParser:
    """The words that all share, and those of the benchmark's own `add_arguments`."""
    from vime.benchmarks.shapes import SHAPES

    parser = argparse.ArgumentParser(prog=f"vime bench {name}", description=BENCHES[name], allow_abbrev=False)
    parser.add_argument("--platform", default="cpu", metavar="NAME", help="an installed platform (cpu)")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--shape", choices=list(SHAPES), default="tiny", help="random weights of this size (tiny)")
    which.add_argument("--model", type=Path, default=None, metavar="DIR", help="a model folder instead of random weights")
    parser.add_argument("--out", type=Path, default=Path("runs") / "bench", metavar="DIR", help="folder of the JSON files")
    parser.add_argument("--limit", type=float, default=300.0, metavar="S", help="seconds for the whole of it (300)")
    parser.add_argument("--again", action="store_true", help="run parts that are done already too")
    _module(name).add_arguments(parser)
    return parser


def _module(name: str) -> Any:
    return importlib.import_module(f"vime.benchmarks.{name}")
