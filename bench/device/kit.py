"""The contract of a platform on its hardware: `vime plugins list`, `vime doctor`, a recording, the conformance kit.

Without `--device` the kit runs on fakes and recordings alone.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from vime.benchmarks.record import Record, arguments, command, vime

ROOT = Path(__file__).resolve().parents[2]


def as_json(*words: str | Path, limit_s: float = 90.0) -> dict[str, Any]:
    """A command of vime that prints JSON. Its exit code is kept, because doctor's says whether it found an error."""
    ended = command(vime(*words), limit_s=limit_s)
    start = min((at for at in (ended.output.find("{"), ended.output.find("[")) if at >= 0), default=-1)
    try:
        answer = json.JSONDecoder().raw_decode(ended.output[start:])[0]
    except ValueError as error:
        raise RuntimeError(f"no JSON ({error}): {ended.told()}") from error
    return {"exit_code": ended.code, "seconds": ended.seconds, "answer": answer}


def record_machine(platform: str, path: Path) -> dict[str, Any]:
    """Make a recording, and plan from it as on a machine without the hardware."""
    ended = command(vime("doctor", "--platform", platform, "--record", path), limit_s=90)
    replayed = command(vime("doctor", "--inventory", path, "--json"), limit_s=90)
    return {"recorded": ended.told(), "file": path.name, "replayed": replayed.told(), "bytes": path.stat().st_size}


def conformance(platform: str, *, device: bool, limit_s: float) -> dict[str, Any]:
    """The kit under pytest: its own test file where the platform has one here."""
    tests = ROOT / "plugins" / platform / "tests" / "test_conformance.py"
    which = [str(tests)] if tests.exists() else ["--vime-platform", platform]
    with tempfile.TemporaryDirectory(prefix="vime-kit-") as folder:
        report = Path(folder) / "junit.xml"
        words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *which]
        ended = command([*words, *(["--device"] if device else [])], limit_s=limit_s)
        checks = list(outcomes(report)) if report.exists() else []
    counts = Counter(check["status"] for check in checks)
    if not checks:
        raise RuntimeError(f"pytest reported nothing: {ended.told()}")
    others = [check for check in checks if check["status"] != "passed"]
    slow = sorted(checks, key=lambda check: -check["seconds"])[:5]
    return {"ok": not counts["failed"], "device": device, "counts": counts, "others": others, "slowest": slow, **ended.told()}


def outcomes(report: Path) -> Iterator[dict[str, Any]]:
    """One entry a check of a junit report; what was not run has its reason."""
    for case in ElementTree.parse(report).iter("testcase"):
        marks = {child.tag: child for child in case}
        bad = marks.get("failure", marks.get("error"))
        status = "failed" if bad is not None else "not run" if "skipped" in marks else "passed"
        mark = bad if bad is not None else marks.get("skipped")
        why = "" if mark is None else (mark.get("message") or mark.text or "")[:3000]
        yield {"check": case.get("name"), "status": status, "seconds": float(case.get("time") or 0), "why": why}


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--device", action="store_true", help="the platform's hardware is here")
    parser.add_argument("--limit", type=float, default=240.0, metavar="S", help="seconds for the kit (240)")
    args = parser.parse_args()
    record = Record(args.out / "kit.json", args.platform, again=args.again)
    record.run("plugins", lambda: as_json("plugins", "list", "--json"))
    record.run("doctor", lambda: as_json("doctor", "--platform", args.platform, "--json"))
    record.run("doctor of the machine's own platform", lambda: as_json("doctor", "--json"))
    record.run("recording", lambda: record_machine(args.platform, args.out / f"{args.platform}-recording.json"))
    record.run("conformance", lambda: conformance(args.platform, device=args.device, limit_s=args.limit))
    return 0 if record.ok else 1


if __name__ == "__main__":
    sys.exit(main())
