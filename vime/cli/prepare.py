"""From command-line words to a checked configuration and a plan: what `run`, `check` and `plan` have in common."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vime.errors import ConfigError

if TYPE_CHECKING:
    from vime.config.load import LoadedConfig
    from vime.config.schema import Config
    from vime.facts.inventory import NodeInventory
    from vime.planning.plan import Plan
    from vime.platforms.discovery import Discovery
    from vime.topology.load import LoadedTopology

AUTO = "auto"


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """The words that name a run: file, platform, topology, overrides."""
    parser.add_argument("config", type=Path, metavar="CONFIG", help="run file")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="values over the file's, e.g. schedule.num_steps=10")
    parser.add_argument("--platform", default=None, metavar="NAME", help="platform of pools that say `platform: auto`")
    parser.add_argument("--topology", default=None, metavar="T", help="a shipped topology's name, or a file")


@dataclass(frozen=True)
class Prepared:
    """A run that is checked and planned. `plugins` is what the driver resolved."""

    loaded: LoadedConfig
    topology: LoadedTopology
    plan: Plan
    plugins: Discovery

    @property
    def config(self) -> Config:
        return self.loaded.config


def overrides_of(args: argparse.Namespace) -> list[str]:
    """The words after the file, with `--platform` and `--topology` as the keys they stand for."""
    words = list(args.overrides)
    for word in words:
        if "=" not in word:
            raise ConfigError(f"expected KEY=VALUE, got {word!r}", where="command line", fix="e.g. schedule.num_steps=10")
    words += [f"platform={args.platform}"] if args.platform is not None else []
    words += [f"topology={args.topology}"] if args.topology is not None else []
    return words


def prepare(args: argparse.Namespace) -> Prepared:
    """Load, check and plan on this machine. Raises every error that the files and the machine can give."""
    from vime.config.load import load_config

    return prepare_loaded(load_config(args.config, overrides=overrides_of(args)))


def prepare_loaded(loaded: LoadedConfig, *, inventories: Mapping[str, tuple[NodeInventory, ...]] | None = None) -> Prepared:
    """Check the model, the data and the topology of a configuration, and plan it. Needs no torch.

    `inventories` by pool replace a look at this machine.
    """
    import os

    from vime.data.prompts import check_prompt_file
    from vime.facts.diagnosis import ProbeContext
    from vime.models.registry import read_shape
    from vime.planning.make import make_plan
    from vime.planning.needs import needs_from
    from vime.platforms.discovery import discover
    from vime.platforms.policy import PluginPolicy
    from vime.topology.load import fill_platform, load_topology

    config = loaded.config
    model = read_shape(config.model.path)
    for path in (config.data.path, *(s.path for s in config.evaluation.sets)):
        check_prompt_file(config.data.model_copy(update={"path": path}))
    topology = load_topology(loaded.topology_source, platform=config.platform)
    policy = PluginPolicy.read(platform=config.platform, allow=config.plugins.allow, deny=config.plugins.deny)
    plugins = discover(policy)
    if AUTO in topology.platforms():
        topology = fill_platform(topology, plugins.detect())
    platforms = {name: plugins.platform(name) for name in topology.platforms()}
    if inventories is None:
        here = {name: platform.inventory(ProbeContext(dict(os.environ))) for name, platform in platforms.items()}
        inventories = {name: (here[pool.platform],) for name, pool in topology.topology.pools.items()}
    plan = make_plan(topology, model=model, needs=needs_from(config), platforms=platforms, inventories=inventories)
    return Prepared(loaded, topology, plan, plugins)
