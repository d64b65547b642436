"""The grader process: reads chunks of jobs, scores one after the other, writes scores. Imports the grader and no more.

Frames are a length (4 bytes, little-endian) and a payload: pickle towards the child, JSON back, because a child that runs
a model's output is not trusted to choose what its owner unpickles.
"""

from __future__ import annotations

import json
import mmap
import os
import pickle
import resource
import select
import signal
import struct
import threading
import time
from collections.abc import Mapping
from typing import Any, BinaryIO

from vime.errors import RewardError
from vime.rewards.registry import GRADERS, load_grader
from vime.rewards.values import GradeJob, Grader, read_score

LENGTH = struct.Struct("<I")
PROGRESS = struct.Struct("<qqq")
"""Shared memory: chunk number, position of the job being scored, its start on the monotonic clock (ns)."""
PROGRESS_BYTES = mmap.PAGESIZE

BOOT = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from vime.rewards.child import main; main(sys.argv[2])"

_FLUSH_NS = 5_000_000
_MEMORY_BYTES = 4 * 2**30
_CPU_MARGIN_S = 5


def main(options: str) -> None:
    """Entry of the process. `options` is JSON: kind, key, timeout_s and the descriptor of the progress memory."""
    settings: Mapping[str, Any] = json.loads(options)
    inbox, outbox = _take_channels()
    threading.Thread(target=_end_with_owner, args=(inbox.fileno(),), daemon=True).start()
    progress = mmap.mmap(settings["progress_fd"], PROGRESS_BYTES)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if settings["kind"] in GRADERS:
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES if hard < 0 else min(hard, _MEMORY_BYTES), hard))
    try:
        grader = load_grader(settings["kind"])
    except RewardError as error:
        _write(outbox, {"fatal": error.what, "fix": error.fix})
        return
    except Exception as error:  # noqa: BLE001  the owner raises it
        _write(outbox, {"fatal": f"grader {settings['kind']!r} fails at import: {type(error).__name__}: {error}", "fix": None})
        return
    _write(outbox, {"ready": os.getpid()})
    while (frame := _read(inbox)) is not None:
        _score_chunk(grader, pickle.loads(frame), settings, outbox, progress)


def _take_channels() -> tuple[BinaryIO, BinaryIO]:
    """Keep the two pipes for ourselves: a grader that prints writes to stderr, one that reads gets nothing."""
    inbox, outbox = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    return inbox, outbox


def _end_with_owner(inbox: int) -> None:
    """The owner's end of the pipe closes when it dies, however it dies; then this process group ends."""
    poll = select.poll()
    poll.register(inbox, 0)
    poll.poll()
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _limit_cpu(timeout_s: float) -> None:
    """A grader that loops without ever releasing the interpreter ends by itself when nobody is left to kill it."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    soft = int(usage.ru_utime + usage.ru_stime + timeout_s) + _CPU_MARGIN_S
    resource.setrlimit(resource.RLIMIT_CPU, (soft if hard < 0 else min(soft, hard), hard))


def _score_chunk(
    grader: Grader, chunk: tuple[int, list[tuple[Any, ...]]], settings: Mapping[str, Any], outbox: BinaryIO, progress: mmap.mmap
) -> None:
    number, jobs = chunk
    scores: list[list[Any]] = []
    flushed_at = time.monotonic_ns()
    _limit_cpu(settings["timeout_s"])
    for position, fields in enumerate(jobs):
        now = time.monotonic_ns()
        if now - flushed_at > _FLUSH_NS:
            _write(outbox, scores)
            _limit_cpu(settings["timeout_s"])
            scores, flushed_at = [], now
        PROGRESS.pack_into(progress, 0, number, position, now)
        scores.append(score_one(grader, GradeJob(*fields), settings["key"]))
    PROGRESS.pack_into(progress, 0, number, len(jobs), time.monotonic_ns())
    _write(outbox, scores)


def score_one(grader: Grader, job: GradeJob, key: str | None) -> list[Any]:
    """[reward, error, raw] of a job; whatever the grader raises is an error of this job alone."""
    try:
        score = read_score(grader(job), key=key, name=job.name)
    except RewardError as error:
        return [None, str(error), None]
    except Exception as error:  # noqa: BLE001  one bad answer must not end the others' scoring
        return [None, f"{job.name}: the grader raised {type(error).__name__}: {str(error)[:500]}", None]
    return [score.reward, None, score.raw]


def _write(outbox: BinaryIO, message: object) -> None:
    payload = json.dumps(message).encode()
    outbox.write(LENGTH.pack(len(payload)) + payload)
    outbox.flush()


def _read(inbox: BinaryIO) -> bytes | None:
    head = inbox.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    return inbox.read(LENGTH.unpack(head)[0])
