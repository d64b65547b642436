"""`vime plugins validate`: the conformance checks of a plugin without pytest, on this machine or on recordings of others."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vime.cli.recordings import read_recording
from vime.facts.diagnosis import RecordedFixture

if TYPE_CHECKING:
    from vime.testing.conformance import Outcome


def add_parser(actions: Any) -> None:
    """Add `validate` to the actions of `plugins`."""
    summary = "check that a plugin keeps the contract of every hook"
    parser = actions.add_parser("validate", help=summary, allow_abbrev=False)
    parser.add_argument("name", metavar="NAME|MODULE", help="an installed platform, or the module of one that is not installed")
    parser.add_argument("--machine", type=Path, action="append", default=[], metavar="FILE", help="a recording (repeatable)")
    parser.add_argument("--device", action="store_true", help="the hardware is here: run the checks that need it")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(handler=validate_plugin)


def validate_plugin(args: argparse.Namespace) -> int:
    """Run the checks and print how each ended; 1 when one failed. Raises PluginError where the plugin does not load."""
    recordings = {path.name: read_recording(path).fixture for path in args.machine}
    with tempfile.TemporaryDirectory(prefix="vime-conformance-") as folder:
        name, outcomes = _run(args.name, recordings, device=args.device, folder=Path(folder))
    counts = Counter(str(outcome.status) for outcome in outcomes)
    if args.json:
        checks = [{**asdict(outcome), "seconds": round(outcome.seconds, 3)} for outcome in outcomes]
        print(json.dumps({"platform": name, "counts": counts, "checks": checks}, indent=2))
    else:
        _print(name, outcomes, counts)
    return 1 if counts["failed"] else 0


def _run(name: str, recordings: Mapping[str, RecordedFixture], *, device: bool, folder: Path) -> tuple[str, Sequence[Outcome]]:
    from vime.testing.conformance.here import subject_here
    from vime.testing.conformance.registry import run_checks

    subject = subject_here(name, device=device, folder=folder, recordings=recordings)
    return subject.name, run_checks(subject)


def _print(name: str, outcomes: Sequence[Outcome], counts: Mapping[str, int]) -> None:
    for outcome in outcomes:
        print(f"{outcome.id}  {outcome.status:<8} {outcome.title}" + (f": {outcome.what}" if outcome.what else ""))
        if outcome.fix:
            print(f"     fix: {outcome.fix}")
    print(f"\nconformance {name}: " + ", ".join(f"{counts.get(s, 0)} {s}" for s in ("passed", "failed", "not run")))
