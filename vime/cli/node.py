"""`vime node`: make this machine a node of a Ray cluster that a run joins with `--ray-address`."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, Any

from vime.errors import PlacementError

if TYPE_CHECKING:
    from vime.cluster.node_start import NodeSpec


def add_parser(commands: Any) -> None:
    """Add `node` and its actions."""
    parser = commands.add_parser("node", help="make this machine a node of a Ray cluster", allow_abbrev=False)
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    start = actions.add_parser(
        "start", help="offer this machine's devices to a cluster, until the command is ended", allow_abbrev=False
    )
    start.add_argument("--platform", required=True, metavar="NAME", help="platform of this machine's devices")
    to = start.add_mutually_exclusive_group(required=True)
    to.add_argument("--address", metavar="HOST:PORT", help="join the cluster whose head listens here")
    to.add_argument("--head", action="store_true", help="begin a cluster")
    start.add_argument("--port", type=int, default=None, metavar="N", help="port of a head (default: 6379)")
    start.add_argument(
        "--host", default=None, metavar="IP", help="this machine's address to the others (default: Ray's choice)"
    )
    start.add_argument("--name", default=None, metavar="NAME", help="the node's name in Ray (default: its address)")
    start.add_argument("--slots", type=int, default=None, metavar="N", help="slots to offer, where devices are virtual")
    start.add_argument("--print", action="store_true", dest="show", help="print the plain `ray start` command and end")
    start.add_argument("ray_words", nargs="*", metavar="-- WORD", help="further words for `ray start`")
    start.set_defaults(handler=start_node)


def start_node(args: argparse.Namespace) -> int:
    """Run the node until it ends, or print its command. Raises PluginError for a platform that is not here."""
    from vime.cluster.node_start import run_node, shown

    spec = spec_of(args)
    if args.show:
        print(shown(spec))
        return 0
    return run_node(spec)


def spec_of(args: argparse.Namespace) -> NodeSpec:
    """What the words and this machine's platform say."""
    from vime.cluster.node_start import PORT, NodeSpec
    from vime.facts.diagnosis import ProbeContext
    from vime.planning.masks import scheduler_flags, visible_node
    from vime.platforms.discovery import PluginPolicy, discover

    if args.port is not None and not args.head:
        raise PlacementError("--port is of a head", where="vime node start", fix="write it into --address HOST:PORT")
    env = dict(os.environ)
    platform = discover(PluginPolicy.read(platform=args.platform)).platform(args.platform)
    inventory = platform.inventory(ProbeContext(env))
    binding = platform.ray_binding(inventory)
    if args.slots is not None and not inventory.virtual:
        what = f"--slots is for virtual devices; {platform.name} has {len(inventory.devices)} devices here"
        raise PlacementError(what, where="vime node start", fix=f"leave devices out with {' or '.join(binding.visible_env)}")
    count = len(visible_node(binding, inventory, env).devices) if args.slots is None else args.slots
    if count < 1:
        what = f"{platform.name} has no device to offer here"
        raise PlacementError(what, where="vime node start", fix=f"look at `vime doctor --platform {platform.name}`")
    return NodeSpec(
        resources={binding.resource: float(count)},
        labels=binding.labels,
        env=scheduler_flags(binding),
        unset=binding.unset_env,
        address=args.address,
        host=args.host,
        port=PORT if args.port is None else args.port,
        name=args.name,
        extra=tuple(args.ray_words),
    )
