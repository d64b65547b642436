"""`vime plan`: placement, memory, transports and times of a run, before anything is started."""

from __future__ import annotations

import argparse
import json
from typing import Any

from vime.cli.prepare import add_run_arguments, hardware_of, overrides_of


def add_parser(commands: Any) -> None:
    """Add `plan`."""
    parser = commands.add_parser("plan", help="print placement, memory and transports of a run", allow_abbrev=False)
    add_run_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print JSON, with every term of every estimate")
    parser.set_defaults(handler=handle)


def handle(args: argparse.Namespace) -> int:
    """Print the plan. Raises every VimeError of configuration, model, topology and plan."""
    from vime.cli.layout import lay_out, plan_layout
    from vime.config.load import load_config
    from vime.models.registry import read_shape
    from vime.planning.explain import explain_json, explain_text

    loaded, hardware = load_config(args.config, overrides=overrides_of(args)), hardware_of(args, live=False)
    layout = lay_out(loaded, hardware)
    plan = plan_layout(loaded, layout, read_shape(loaded.config.model.path), hardware)
    print(json.dumps(explain_json(plan), indent=2) if args.json else explain_text(plan))
    return 0
