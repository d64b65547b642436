"""`vime convert`: a Hugging Face folder to megatron-core's `torch_dist` format, and back."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vime.errors import ConfigError

if TYPE_CHECKING:
    from vime.trainer.setup import TrainerSetup

_HELP = """\
SOURCE is a Hugging Face folder (config.json) or a torch_dist checkpoint (metadata.json); OUT gets the other format.
Works on the host, a few tensors at a time. The same words again go on behind the last whole file.

  vime convert /models/Qwen3-4B --out /models/Qwen3-4B-torch-dist
  vime convert runs/a/checkpoints/step-20/trainer --model /models/Qwen3-4B --out /models/after-20
"""
PLATFORM = "cpu"


def add_parser(subparsers: Any) -> None:
    """Add the command to `argparse`'s subparsers."""
    parser = subparsers.add_parser(
        "convert",
        help="a Hugging Face folder to torch_dist, and back",
        description=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("source", type=Path, metavar="SOURCE", help="folder to read")
    parser.add_argument("--out", type=Path, required=True, metavar="OUT", help="folder to write: empty, or one begun before")
    parser.add_argument("--model", type=Path, metavar="DIR", help="of a checkpoint: folder with its config.json and tokenizer")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="type of the weights (config.json's)")
    parser.set_defaults(handler=convert)


def convert(args: argparse.Namespace) -> int:
    """Handler of `vime convert`."""
    is_folder = (args.source / "config.json").is_file()
    if not is_folder and not (args.source / "metadata.json").is_file():
        raise ConfigError(
            f"{args.source} is neither a Hugging Face folder nor a torch_dist checkpoint",
            fix="name a folder with config.json, or one with metadata.json",
        )
    if is_folder and args.model is not None:
        raise ConfigError("a Hugging Face folder needs no --model: it is one", where="command line")
    model: Path | None = args.source if is_folder else args.model
    if model is None:
        raise ConfigError("a checkpoint needs --model, the folder with its config.json and tokenizer", where="command line")
    setup = _setup(model, args.dtype)
    from vime.trainer.megatron.convert import Conversion

    conversion = Conversion(setup)
    try:
        if is_folder:
            conversion.to_torch_dist(args.out, _report)
        else:
            conversion.to_hf(args.source, args.out, _report)
    finally:
        conversion.close()
    print(args.out)
    return 0


def _report(done: int, total: int, last: str) -> None:
    print(f"{done / max(total, 1):4.0%}  {done / 1e9:.2f} of {total / 1e9:.2f} GB  {last}", file=sys.stderr, flush=True)


def _setup(model: Path, dtype: str | None) -> TrainerSetup:
    """One rank on the host, as a plan would have it; no memory is planned, since the model has none."""
    from vime.config.algorithms import GrpoSection
    from vime.config.schema import TrainerSection
    from vime.facts.collectives import GroupRequest
    from vime.facts.diagnosis import ProbeContext
    from vime.facts.memory import NullMemory
    from vime.facts.process import Parallel, RoleKind, RolePlacement, RoleRequest, Slot
    from vime.models.registry import read_config, read_shape
    from vime.platforms.discovery import discover
    from vime.platforms.policy import PluginPolicy
    from vime.trainer.setup import TrainerSetup

    config, shape = read_config(model), read_shape(model)
    dtype = str(dtype or config.get("torch_dtype") or config.get("dtype") or "bfloat16")
    platform = discover(PluginPolicy.read(platform=PLATFORM)).platform(PLATFORM)
    node = platform.inventory(ProbeContext(dict(os.environ)))
    request = RoleRequest(
        role="convert",
        kind=RoleKind.TRAINER,
        placement=RolePlacement("convert", (Slot(0, 0),)),
        inventories=(node,),
        capabilities=platform.capabilities(node),
        parallel=Parallel(),
        dtype=dtype,
    )
    return TrainerSetup(
        model_path=model,
        dtype=dtype,
        parallel=Parallel(),
        rank=0,
        world=1,
        local_rank=0,
        master_address="127.0.0.1",
        master_port=0,
        seed=0,
        num_steps=1,
        temperature=1.0,
        algorithm=GrpoSection(),
        trainer=TrainerSection(),
        runtime=platform.trainer_runtime(request),
        adaptation=platform.megatron_adapt(request, shape),
        collective=platform.collective(request, GroupRequest("trainer", 1)),
        memory=NullMemory("a conversion holds no model"),
    )
