"""`vime plugins`: which platforms are installed, which may load, and why the others may not."""

from __future__ import annotations

import argparse
import json
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

from vime.cli import plugins_new, plugins_trace, plugins_validate
from vime.errors import PluginError
from vime.hooks.api import API_TEXT
from vime.hooks.specs import RULES, first_line
from vime.platforms.discovery import Discovery, PluginPolicy, PluginRow, PluginStatus, discover

_COLUMNS = ("NAME", "STATUS", "DISTRIBUTION", "VERSION", "PARENT", "WHY")


def add_parser(commands: Any) -> None:
    """Add `plugins` and its actions."""
    parser = commands.add_parser("plugins", help="list and show platform plugins", allow_abbrev=False)
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    listing = actions.add_parser(
        "list", help="every installed plugin and its status; asks which one is this machine's", allow_abbrev=False
    )
    listing.add_argument("--all", action="store_true", help="also the hooks of each plugin and the full errors")
    listing.add_argument("--json", action="store_true", help="print JSON")
    listing.set_defaults(handler=list_plugins)
    showing = actions.add_parser("show", help="one plugin: hooks, parent, API, and why it is not active", allow_abbrev=False)
    showing.add_argument("name", metavar="NAME")
    showing.add_argument("--json", action="store_true", help="print JSON")
    showing.set_defaults(handler=show_plugin)
    plugins_new.add_parser(actions)
    plugins_trace.add_parser(actions)
    plugins_validate.add_parser(actions)


def list_plugins(args: argparse.Namespace) -> int:
    """Print the status table. Broken plugins are rows of it, not errors."""
    found = discover(PluginPolicy.read())
    found.check()
    chosen, problem = _detect(found)
    if args.json:
        plugins = [_as_json(row) for row in found.status]
        print(json.dumps({"api": API_TEXT, "auto": chosen, "auto_problem": problem, "plugins": plugins}, indent=2))
        return 0
    _print_table([(r.name, r.status, r.distribution, r.version, r.parent or "-", r.reason) for r in found.status])
    print(f"\n--platform auto: {chosen or problem}")
    for check in found.findings():
        if check.id == "plugin.unknown":
            print(f"{check.severity}: {check.finding}\n  fix: {check.fix}")
    if args.all:
        for row in found.status:
            print()
            _print_row(row)
    return 0


def _detect(found: Discovery) -> tuple[str | None, str | None]:
    """What `--platform auto` would choose; its lineage becomes active."""
    try:
        name = found.detect()
        found.platform(name)
    except PluginError as error:
        return None, str(error)
    return name, None


def show_plugin(args: argparse.Namespace) -> int:
    """Print one plugin. Showing it does not allow it: one that may not load is not imported."""
    found = discover(PluginPolicy.read())
    if found.row(args.name).status is PluginStatus.AVAILABLE:
        found.check(args.name)
        found.probe(args.name)
    row = found.row(args.name)
    if args.json:
        print(json.dumps(_as_json(row), indent=2))
    else:
        _print_row(row)
    return 0


def _as_json(row: PluginRow) -> Mapping[str, Any]:
    return {
        "name": row.name,
        "status": str(row.status),
        "reason": row.reason,
        "distribution": row.distribution,
        "version": row.version,
        "module": row.module,
        "first_party": row.first_party,
        "parent": row.parent,
        "api": row.api,
        "hooks": list(row.hooks),
        "error": _traceback(row),
    }


def _traceback(row: PluginRow) -> str | None:
    return "".join(traceback.format_exception(row.error)) if row.error is not None else None


def _print_table(rows: Sequence[Sequence[str]]) -> None:
    lines = [_COLUMNS, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(_COLUMNS) - 1)]
    for line in lines:
        cells = [text.ljust(width) for text, width in zip(line, widths, strict=False)]
        print("  ".join([*cells, line[-1].splitlines()[0] if line[-1] else ""]).rstrip())


def _print_row(row: PluginRow) -> None:
    origin = "first-party" if row.first_party else "third-party"
    print(f"{row.name}: {row.status}" + (f", {row.reason}" if row.reason else ""))
    print(f"  distribution  {row.distribution} {row.version} ({origin})")
    print(f"  module        {row.module}")
    print(f"  parent        {row.parent or 'unknown until it is loaded'}")
    print(f"  hook API      {row.api or 'no range in its metadata'} (this is {API_TEXT})")
    for hook in RULES:
        if hook in row.hooks:
            print(f"  {hook:<22}{first_line(hook)}")
    if (text := _traceback(row)) is not None:
        print("  original error:")
        print("    " + text.rstrip().replace("\n", "\n    "))
