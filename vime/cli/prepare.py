"""From command-line words to a checked configuration and a plan: what `run`, `check` and `plan` have in common."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vime.errors import ConfigError

if TYPE_CHECKING:
    from vime.cli.recordings import Recording
    from vime.cluster.joined import JoinedCluster
    from vime.config.load import LoadedConfig
    from vime.config.schema import Config
    from vime.planning.plan import Plan
    from vime.platforms.discovery import Discovery
    from vime.topology.load import LoadedTopology


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """The words that name a run: file, platform, topology, overrides."""
    parser.add_argument("config", type=Path, metavar="CONFIG", help="run file")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="values over the file's, e.g. schedule.num_steps=10")
    parser.add_argument("--platform", default=None, metavar="NAME", help="platform of pools that say `platform: auto`")
    parser.add_argument("--topology", default=None, metavar="T", help="a shipped topology's name, or a file")
    parser.add_argument("--device", default=None, metavar="NAME", help="nominal device of pools that name none, for a plan")
    parser.add_argument(
        "--inventory",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="plan for a recording of `vime doctor --record`; once for every node",
    )


@dataclass(frozen=True)
class Hardware:
    """Where the nodes of a plan come from.

    `live` is a run: the joined cluster, or this machine, or the platform's own error. Otherwise the plan is made on paper:
    from `recordings`, else from this machine where it is the platform's and what the topology asks for, else from nominal
    devices, of which `device` picks one for pools that name none.
    """

    live: bool = False
    recordings: tuple[Recording, ...] = ()
    device: str | None = None


@dataclass(frozen=True)
class Prepared:
    """A run that is checked and planned. `plugins` is what the driver resolved, `cluster` the one that is joined."""

    loaded: LoadedConfig
    topology: LoadedTopology
    plan: Plan
    plugins: Discovery
    cluster: JoinedCluster | None = None

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
    address = getattr(args, "ray_address", None)
    words += [f"cluster.address={address}"] if address is not None else []
    return words


def hardware_of(args: argparse.Namespace, *, live: bool) -> Hardware:
    """The hardware that the words ask for. Raises ConfigError for words of a plan in a run, PluginError for a bad recording."""
    from vime.cli.recordings import read_recording

    if live and (args.inventory or args.device is not None):
        word = "--inventory" if args.inventory else "--device"
        raise ConfigError(f"{word} is for plans; a run takes the hardware that is here", fix=f"add --dry-run, or remove {word}")
    return Hardware(live, tuple(read_recording(path) for path in args.inventory), args.device)


def prepare(args: argparse.Namespace) -> Prepared:
    """Load, check and plan: for this machine, or with `--dry-run` on paper.

    Raises every error that the files and the hardware can give.
    """
    from vime.config.load import load_config

    hardware = hardware_of(args, live=not args.dry_run)
    return prepare_loaded(load_config(args.config, overrides=overrides_of(args)), hardware)


def prepare_loaded(loaded: LoadedConfig, hardware: Hardware) -> Prepared:
    """Check the model, the data and the topology of a configuration, and plan it. Needs no torch."""
    from vime.cli.layout import join, lay_out, plan_layout
    from vime.data.prompts import check_prompt_file
    from vime.models.registry import read_shape

    config = loaded.config
    model = read_shape(config.model.path)
    for path in (config.data.path, *(s.path for s in config.evaluation.sets)):
        check_prompt_file(config.data.model_copy(update={"path": path}))
    layout, cluster = lay_out(loaded, hardware), None
    if hardware.live and config.cluster.address is not None:
        layout, cluster = join(layout, config.cluster.address)
    return Prepared(loaded, layout.topology, plan_layout(loaded, layout, model, hardware, cluster), layout.plugins, cluster)


_NEEDED = (("*.safetensors", "no weights (*.safetensors)"), ("tokenizer*.json", "no tokenizer"))


def missing_parts(folder: Path) -> list[str]:
    """What a model folder lacks for a run, in words; sizes (config.json) are looked at elsewhere."""
    return [what for pattern, what in _NEEDED if not any(folder.glob(pattern))]


def require_models(config: Config) -> None:
    """Raises ConfigError where the folder of the policy or of another training role is not enough for a run."""
    require_whole_model(config.model.path)
    for task, folder in config.model.others.items():
        if not any(folder.glob("*.safetensors")):
            raise ConfigError(
                f"{task} {folder} has no weights (*.safetensors)", where=f"model.{task}", fix="give a whole folder"
            )


def require_whole_model(folder: Path) -> None:
    """Raises ConfigError where a model folder is enough for a plan and not for a run."""
    if missing := missing_parts(folder):
        raise ConfigError(f"model folder {folder} has {' and '.join(missing)}", fix="give a complete Hugging Face folder")
