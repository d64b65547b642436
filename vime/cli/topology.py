"""`vime topology`: the shipped topologies, the schema, and a check of a file without a run."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vime.topology.rules import ResolvedRole


def add_parser(commands: Any) -> None:
    """Add `topology` and its actions."""
    parser = commands.add_parser("topology", help="list, show and check topologies", allow_abbrev=False)
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    listing = actions.add_parser("list", help="the topologies that come with vime", allow_abbrev=False)
    listing.set_defaults(handler=list_topologies)
    showing = actions.add_parser("show", help="the file of a shipped topology", allow_abbrev=False)
    showing.add_argument("name", metavar="NAME")
    showing.set_defaults(handler=show_topology)
    schema = actions.add_parser("schema", help="JSON Schema of a topology file", allow_abbrev=False)
    schema.set_defaults(handler=print_schema)
    checking = actions.add_parser("check", help="check a file's rules; no model, no machine", allow_abbrev=False)
    checking.add_argument("file", type=Path, metavar="FILE")
    checking.add_argument("--platform", default="auto", metavar="NAME", help="platform of pools that say `platform: auto`")
    checking.set_defaults(handler=check_topology)


def list_topologies(args: argparse.Namespace) -> int:
    """Print names and descriptions."""
    from vime.topology.load import load_topology, shipped_names

    names = shipped_names()
    width = max(map(len, names))
    for name in names:
        print(f"{name:<{width}}  {load_topology(name).topology.description}")
    return 0


def show_topology(args: argparse.Namespace) -> int:
    """Print a shipped file as it is. Raises TopologyError for an unknown name."""
    from vime.topology.load import shipped_text

    print(shipped_text(args.name), end="")
    return 0


def print_schema(args: argparse.Namespace) -> int:
    """Print the JSON Schema."""
    from vime.topology.model import json_schema

    print(json.dumps(json_schema(), indent=2))
    return 0


def check_topology(args: argparse.Namespace) -> int:
    """Print every broken rule, or what the roles come to."""
    from vime.errors import VimeError
    from vime.topology.load import load_topology

    try:
        loaded = load_topology(args.file, platform=args.platform)
    except VimeError as error:
        print(error)
        return 1
    for role in loaded.roles:
        print(f"{role.name}: {_seat(role)}")
    for note in loaded.notes:
        print(f"note: {note}")
    print(f"{args.file}: ok")
    return 0


def _seat(role: ResolvedRole) -> str:
    """What a role comes to, in a line."""
    from vime.topology.rules import several

    if role.endpoints:
        count = len(role.endpoints)
        return "rollout, 1 engine that runs already" if count == 1 else f"rollout, {count} engines that run already"
    what = {"train": f"train ({role.task})", "rollout": f"rollout ({role.stage})" if role.stage else "rollout"}[role.kind]
    engines = f" ({role.told})" if role.kind == "rollout" else ""
    devices = f"{role.part} of its devices" if role.part else f"{several(role.devices, 'device')}{engines}"
    return f"{what} on pool {role.pool}, {devices}"
