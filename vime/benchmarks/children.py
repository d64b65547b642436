"""Processes that work together, one a device: started with what each needs, read line by line, ended as soon as one fails."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MARK = "\x1e"
"""Before a line that is a result."""
GRACE_S = 5.0
"""Others get this long to fail of their own after one has; then they are asked for their stacks."""
_TAIL = 1500


def tell(found: Mapping[str, Any]) -> None:
    """In a child: give a result to the parent."""
    print(f"\n{MARK}{json.dumps(found)}", flush=True)


@dataclass(frozen=True)
class Told:
    """The results of every child in the order they came; `error` says which child failed and with what last words."""

    results: list[list[dict[str, Any]]]
    error: str | None
    seconds: float


def together(
    module: str,
    orders: Sequence[Mapping[str, Any]],
    *,
    envs: Sequence[Mapping[str, str]],
    folder: Path,
    limit_s: float,
    unset: Sequence[str] = (),
) -> Told:
    """Run `python -m MODULE ORDER` once for each order, all at the same time, until all have ended or `limit_s` are over.

    Args:
        orders: JSON for each child, written to a file whose path is its only word.
        envs: over this process's environment, without the names in `unset`.
        folder: for the files of orders and output.
    """
    began = time.monotonic()
    base = {name: value for name, value in os.environ.items() if name not in unset}
    children: list[subprocess.Popen[bytes]] = []
    logs = [folder / f"child-{number}.log" for number in range(len(orders))]
    try:
        for number, (order, env) in enumerate(zip(orders, envs, strict=True)):
            path = folder / f"child-{number}.json"
            path.write_text(json.dumps(order))
            with logs[number].open("w") as log:
                words, flags = [sys.executable, "-m", module, str(path)], {"PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1"}
                child = subprocess.Popen(
                    words,
                    env={**base, **flags, **env},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            children.append(child)
        why = _wait(children, began + limit_s, limit_s)
    finally:
        for child in children:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    error = None if why is None else "\n".join([why, *_last_words(logs)])
    return Told([list(_results(log)) for log in logs], error, time.monotonic() - began)


def _wait(children: Sequence[subprocess.Popen[bytes]], end: float, limit_s: float) -> str | None:
    """Until all have ended well (None), or what went wrong. Those that still run have told their stacks then."""
    why = None
    while why is None:
        codes = [child.poll() for child in children]
        if all(code == 0 for code in codes):
            return None
        bad = [f"process {number} ended with {code}" for number, code in enumerate(codes) if code]
        if bad:
            why = ", ".join(bad)
        elif time.monotonic() > end:
            running = [number for number, code in enumerate(codes) if code is None]
            why = f"processes {running} were not done after {limit_s:.0f} s"
        time.sleep(0.05)
    grace = time.monotonic() + (GRACE_S if "ended" in why else 0)
    while time.monotonic() < grace and any(child.poll() is None for child in children):
        time.sleep(0.05)
    for child in children:
        if child.poll() is None:
            child.send_signal(signal.SIGABRT)
            with suppress(subprocess.TimeoutExpired):
                child.wait(GRACE_S)
    return why


def _results(log: Path) -> Iterator[dict[str, Any]]:
    for line in log.read_text(errors="replace").split("\n"):
        if line.startswith(MARK):
            with suppress(ValueError):
                yield json.loads(line.removeprefix(MARK))


def _last_words(logs: Sequence[Path]) -> Iterator[str]:
    for number, log in enumerate(logs):
        lines = [line for line in log.read_text(errors="replace").split("\n") if not line.startswith(MARK)]
        yield f"process {number}: " + "\n".join(lines)[-_TAIL:].strip()
