"""`vime plan`: placement, memory, transports and times of a run, before anything is started; or beside what a run measured."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from vime.cli.prepare import add_run_arguments, hardware_of, overrides_of


def add_parser(commands: Any) -> None:
    """Add `plan`."""
    parser = commands.add_parser("plan", help="print placement, memory and transports of a run", allow_abbrev=False)
    add_run_arguments(parser)
    parser.add_argument("--verbose", action="store_true", help="print the platforms' answers and rates too")
    parser.add_argument("--json", action="store_true", help="print JSON, with every term of every estimate")
    parser.add_argument(
        "--compare", type=Path, default=None, metavar="RUN_DIR", help="print the plan's numbers beside those of this run"
    )
    parser.add_argument(
        "--assume",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a value for something that the seconds of a step rest on, e.g. response_tokens=4096; the plan lists all",
    )
    parser.set_defaults(handler=handle)


def handle(args: argparse.Namespace) -> int:
    """Print the plan. Raises every VimeError of configuration, model, topology and plan; DataError for a run without rows."""
    from vime.cli.layout import lay_out, plan_layout
    from vime.config.load import load_config
    from vime.models.registry import read_shape
    from vime.planning.assume import parse_words
    from vime.planning.compare import compare, compare_json, compare_text, rows_of_run
    from vime.planning.explain import explain_json, explain_text

    assume = parse_words(args.assume)
    rows = None if args.compare is None else rows_of_run(args.compare)
    loaded, hardware = load_config(args.config, overrides=overrides_of(args)), hardware_of(args, live=False)
    layout = lay_out(loaded, hardware)
    plan = plan_layout(loaded, layout, read_shape(loaded.config.model.path), hardware)
    if rows is None:
        said = (
            json.dumps(explain_json(plan, assume), indent=2) if args.json else explain_text(plan, assume, verbose=args.verbose)
        )
        print(said)
        return 0
    compared = compare(plan, rows)
    print(json.dumps(compare_json(compared), indent=2) if args.json else compare_text(compared))
    return 0
