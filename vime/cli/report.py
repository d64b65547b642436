"""`vime report RUN`: what a run did, as a page or as numbers."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any


def add_parser(subparsers: Any) -> None:
    """Add the command to `argparse`'s subparsers."""
    parser = subparsers.add_parser(
        "report",
        help="write one self-contained HTML page about a run, or print its numbers",
        description="Reads a run directory (finished, stopped or still going) and writes report.html into it.",
        allow_abbrev=False,
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="the run's directory: what `run.dir` names")
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON instead of writing a page")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where to write (the page, or with --json the numbers)")
    parser.set_defaults(handler=report)


def report(args: argparse.Namespace) -> int:
    """Write the page and print its path, or print the numbers. Raises DataError where RUN cannot be read."""
    if not args.json:
        from vime.observe.report import write_report

        print(write_report(args.run, out=args.out))
        return 0
    from vime.observe.summary import load_run, summarize

    text = json.dumps(summarize(load_run(args.run)), indent=2, ensure_ascii=False, allow_nan=False, default=str)
    if args.out is None:
        print(text)
    else:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(text + "\n", encoding="utf-8")
    return 0
