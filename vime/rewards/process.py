"""The owner's side of one grader process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import mmap
import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

from vime.errors import RewardError
from vime.rewards.child import BOOT, LENGTH, PROGRESS, PROGRESS_BYTES
from vime.rewards.values import GradeJob

_LOOPBACK = ("127.0.0.1", "localhost")
_NS = 1_000_000_000


class StartFailure(Exception):
    """The process ended before it was ready, without saying why."""


class Unsendable(Exception):
    """A job holds something that cannot be pickled."""


class GraderProcess:
    """A child in a process group of its own, so that what a grader starts ends with it."""

    def __init__(self, process: asyncio.subprocess.Process, progress: mmap.mmap, timeout_s: float) -> None:
        self._process = process
        self._progress = progress
        self._timeout_s = timeout_s
        self._chunk = 0
        self._sent_ns = 0
        self.timed_out = False

    @classmethod
    async def start(cls, kind: str, *, key: str | None, timeout_s: float, start_timeout_s: float) -> GraderProcess:
        """Start a child and wait until its grader is imported.

        Raises:
            RewardError: the grader cannot be loaded, or not in time.
            StartFailure: the child died first.
        """
        with tempfile.TemporaryFile() as file:
            file.truncate(PROGRESS_BYTES)
            progress = mmap.mmap(file.fileno(), PROGRESS_BYTES)
            options = {"kind": kind, "key": key, "timeout_s": timeout_s, "progress_fd": file.fileno()}
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-c", BOOT, json.dumps(_import_path()), json.dumps(options)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env=_environment(),
                pass_fds=(file.fileno(),),
                start_new_session=True,
            )
        child = cls(process, progress, timeout_s)
        try:
            await child._wait_ready(kind, start_timeout_s)
        except BaseException:
            await child.end()
            raise
        return child

    async def _wait_ready(self, kind: str, start_timeout_s: float) -> None:
        try:
            async with asyncio.timeout(start_timeout_s):
                hello = await self.receive()
        except TimeoutError:
            raise RewardError(f"grader {kind!r} was not imported within {start_timeout_s:g} s") from None
        if hello is None:
            raise StartFailure(f"the process of grader {kind!r} ended at once ({await self.end()}); see its stderr")
        if "fatal" in hello:
            raise RewardError(hello["fatal"], fix=hello["fix"])

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.returncode is None

    def send(self, jobs: Sequence[GradeJob]) -> None:
        """Hand over a chunk; the clock of its first job starts. Raises Unsendable."""
        self._chunk += 1
        payload = _pickled((self._chunk, [_fields(job) for job in jobs]))
        self._sent_ns = time.monotonic_ns()
        assert self._process.stdin is not None
        self._process.stdin.write(LENGTH.pack(len(payload)) + payload)

    async def receive(self) -> Any | None:
        """The next message, None when the process is gone or talks nonsense."""
        assert self._process.stdout is not None
        try:
            head = await self._process.stdout.readexactly(LENGTH.size)
            return json.loads(await self._process.stdout.readexactly(LENGTH.unpack(head)[0]))
        except (asyncio.IncompleteReadError, ConnectionError, ValueError):
            return None

    def position(self) -> tuple[int | None, int]:
        """Which job of the chunk is being scored (None: the chunk was not begun) and since when (monotonic, ns)."""
        while True:
            seen = PROGRESS.unpack_from(self._progress, 0)
            if seen == PROGRESS.unpack_from(self._progress, 0):
                break
        chunk, position, started = seen
        return (position, started) if chunk == self._chunk else (None, self._sent_ns)

    def watch(self) -> Callable[[], None]:
        """Kill the process when one job takes longer than the limit. Returns what ends the watch."""
        loop = asyncio.get_running_loop()
        timer: asyncio.TimerHandle

        def check() -> None:
            nonlocal timer
            left = self._timeout_s - (time.monotonic_ns() - self.position()[1]) / _NS
            if left <= 0:
                self.timed_out = True
                self.kill()
            else:
                timer = loop.call_later(left, check)

        timer = loop.call_later(self._timeout_s, check)
        return lambda: timer.cancel()  # noqa: PLW0108  the timer is replaced each time it is armed anew

    def kill(self) -> None:
        if self.is_alive:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def end(self) -> str:
        """Kill, reap and say how the process ended."""
        self.kill()
        assert self._process.stdin is not None
        self._process.stdin.close()
        code = await self._process.wait()
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def check_sendable(job: GradeJob) -> None:
    """Raise Unsendable where `send` would."""
    _pickled(_fields(job))


def _fields(job: GradeJob) -> tuple[Any, ...]:
    return (job.text, job.label, job.task, dict(job.metadata), job.finished, job.name)


def _pickled(value: object) -> bytes:
    try:
        return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # what metadata holds pickles itself, and raises what it likes
        raise Unsendable(str(error)) from error


def _import_path() -> list[str]:
    return [entry or os.getcwd() for entry in sys.path]


def _environment() -> dict[str, str]:
    env = dict(os.environ)
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        env[name] = "1"
    for name in ("NO_PROXY", "no_proxy"):
        hosts = [host for host in env.get(name, "").split(",") if host]
        env[name] = ",".join(dict.fromkeys((*hosts, *_LOOPBACK)))
    return env
