"""Limits of this machine and container that stop processes from sharing device memory."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

from vime.facts.diagnosis import Check, Severity

SHARED_MEMORY = Path("/dev/shm")
_LITTLE_SHARED_MEMORY = 8 * 2**30
_FEW_FILES = 4096


def host_checks() -> Iterator[Check]:
    """Shared memory, pidfd and open files of the machine that this process runs on."""
    if SHARED_MEMORY.is_dir():
        yield shared_memory(shutil.disk_usage(SHARED_MEMORY).total)
    yield pidfd(works=_pidfd_works())
    yield open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def shared_memory(total: int) -> Check:
    """NCCL, torch's workers and host copies of weights live in the shared-memory file system."""
    if total < _LITTLE_SHARED_MEMORY:
        what = f"/dev/shm has {total / 2**20:.0f} MiB: NCCL and weight transfers through host memory need more"
        fix = "start the container with --ipc=host or --shm-size=64g"
        return Check("cuda.shm", Severity.WARNING, what, fix)
    return Check("cuda.shm", Severity.OK, f"/dev/shm has {total / 2**30:.0f} GiB")


def pidfd(*, works: bool) -> Check:
    """torch and NCCL pass file descriptors of device memory between processes by pidfd."""
    if not works:
        what = "pidfd_open is refused: memory of CUDA's virtual memory API cannot be shared between processes"
        fix = "use Linux 5.6 or newer, and a container profile that allows pidfd_open and pidfd_getfd"
        return Check("cuda.pidfd", Severity.WARNING, what, fix)
    return Check("cuda.pidfd", Severity.OK, "pidfd_open works")


def open_files(limit: int) -> Check:
    """Every opened handle and connection is a file descriptor."""
    if 0 <= limit < _FEW_FILES:
        what = f"a process may open {limit} files: NCCL and shared device memory use thousands on large nodes"
        return Check("cuda.files", Severity.WARNING, what, "ulimit -n 65536, or the container's --ulimit nofile=65536")
    return Check("cuda.files", Severity.OK, "enough open files allowed")


def _pidfd_works() -> bool:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return False
    return True
