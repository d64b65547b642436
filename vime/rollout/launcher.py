"""Child processes: one session each, a log file, a clean environment, and an end that leaves nothing behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

from vime.errors import EngineError

PROXY_VARIABLES = frozenset({"http_proxy", "https_proxy", "all_proxy", "ftp_proxy", "no_proxy"})
NO_PROXY = "127.0.0.1,localhost"
_TAIL_BYTES = 256 * 1024
_POLL_S = 0.02
_CLEANING_S = 5.0
"""For a prefix whose command was killed: a guardian ends what is left and removes its segments meanwhile."""


def child_env(extra: Mapping[str, str], base: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a child: `base` (this process's by default) without proxies and Ray's variables, then `extra`."""
    source = os.environ if base is None else base
    kept = {k: v for k, v in source.items() if k.lower() not in PROXY_VARIABLES and not k.startswith("RAY_")}
    return {**kept, "NO_PROXY": NO_PROXY, "no_proxy": NO_PROXY, **extra}


def group_members(group: int) -> list[int]:
    """The living processes (zombies left out) of the session that `group` leads: that group, and those made in the session."""
    members: list[int] = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                members.append(process.pid)
        except (ProcessLookupError, PermissionError, psutil.Error):
            continue
    return members


class Child:
    """A process started by vime, leader of its own session and process group.

    `command_prefix` goes before the command (a guardian that ends it when its owner is gone); it must forward SIGTERM
    and pass the exit code on, 128 + N for signal N; it may give the command a group of its own and clean up after it.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        name: str,
        log_path: Path,
        env: Mapping[str, str],
        command_prefix: Sequence[str] = (),
    ) -> None:
        self.name = name
        self.command = (*command_prefix, *command)
        self.log_path = Path(log_path)
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("ab") as log:
            self._log_start = log.tell()
            try:
                self._process = subprocess.Popen(
                    self.command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=dict(env),
                    start_new_session=True,
                )
            except OSError as error:
                raise EngineError(f"{name} cannot be started: {error}", where=self.command[0]) from error
        self._guarded = bool(command_prefix)
        self.group = self._process.pid

    @property
    def pid(self) -> int:
        """Of the group's leader: the command, or its prefix."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.poll()

    def alive(self) -> bool:
        return self._process.poll() is None

    def exit_text(self) -> str:
        """How it ended, for messages: `exit code 1`, `signal SIGKILL` (also behind a prefix), `running`."""
        code = self._process.poll()
        if code is None:
            return "running"
        number = -code if code < 0 else code - 128
        if number in signal.valid_signals():
            return f"signal {signal.Signals(number).name}"
        return f"exit code {code}"

    def log_text(self) -> str:
        """What this process (not an earlier one with the same log) wrote, the last 256 KiB of it."""
        with contextlib.suppress(FileNotFoundError), self.log_path.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(self._log_start, size - _TAIL_BYTES))
            return log.read().decode("utf-8", errors="replace")
        return ""

    def log_tail(self, lines: int = 20) -> str:
        return "\n".join(self.log_text().splitlines()[-lines:])

    def stop(self, grace_s: float = 15.0) -> float:
        """End the process and its whole session; return the seconds it took.

        SIGTERM goes to the leader, which ends its own children in order; whatever is left of the session (or of the
        leader's descendants, should one have left it) after `grace_s` is killed, a prefix last. Safe to call again.
        """
        started = time.monotonic()
        family = self._descendants()
        if self.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)
                os.kill(self.pid, signal.SIGCONT)
        deadline = started + grace_s
        if not self._gone_by(deadline, family):
            self._kill(family, sparing=(self.pid,) if self._guarded else ())
            if not self._gone_by(time.monotonic() + _CLEANING_S, family):
                self._kill(family)
                self._gone_by(time.monotonic() + 5.0, family)
        return time.monotonic() - started

    def _descendants(self) -> list[psutil.Process]:
        try:
            return psutil.Process(self.pid).children(recursive=True) if self.alive() else []
        except psutil.Error:
            return []

    def _gone_by(self, deadline: float, family: Sequence[psutil.Process]) -> bool:
        return _wait(lambda: not self.alive() and not group_members(self.group) and not any(map(_runs, family)), deadline)

    def _kill(self, family: Sequence[psutil.Process], *, sparing: Sequence[int] = ()) -> None:
        for pid in set(group_members(self.group)) - set(sparing):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        for process in family:
            with contextlib.suppress(psutil.Error):
                process.kill()


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _wait(done: Callable[[], bool], deadline: float) -> bool:
    while not done():
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_S)
    return True
