"""Runs one command and outlives its owner just long enough to clean up after it.

Started as a script (`python guardian.py --owner PID [--segments PREFIX] -- COMMAND ...`), standard library only, so that it
costs little and needs nothing. When the owner is gone it ends every process that descends from the command, then removes
their shared-memory segments and those named with the prefix. Processes are ended by recorded pid and start time, never by
name.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def guardian_command(*, segments: str = "", owner: int | None = None) -> tuple[str, ...]:
    """The words to put before a command so that it runs under a guardian of `owner` (default: this process)."""
    words = [sys.executable, "-S", "-E", str(Path(__file__).resolve()), "--owner", str(owner or os.getpid())]
    if segments:
        words += ["--segments", segments]
    return (*words, "--")


def _stat(pid: int) -> tuple[int, int] | None:
    """(parent pid, start time in ticks), or None when the process is gone or a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text[text.rindex(")") + 2 :].split()
    return None if fields[0] == "Z" else (int(fields[1]), int(fields[19]))


def descendants(root: int) -> dict[int, int]:
    """pid -> start time of `root` and of everything below it, at this moment."""
    table = {int(p.name): s for p in Path("/proc").iterdir() if p.name.isdigit() and (s := _stat(int(p.name)))}
    found = {root: table[root][1]} if root in table else {}
    frontier = {root}
    while frontier:
        frontier = {pid for pid, (parent, _) in table.items() if parent in frontier and pid not in found}
        found |= {pid: table[pid][1] for pid in frontier}
    return found


def still_running(recorded: dict[int, int]) -> dict[int, int]:
    """Those of the recorded processes that still live (a reused pid has another start time)."""
    return {pid: start for pid, start in recorded.items() if (s := _stat(pid)) and s[1] == start}


def _mapped_segments(pids: Iterable[int]) -> Iterator[Path]:
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            path = line.rpartition(" ")[2]
            if path.startswith(f"{SHARED_MEMORY}/"):
                yield Path(path)


def _signal(recorded: Iterable[int], number: int) -> None:
    for pid in recorded:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def end_family(first: int, *, segments: str = "", grace_s: float = 5.0) -> None:
    """End everything below this process: `first` politely, then whatever is left; then remove their segments.

    Orphans become our children, so the family is what descends from this process. It is looked at again and again, since
    a dying parent may still start children or leave some behind.
    """
    recorded = _family()
    paths = set(_mapped_segments(recorded))
    _signal([first], signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while time.monotonic() < deadline and first in still_running(recorded):
        recorded |= _family()
        time.sleep(0.05)
    for number, patience_s in ((signal.SIGTERM, 1.0), (signal.SIGKILL, 2.0), (signal.SIGKILL, 2.0)):
        recorded |= _family()
        alive = still_running(recorded)
        paths |= set(_mapped_segments(alive))
        _signal(alive, number)
        deadline = time.monotonic() + patience_s
        while (still_running(recorded) or _family()) and time.monotonic() < deadline:
            recorded |= _family()
            time.sleep(0.02)
    named = SHARED_MEMORY.glob(f"{segments}*") if segments else ()
    for path in {*paths, *named}:
        path.unlink(missing_ok=True)


def _family() -> dict[int, int]:
    """Everything below this process now."""
    found = descendants(os.getpid())
    found.pop(os.getpid(), None)
    return found


def _wait(child: subprocess.Popen[bytes], owner: int) -> bool:
    """Block until the child ends (True) or the owner does (False)."""
    poller = select.poll()
    try:
        owner_fd = os.pidfd_open(owner)
    except ProcessLookupError:
        return False
    child_fd = os.pidfd_open(child.pid)
    poller.register(owner_fd, select.POLLIN)
    poller.register(child_fd, select.POLLIN)
    while True:
        ready = [fd for fd, _ in poller.poll()]
        if child_fd in ready:
            return True
        if owner_fd in ready:
            return False


def main(argv: list[str]) -> int:
    """Entry point of the guardian process; its exit code is the command's."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--owner", type=int, required=True)
    parser.add_argument("--segments", default="")
    parser.add_argument("--grace", type=float, default=5.0)
    split = argv.index("--")
    args = parser.parse_args(argv[:split])
    # Orphans of the command become our children, so that nothing below it can be lost sight of.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    child = subprocess.Popen(argv[split + 1 :], preexec_fn=_end_with_guardian)  # noqa: PLW1509 - one thread

    def forward(number: int, _frame: object) -> None:
        if child.poll() is None:
            child.send_signal(number)

    signal.signal(signal.SIGTERM, forward)
    signal.signal(signal.SIGINT, forward)
    if not _wait(child, args.owner):
        end_family(child.pid, segments=args.segments, grace_s=args.grace)
        _reap()
        return 1
    code = child.wait()
    if leftover := _family():
        end_family(min(leftover), grace_s=1.0)
    _reap()
    return code if code >= 0 else 128 - code


def _end_with_guardian() -> None:
    """In the new process: should the guardian itself be killed (Ray kills the children of a worker that exits), be told."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def _reap() -> None:
    """Collect ended children: some containers have a first process that never does."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
