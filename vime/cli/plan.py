"""`vime plan`: placement, memory, transports and times of a run, before anything is started."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vime.cli.prepare import AUTO, add_run_arguments, overrides_of
from vime.errors import PlanError

if TYPE_CHECKING:
    from vime.config.load import LoadedConfig
    from vime.facts.diagnosis import RecordedFixture
    from vime.facts.inventory import NodeInventory
    from vime.facts.model import ModelShape
    from vime.planning.plan import Plan
    from vime.platforms.lineage import Platform
    from vime.topology.load import LoadedTopology


def add_parser(commands: Any) -> None:
    """Add `plan`."""
    parser = commands.add_parser("plan", help="print placement, memory and transports of a run", allow_abbrev=False)
    add_run_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print JSON, with every term of every estimate")
    parser.add_argument(
        "--inventory", type=Path, action="append", default=[], metavar="FILE", help="a recording of `vime doctor --record`"
    )
    parser.set_defaults(handler=handle)


def handle(args: argparse.Namespace) -> int:
    """Print the plan. Raises every VimeError of configuration, model, topology and plan."""
    from vime.config.load import load_config
    from vime.models.registry import read_shape
    from vime.planning.explain import explain_json, explain_text

    loaded = load_config(args.config, overrides=overrides_of(args))
    topology, platforms = topology_and_platforms(loaded)
    recordings = [read_recording(path) for path in args.inventory]
    plan = plan_on_paper(loaded, topology, platforms, read_shape(loaded.config.model.path), recordings=recordings)
    print(json.dumps(explain_json(plan), indent=2) if args.json else explain_text(plan))
    return 0


def topology_and_platforms(loaded: LoadedConfig) -> tuple[LoadedTopology, dict[str, Platform]]:
    """The run's topology with every platform filled in, and the platforms themselves. Raises TopologyError, PluginError."""
    from vime.platforms.discovery import discover
    from vime.platforms.policy import PluginPolicy
    from vime.topology.load import fill_platform, load_topology

    config = loaded.config
    topology = load_topology(loaded.topology_source, platform=config.platform)
    plugins = discover(PluginPolicy.read(platform=config.platform, allow=config.plugins.allow, deny=config.plugins.deny))
    if AUTO in topology.platforms():
        topology = fill_platform(topology, plugins.detect())
    return topology, {name: plugins.platform(name) for name in topology.platforms()}


def plan_on_paper(
    loaded: LoadedConfig,
    topology: LoadedTopology,
    platforms: Mapping[str, Platform],
    model: ModelShape,
    *,
    recordings: list[RecordedFixture],
) -> Plan:
    """A plan for hardware that need not be here: recordings first, then this host for its own slots, else nominal devices."""
    from vime.planning.make import make_plan
    from vime.planning.needs import needs_from

    nodes = _nodes(topology, platforms, recordings)
    return make_plan(topology, model=model, needs=needs_from(loaded.config), platforms=platforms, inventories=nodes)


def _nodes(
    topology: LoadedTopology, platforms: Mapping[str, Platform], recordings: list[RecordedFixture]
) -> dict[str, tuple[NodeInventory, ...]]:
    from vime.facts.diagnosis import ProbeContext

    found: dict[str, tuple[NodeInventory, ...]] = {}
    for name, pool in topology.topology.pools.items():
        platform = platforms[pool.platform]
        mine = [r for r in recordings if r.platform in platform.lineage]
        if mine:
            found[name] = tuple(platform.inventory(ProbeContext({}, recording=r.data)) for r in mine)
        elif pool.device is None and pool.nodes == 1 and all(p.virtual for p in platform.profiles()):
            found[name] = (platform.inventory(ProbeContext(dict(os.environ))),)
    return found


def read_recording(path: Path) -> RecordedFixture:
    """A file of `vime doctor --record`. Raises PlanError."""
    from vime.facts.diagnosis import RecordedFixture

    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return RecordedFixture(data["platform"], data["origin"], data["date"], data["data"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        what = f"not a recording: {type(error).__name__}: {error}"
        raise PlanError(what, where=str(path), fix="write one with `vime doctor --record FILE`") from None
