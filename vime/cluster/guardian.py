"""Runs one command and outlives its owner just long enough to clean up after it.

Started as a script (`python guardian.py --owner PID [--segments PREFIX] -- COMMAND ...`), standard library only, so that it
costs little and needs nothing. When the owner is gone it ends every process that descends from the command. Processes are
ended by recorded pid and start time, never by name. However the command ended, segments of shared memory that only its
processes used are removed; with the owner gone, so are those named with the prefix.

The command leads a process group of its own, in the guardian's session: who kills that group leaves the guardian to clean up.
A guardian that is killed itself leaves the segments to a guardian above it.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import select
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
LOOK_EVERY_S = 1.0
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def guardian_command(*, segments: str = "", owner: int | None = None) -> tuple[str, ...]:
    """The words to put before a command so that it runs under a guardian of `owner` (default: this process)."""
    words = [sys.executable, "-S", "-E", str(Path(__file__).resolve()), "--owner", str(owner or os.getpid())]
    if segments:
        words += ["--segments", segments]
    return (*words, "--")


def guard_segments(prefix: str) -> subprocess.Popen[bytes]:
    """Start a guardian of this process that removes shared memory named with the prefix once this process is gone.

    For processes on a node that outlives the run: no guardian above them ends with it.
    """
    wait = [sys.executable, "-S", "-E", "-c", "import signal; signal.pause()"]
    command = [*guardian_command(segments=prefix), *wait]
    quiet = subprocess.DEVNULL
    return subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True)


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


File = tuple[int, int]
"""(device, inode): a name may come to mean another file."""


def files_in_use(wanted: Mapping[File, Path], pids: Iterable[int]) -> set[File]:
    """Those of the wanted files that one of the processes maps or holds open."""
    names = {path.name for path in wanted.values()}
    return {file for pid in pids for file in (*_mapped(pid), *_opened(pid, names)) if file in wanted}


def _mapped(pid: int) -> Iterator[File]:
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
            _, _, _, device, inode, *_ = line.split(maxsplit=5)
            if inode != "0":
                major, minor = device.split(":")
                yield os.makedev(int(major, 16), int(minor, 16)), int(inode)


def _opened(pid: int, names: Container[str]) -> Iterator[File]:
    """Only files of these names are asked for more: a question about a file on a dead server may never be answered."""
    with suppress(OSError):
        for handle in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                if os.path.basename(os.readlink(f"/proc/{pid}/fd/{handle}")) in names:
                    found = os.stat(f"/proc/{pid}/fd/{handle}")
                    yield found.st_dev, found.st_ino


class Segments:
    """Files of shared memory that appeared since this was made and that processes below this one mapped or held open.

    They are noted while those processes live, since a killed process shows nothing any more. Left alone are what stood there
    before, folders and what is in them, files that other users may open, and names with `prefix`, which belong to a whole run.
    """

    def __init__(self, prefix: str = "", folder: Path = SHARED_MEMORY) -> None:
        self._prefix = prefix
        self._folder = folder
        self._noted: dict[File, Path] = {}
        self._others = frozenset(self._files())
        self._changed = self._again = 0

    def _files(self) -> dict[File, Path]:
        found: dict[File, Path] = {}
        with suppress(OSError):
            for path in self._folder.iterdir():
                with suppress(OSError):
                    at = path.lstat()
                    if stat.S_ISREG(at.st_mode) and not at.st_mode & 0o077 and at.st_uid == os.geteuid():
                        found[at.st_dev, at.st_ino] = path
        return found

    def look(self) -> None:
        """Note what is in use now."""
        new = {file: path for file, path in self._files().items() if file not in self._others and file not in self._noted}
        if self._prefix:
            new = {file: path for file, path in new.items() if not path.name.startswith(self._prefix)}
        if new:
            self._noted |= {file: new[file] for file in files_in_use(new, _family())}

    def look_if_changed(self) -> None:
        """Look when files came or went since the last call, and at the call after: a new file may not be mapped yet."""
        try:
            changed = self._folder.stat().st_mtime_ns
        except OSError:
            return
        if changed != self._changed:
            self._changed, self._again = changed, 2
        if self._again:
            self._again -= 1
            self.look()

    def remove(self, *, named: bool = False) -> None:
        """Remove what was noted, is still the same file and is in no process's use; with `named` all with the prefix too."""
        if left := dict(self._files().items() & self._noted.items()):
            used = files_in_use(left, (int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit()))
            for file in left.keys() - used:
                left[file].unlink(missing_ok=True)
        for path in self._folder.glob(f"{self._prefix}*") if named and self._prefix else ():
            path.unlink(missing_ok=True)


def _signal(recorded: Iterable[int], number: int) -> None:
    for pid in recorded:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def kill_below(root: int) -> None:
    """SIGKILL to everything below `root`, which stays: of a guardian, so that it can clean up and end by itself."""
    _signal(descendants(root).keys() - {root}, signal.SIGKILL)


def end_family(first: int, segments: Segments, *, grace_s: float = 5.0) -> None:
    """End everything below this process: `first` politely, then whatever is left; note their segments before.

    Orphans become our children, so the family is what descends from this process. It is looked at again and again, since
    a dying parent may still start children or leave some behind.
    """
    recorded = _family()
    segments.look()
    _signal([first], signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while time.monotonic() < deadline and first in still_running(recorded):
        recorded |= _family()
        time.sleep(0.05)
    for number, patience_s in ((signal.SIGTERM, 1.0), (signal.SIGKILL, 2.0), (signal.SIGKILL, 2.0)):
        recorded |= _family()
        alive = still_running(recorded)
        segments.look()
        _signal(alive, number)
        deadline = time.monotonic() + patience_s
        while (still_running(recorded) or _family()) and time.monotonic() < deadline:
            recorded |= _family()
            time.sleep(0.02)


def _family() -> dict[int, int]:
    """Everything below this process now."""
    found = descendants(os.getpid())
    found.pop(os.getpid(), None)
    return found


def _wait(child: subprocess.Popen[bytes], owner: int, segments: Segments) -> bool:
    """Block until the child ends (True) or the owner does (False); note segments meanwhile."""
    poller = select.poll()
    try:
        owner_fd = os.pidfd_open(owner)
    except ProcessLookupError:
        return False
    child_fd = os.pidfd_open(child.pid)
    poller.register(owner_fd, select.POLLIN)
    poller.register(child_fd, select.POLLIN)
    while True:
        ready = [fd for fd, _ in poller.poll(LOOK_EVERY_S * 1000)]
        if child_fd in ready:
            return True
        if owner_fd in ready:
            return False
        segments.look_if_changed()


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
    segments = Segments(args.segments)
    child = subprocess.Popen(argv[split + 1 :], process_group=0, preexec_fn=_end_with_guardian)  # noqa: PLW1509 - one thread

    def forward(number: int, _frame: object) -> None:
        if child.poll() is None:
            segments.look()
            child.send_signal(number)

    signal.signal(signal.SIGTERM, forward)
    signal.signal(signal.SIGINT, forward)
    if not _wait(child, args.owner, segments):
        end_family(child.pid, segments, grace_s=args.grace)
        segments.remove(named=True)
        _reap()
        return 1
    code = child.wait()
    if leftover := _family():
        end_family(min(leftover), segments, grace_s=1.0)
    segments.remove()
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
