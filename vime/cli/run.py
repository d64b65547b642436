"""`vime run`: train. Everything that can be wrong in the files is found before a process is started."""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vime.errors import CheckpointError, ConfigError, DataError

if TYPE_CHECKING:
    from vime.cli.prepare import Prepared
    from vime.data.snapshot import Snapshot

INCARNATION = "incarnation"


def add_parser(commands: Any) -> None:
    """Add `run`."""
    from vime.cli.prepare import add_run_arguments

    parser = commands.add_parser("run", help="train by reinforcement learning or on labels", allow_abbrev=False)
    add_run_arguments(parser)
    parser.add_argument("--resume", action="store_true", help="go on from the newest whole checkpoint of run.dir")
    parser.add_argument(
        "--ray-address", default=None, metavar="HOST:PORT", help="use this running cluster (cluster.address); never stopped"
    )
    parser.add_argument("--dry-run", action="store_true", help="check and plan, start nothing; the hardware need not be here")
    parser.set_defaults(handler=handle)


def handle(args: argparse.Namespace) -> int:
    """Check, plan and train. Raises the first VimeError of any part."""
    from vime.cli.prepare import prepare
    from vime.planning.explain import explain_text

    prepared = prepare(args)
    if args.dry_run:
        print(explain_text(prepared.plan))
        return 0
    return train(prepared, resume=args.resume)


def train(prepared: Prepared, *, resume: bool) -> int:
    """Run a checked and planned configuration to its end; 130 after an interrupt."""
    from vime.cli.prepare import require_models

    require_models(prepared.config)
    directory = prepared.config.run.dir
    beginning = begin(directory, resume=resume, content=prepared.config.checkpoint.verify == "content")
    _write_record(prepared, directory)
    from vime.observe.recorder import open_recorder

    observe = prepared.config.observe
    recorder = open_recorder(
        directory,
        num_steps=prepared.config.schedule.num_steps,
        tensorboard=observe.tensorboard,
        samples_per_step=observe.samples_per_step,
    )
    try:
        if resume:
            snapshot = beginning.snapshot
            position = int(snapshot.state["metrics_position"]) if snapshot else 0
            recorder.cut_back(position, step=snapshot.step if snapshot else 0)
            for warning in snapshot.warnings if snapshot else ():
                recorder.event("checkpoint_skipped", warning)
        recorder.start(_description(prepared, beginning))
        return asyncio.run(_supervised(prepared, recorder, beginning))
    finally:
        recorder.close()


async def _supervised(prepared: Prepared, recorder: Any, beginning: Beginning) -> int:
    """Run until done; SIGINT and SIGTERM end the run in order, with every process it started."""
    from vime.assemble import Order, Start, run

    start = Start(beginning.incarnation, beginning.snapshot)
    order = Order(prepared.config, prepared.plan, prepared.plugins.resolved(), start, prepared.cluster)
    task = asyncio.ensure_future(run(order, recorder))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)
    try:
        await task
    except asyncio.CancelledError:
        print("vime run: interrupted; `--resume` goes on from the last checkpoint", file=sys.stderr)
        return 130
    return 0


@dataclass(frozen=True)
class Beginning:
    """Where a run begins: `incarnation` has never been used in this directory."""

    incarnation: int
    snapshot: Snapshot | None


def begin(directory: Path, *, resume: bool, content: bool = True) -> Beginning:
    """Take the directory: a new one, or with `resume` an old one at its newest whole checkpoint; `content`: see there.

    Raises ConfigError for a directory that already holds a run, CheckpointError where there is none to go on with.
    """
    from vime.data.snapshot import latest_snapshot
    from vime.observe import layout

    used = (directory / layout.METRICS).exists()
    if used and not resume:
        raise ConfigError(
            "the run directory already holds a run", where=str(directory), fix="add --resume, or choose another run.dir"
        )
    if resume and not used:
        raise CheckpointError("there is no run to resume here", where=str(directory), fix="leave --resume out, or set run.dir")
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(
            f"the run directory cannot be made: {error.strerror}", where=str(directory), fix="set run.dir"
        ) from error
    marker = directory / INCARNATION
    incarnation = int(marker.read_text()) + 1 if marker.exists() else 0
    marker.write_text(f"{incarnation}\n")
    return Beginning(incarnation, latest_snapshot(directory / layout.CHECKPOINTS, content=content) if resume else None)


def _write_record(prepared: Prepared, directory: Path) -> None:
    """What the run was made of, readable without vime."""
    from vime.config.load import dump_resolved
    from vime.observe import layout
    from vime.planning.explain import explain_json

    (directory / layout.RESOLVED).write_text(dump_resolved(prepared.config))
    (directory / layout.PLAN).write_text(json.dumps(explain_json(prepared.plan), indent=1) + "\n")


def _description(prepared: Prepared, beginning: Beginning) -> dict[str, Any]:
    from importlib.metadata import version

    config, plan = prepared.config, prepared.plan
    return {
        "name": config.run.dir.name,
        "model": f"{config.model.path.name} ({plan.model.family}, {plan.model.parameters / 1e6:.2f}M, {plan.dtype})",
        "topology": plan.topology,
        "platform": ", ".join(sorted({p.platform for p in plan.pools})),
        "algorithm": config.algorithm.kind,
        "vime": version("vime"),
        "resumed_from": beginning.snapshot.step if beginning.snapshot else None,
    }
