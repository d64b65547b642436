"""`vime plugins trace`: which hooks a command asks, of which platform and how often, and which runtime hooks it does not."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from vime.errors import PluginError
from vime.hooks.specs import RULES
from vime.platforms.trace import TRACE_VARIABLE, HookCall, read_trace, unasked

_COLUMNS = ("HOOK", "CALLS", "PLATFORM", "IMPLEMENTED BY", "FAILED")
_EXAMPLE = "e.g. `vime plugins trace -- plan run.yaml`"


def add_parser(actions: Any) -> None:
    """Add `trace` to the actions of `plugins`."""
    parser = actions.add_parser("trace", help="run a vime command and show which hooks it asks", allow_abbrev=False)
    parser.add_argument("--file", type=Path, metavar="FILE", help="keep the calls here; without a command, show those of FILE")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="a vime command with its arguments")
    parser.set_defaults(handler=trace)


def trace(args: argparse.Namespace) -> int:
    """Run the command, its output on stderr, and print the table on stdout. Returns the command's exit code."""
    words = args.words[1:] if args.words[:1] == ["--"] else args.words
    words = words[1:] if words[:1] == ["vime"] else words
    if not words:
        return _show(_read(args.file), code=0, as_json=args.json)
    if args.file is not None:
        args.file.unlink(missing_ok=True)
        code = _run(words, args.file.absolute())
        return _show(_read(args.file), code=code, as_json=args.json)
    with tempfile.TemporaryDirectory(prefix="vime-trace-") as folder:
        path = Path(folder) / "calls.jsonl"
        code = _run(words, path)
        return _show(_read(path), code=code, as_json=args.json)


def _run(words: Sequence[str], path: Path) -> int:
    path.touch()
    command = [sys.executable, "-m", "vime.cli.main", *words]
    child = subprocess.Popen(command, env={**os.environ, TRACE_VARIABLE: str(path)}, stdout=sys.stderr.fileno())
    while True:
        try:
            code = child.wait()
            return code if code >= 0 else 128 - code
        except KeyboardInterrupt:
            continue  # The command has got the signal too and ends in its own order.


def _read(path: Path | None) -> tuple[HookCall, ...]:
    if path is None:
        raise PluginError("there is no command to trace", where="command line", fix=f"write it after `--`, {_EXAMPLE}")
    try:
        return read_trace(path)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PluginError(
            f"not a record of hook calls: {type(error).__name__}: {error}", where=str(path), fix=f"make one, {_EXAMPLE}"
        ) from error


def _show(calls: Sequence[HookCall], *, code: int, as_json: bool) -> int:
    rows, missing = list(_rows(calls)), unasked(calls)
    if as_json:
        hooks = [dict(zip(("hook", "calls", "platform", "plugins", "failed"), row, strict=True)) for row in rows]
        print(json.dumps({"exit_code": code, "hooks": hooks, "runtime_hooks_not_asked": missing}, indent=2))
        return code
    lines = [_COLUMNS, *((hook, str(n), who, ", ".join(by), str(bad)) for hook, n, who, by, bad in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(_COLUMNS))]
    for line in lines:
        print("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip())
    print(f"\nruntime hooks that were not asked: {', '.join(missing) or 'none'}")
    return code


def _rows(calls: Sequence[HookCall]) -> Iterator[tuple[str, int, str, list[str], int]]:
    """(hook, calls, platform, implementers from the leaf up, failed calls), in the order of the specification."""
    counts = Counter((call.hook, call.platform) for call in calls)
    failed = Counter((call.hook, call.platform) for call in calls if call.error is not None)
    for hook in RULES:
        for name, platform in sorted(pair for pair in counts if pair[0] == hook):
            asked = [plugin for call in calls if (call.hook, call.platform) == (name, platform) for plugin in call.plugins]
            # pluggy lists implementations in the order of registration, parents first.
            yield hook, counts[name, platform], platform, list(dict.fromkeys(reversed(asked))), failed[name, platform]
