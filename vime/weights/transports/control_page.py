"""A page of counters in a shared-memory file: how one sender and its receivers take turns over a ring of buffers.

Every word has one writer. The sender counts the pieces that it has filled, each receiver those that it has taken; piece n
lies in buffer n % buffers and may be overwritten once everybody has taken it. Every wait has a deadline, and looks now and
then whether the process that it waits for still lives.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path

from vime.errors import DeadlineError, WeightSyncError

_LAYOUT = 0x76696D65_00000001
_HEADER = ("layout", "pid", "started", "filled", "state", "receivers")
_PER_RECEIVER = ("pid", "started", "taken", "state")
_WORD = 8

LIFE_CHECK_S = 0.05
_SLEEPS_S = (0.0,) * 50 + (2e-5,) * 100 + (2e-4,) * 100
_LONGEST_SLEEP_S = 1e-3


class State(IntEnum):
    """Of the sender or a receiver."""

    ABSENT = 0
    READY = 1
    BROKEN = 2
    """The sender gave an update up; the page is of no use any more."""
    LEFT = 3
    ELSEWHERE = 4
    """A receiver that takes from another sender's ring: here nothing is waited for."""


class ControlPage:
    """The words, by name. Made by the sender (`create`) and opened by receivers (`open`)."""

    def __init__(self, path: Path, memory: mmap.mmap) -> None:
        self.path = path
        self._memory = memory
        self._words = memoryview(memory).cast("q")
        self._lock = threading.Lock()
        self._lock.acquire()

    @classmethod
    def create(cls, path: Path, receivers: int) -> ControlPage:
        """Make the file. Raises WeightSyncError when it exists or there is no room."""
        nbytes = _WORD * (len(_HEADER) + receivers * len(_PER_RECEIVER))
        try:
            handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        except OSError as error:
            raise WeightSyncError(
                f"cannot make {path}: {error.strerror}", fix="free shared memory (`df -h /dev/shm`)"
            ) from None
        try:
            os.ftruncate(handle, nbytes)
            page = cls(path, mmap.mmap(handle, nbytes))
        finally:
            os.close(handle)
        pid, started = _identity()
        page._set_header(pid=pid, started=started, receivers=receivers, state=State.READY)
        page._set_header(layout=_LAYOUT)
        return page

    @classmethod
    def open(cls, path: Path) -> ControlPage:
        """Raises WeightSyncError when the file is absent or not such a page."""
        try:
            handle = os.open(path, os.O_RDWR)
        except OSError as error:
            raise WeightSyncError(
                f"cannot open the control page {path}: {error.strerror}",
                fix="trainer and engine must run on one host and share /dev/shm; otherwise choose another transport",
            ) from None
        try:
            size = os.fstat(handle).st_size
            if size < _WORD * len(_HEADER) or struct.unpack("<q", os.pread(handle, _WORD, 0))[0] != _LAYOUT:
                raise WeightSyncError(f"{path} is no control page of this vime", fix="run one vime release on both sides")
            return cls(path, mmap.mmap(handle, size))
        finally:
            os.close(handle)

    def close(self) -> None:
        self._words.release()
        self._memory.close()

    def header(self, name: str) -> int:
        return self._words[_HEADER.index(name)]

    def of(self, receiver: int, name: str) -> int:
        return self._words[self._place(receiver, name)]

    def _set_header(self, **values: int) -> None:
        for name, value in values.items():
            self._words[_HEADER.index(name)] = value

    def _place(self, receiver: int, name: str) -> int:
        return len(_HEADER) + receiver * len(_PER_RECEIVER) + _PER_RECEIVER.index(name)

    def _fence(self) -> None:
        """Release, then acquire: no write of this process may be seen after one that follows, on any processor."""
        self._lock.release()
        self._lock.acquire()

    # ---- the sender

    def missing(self, count: int) -> list[int]:
        return [r for r in range(count) if self.of(r, "state") == State.ABSENT]

    def await_receivers(self, timeout_s: float) -> int:
        """Wait until all have said whether they join -> how many have. Raises DeadlineError that lists those that have not."""
        count = self.header("receivers")

        def late() -> str:
            return f"engine workers {self.missing(count)} of 0..{count - 1} did not connect within {timeout_s:g} s"

        _wait(lambda: not self.missing(count), late, timeout_s, lambda: None)
        return sum(self.of(r, "state") != State.ELSEWHERE for r in range(count))

    def await_room(self, buffers: int, timeout_s: float) -> int:
        """The number of the next piece, once its buffer is free. Raises an error that names the receiver in the way."""
        number, count = self.header("filled"), self.header("receivers")

        def slow() -> list[int]:
            here = (r for r in range(count) if self.of(r, "state") != State.ELSEWHERE)
            return [r for r in here if number - self.of(r, "taken") >= buffers]

        def late() -> str:
            taken = ", ".join(f"engine worker {r} has taken {self.of(r, 'taken')}" for r in slow())
            return f"no room for piece {number} within {timeout_s:g} s: {taken} of {number} pieces"

        def check() -> None:
            for receiver in slow():
                self._check_receiver(receiver)

        _wait(lambda: not slow(), late, timeout_s, check)
        return number

    def await_taken(self, timeout_s: float) -> None:
        """Return when every receiver has taken everything."""
        self.await_room(1, timeout_s)

    def fill(self) -> None:
        """The next piece is in its buffer."""
        self._fence()
        self._set_header(filled=self.header("filled") + 1)

    def end(self, state: State) -> None:
        self._set_header(state=state)

    def _check_receiver(self, receiver: int) -> None:
        pid = self.of(receiver, "pid")
        if self.of(receiver, "state") == State.LEFT:
            raise WeightSyncError(
                f"engine worker {receiver} (process {pid}) closed its half", fix="publish again once the engine is back"
            )
        if not _lives(pid, self.of(receiver, "started")):
            raise WeightSyncError(f"engine worker {receiver} (process {pid}) is gone", fix="its supervisor restarts the engine")

    # ---- a receiver

    def join(self, receiver: int) -> None:
        """Raises WeightSyncError for a number that the sender does not expect or that somebody living has."""
        self._check_number(receiver)
        if self.of(receiver, "state") == State.READY and _lives(self.of(receiver, "pid"), self.of(receiver, "started")):
            raise WeightSyncError(
                f"engine worker {receiver} has joined already (process {self.of(receiver, 'pid')})", fix="publish again"
            )
        pid, started = _identity()
        for name, value in (("pid", pid), ("started", started), ("taken", self.header("filled"))):
            self._words[self._place(receiver, name)] = value
        self._fence()
        self._words[self._place(receiver, "state")] = State.READY

    def decline(self, receiver: int) -> None:
        """Take from another ring. Raises WeightSyncError for a number that the sender does not expect."""
        self._check_number(receiver)
        self._words[self._place(receiver, "state")] = State.ELSEWHERE

    def _check_number(self, receiver: int) -> None:
        if not 0 <= receiver < (count := self.header("receivers")):
            raise WeightSyncError(f"engine worker {receiver} is not one of the {count} expected", fix="publish again")

    def leave(self, receiver: int) -> None:
        self._words[self._place(receiver, "state")] = State.LEFT

    def await_piece(self, number: int, timeout_s: float) -> None:
        """Return when piece `number` is in its buffer. Raises WeightSyncError when the sender is gone or gave up."""

        def late() -> str:
            return (
                f"piece {number} did not come within {timeout_s:g} s; the trainer (process {self.header('pid')}) "
                f"has sent {self.header('filled')}"
            )

        _wait(lambda: self.header("filled") > number, late, timeout_s, self._check_sender)
        self._fence()

    def take(self, receiver: int, number: int) -> None:
        """Piece `number` may be overwritten."""
        self._fence()
        self._words[self._place(receiver, "taken")] = number + 1

    def _check_sender(self) -> None:
        pid, state = self.header("pid"), self.header("state")
        if state == State.BROKEN:
            raise WeightSyncError("the trainer gave this update up", fix="see the trainer's own error, then publish again")
        if state == State.LEFT:
            raise WeightSyncError(f"the trainer (process {pid}) closed its half", fix="publish again")
        if not _lives(pid, self.header("started")):
            raise WeightSyncError(f"the trainer (process {pid}) is gone", fix="the run restarts it from the last checkpoint")


def _wait(done: Callable[[], bool], late: Callable[[], str], timeout_s: float, check: Callable[[], None]) -> None:
    """Poll, at first without a pause. `check` raises when waiting is of no use; a last look at `done` comes after it."""
    began = time.monotonic()
    checked = began
    tries = 0
    while not done():
        now = time.monotonic()
        if now - checked >= LIFE_CHECK_S:
            checked = now
            try:
                check()
            except WeightSyncError:
                if done():
                    return
                raise
        if now - began >= timeout_s:
            raise DeadlineError(late(), fix="read the logs of the process named; publish again")
        time.sleep(_SLEEPS_S[tries] if tries < len(_SLEEPS_S) else _LONGEST_SLEEP_S)
        tries += 1


def _identity() -> tuple[int, int]:
    """This process: pid and start time, since a pid may be given to another process later."""
    return os.getpid(), _start_time(os.getpid()) or 0


def _lives(pid: int, started: int) -> bool:
    return _start_time(pid) == started


def _start_time(pid: int) -> int | None:
    """Clock ticks since the machine started; None when the process is gone or a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text[text.rindex(")") + 2 :].split()
    return None if fields[0] == "Z" else int(fields[19])
