"""Which host a process is on: processes with one answer share memory and see each other's process ids."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from vime.weights.transports.exporters import SHARED_MEMORY

ANYWHERE = ""
"""Stands for every host where a transport does not care."""

_BOOT = Path("/proc/sys/kernel/random/boot_id")


def host_identity() -> str:
    """The machine since it started, and in it the shared memory and the process ids that this process sees.

    Containers of one machine that do not share both are hosts of their own: a ring of the one cannot be opened in the other.
    """
    try:
        machine = _BOOT.read_text().strip()
    except OSError:
        machine = socket.gethostname()
    return f"{machine}/{_number(SHARED_MEMORY, 'st_dev')}/{_number(Path('/proc/self/ns/pid'), 'st_ino')}"


def own_address(peer: str) -> str:
    """The address that this machine has towards a peer; nothing is sent. `peer` itself where no way to it is known.

    What a host's own name resolves to may be an address that nobody else reaches, such as 127.0.1.1.
    """
    bare = peer.strip("[]")
    family = socket.AF_INET6 if ":" in bare else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as asked:
            asked.connect((bare, 9))
            return str(asked.getsockname()[0])
    except OSError:
        return peer


def _number(path: Path, name: str) -> int:
    """A number of what is at `path`; 0 where it cannot be looked at."""
    try:
        return int(getattr(os.stat(path), name))
    except OSError:
        return 0
