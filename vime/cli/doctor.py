"""`vime doctor`: look for what usually goes wrong on this machine, each finding with its fix."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vime.cli.recordings import Recording, read_recording, write_recording
from vime.errors import PluginError
from vime.facts.diagnosis import Check, DoctorContext, ProbeContext, RecordedFixture, Severity
from vime.platforms.discovery import AUTO, Discovery, PluginPolicy, discover
from vime.platforms.lineage import Platform

_ORDER = (Severity.ERROR, Severity.WARNING, Severity.INFO, Severity.OK)


def add_parser(commands: Any) -> None:
    """Add `doctor`."""
    parser = commands.add_parser("doctor", help="look for what usually goes wrong on this machine", allow_abbrev=False)
    parser.add_argument("--platform", default=AUTO, metavar="NAME", help="platform to check (default: the machine's own)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--record", type=Path, metavar="FILE", help="write a recording of the hardware for --inventory")
    parser.add_argument("--inventory", type=Path, metavar="FILE", help="look at a recording instead of this machine")
    parser.add_argument("--engine", action="store_true", help="also ask vLLM which platform it resolves (takes seconds)")
    parser.set_defaults(handler=examine)


def examine(args: argparse.Namespace) -> int:
    """Print findings, worst first. Returns 1 when there is an error among them."""
    source = read_recording(args.inventory) if args.inventory else None
    recording = source.fixture if source else None
    name = args.platform
    if recording is not None and name not in (AUTO, recording.platform):
        raise PluginError(
            f"the recording is of platform {recording.platform!r}, --platform says {name!r}",
            where=str(args.inventory),
            fix=f"leave --platform out, or name {recording.platform}",
        )
    if args.engine and source is not None:
        raise PluginError("--engine asks the vLLM of this machine, not a recording", fix="leave --engine or --inventory out")
    found = discover(PluginPolicy.read(platform=recording.platform if recording else name))
    platform, problems = _load(found, recording.platform if recording else name)
    checks = [*problems, *found.findings()]
    if platform is not None:
        checks += _examined(platform, recording, record=args.record, engine=args.engine)
    checks.sort(key=lambda check: _ORDER.index(check.severity))
    _print(checks, platform.name if platform else None, source, as_json=args.json)
    return 1 if any(check.severity is Severity.ERROR for check in checks) else 0


def _load(found: Discovery, name: str) -> tuple[Platform | None, list[Check]]:
    try:
        return found.platform(found.detect() if name == AUTO else name), []
    except PluginError as error:
        return None, [Check("platform", Severity.ERROR, error.what, error.fix or "see `vime plugins list`")]


def _examined(platform: Platform, recording: RecordedFixture | None, *, record: Path | None, engine: bool) -> list[Check]:
    """The platform's own checks; the inventory is read first, and recorded when asked."""
    env = {} if recording else dict(os.environ)
    ctx = ProbeContext(env=env, recording=recording.data if recording else None)
    try:
        if record is not None:
            _write(record, platform, ctx)
        inventory = platform.inventory(ctx)
    except PluginError as error:
        return [Check("inventory", Severity.ERROR, str(error), error.fix or f"mend or update plugin {platform.name}")]
    checks = list(platform.doctor_checks(DoctorContext(inventory, env)))
    if engine:
        from vime.cli.doctor_engine import check_engine

        checks.append(check_engine(platform, inventory))
    return checks


def _write(path: Path, platform: Platform, ctx: ProbeContext) -> None:
    fixture = platform.fixture(ctx)
    if fixture is None:
        raise PluginError(f"platform {platform.name} makes no recordings", fix="leave --record out")
    write_recording(path, fixture)


def _print(checks: Sequence[Check], platform: str | None, source: Recording | None, *, as_json: bool) -> None:
    if as_json:
        told = {"platform": platform, "inventory": str(source) if source else None}
        print(json.dumps({**told, "checks": [asdict(check) for check in checks]}, indent=2))
        return
    print(f"platform: {platform or 'none'}")
    if source is not None:
        print(f"inventory: {source}")
    for check in checks:
        print(f"{check.severity.upper():<8}{check.id}: {check.finding}")
        if check.fix:
            print(f"{'':<8}fix: {check.fix}")
    errors = sum(check.severity is Severity.ERROR for check in checks)
    warnings = sum(check.severity is Severity.WARNING for check in checks)
    print(f"{errors} errors, {warnings} warnings")
