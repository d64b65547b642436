"""The Ray session of a run: a local cluster that vime starts and ends, or one joined by address that it never stops."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from vime.cluster import RAY_ENV
from vime.cluster.guardian import SHARED_MEMORY, guardian_command, kill_below
from vime.errors import PlacementError

LOOPBACK = "127.0.0.1"
PROCESS_LOGS = "ray"
"""Folder in a run's logs with what the processes of its local cluster printed."""

STORE_BYTES = 128 << 20
"""Of the object store, for references, samples' tokens and calls. What does not fit is spilled to disk."""

PATIENCE_S = 20.0
"""For a head to end."""

START = (sys.executable, "-m", "ray.scripts.scripts", "start", "--block")
"""The module, not the script beside the interpreter: packages on PYTHONPATH bring none."""

KEPT_FILE_BYTES, KEPT_BYTES = 64 * 1024, 2 * 1024 * 1024
_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "ftp_proxy")


def clean_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment without proxies, which no process of a run needs, and without a cluster's address."""
    kept = {k: v for k, v in os.environ.items() if k.lower() not in _PROXIES and k != "RAY_ADDRESS"}
    return {**kept, "NO_PROXY": f"{LOOPBACK},localhost", "no_proxy": f"{LOOPBACK},localhost", **(extra or {})}


class RaySession:
    """Starts or joins a cluster and connects this process to it.

    `resources` and `labels` are those of a local head. Variables in `unset` are taken out of this process and of the head.
    `store_bytes` are what its object store needs beside control. With an `address` that cluster is used as it is; RAY_ADDRESS
    is not read.
    """

    def __init__(
        self,
        *,
        resources: Mapping[str, float],
        address: str | None = None,
        log_dir: Path,
        run_id: str,
        labels: Mapping[str, str] | None = None,
        unset: Sequence[str] = (),
        store_bytes: int = 0,
    ) -> None:
        self._resources = dict(resources)
        self._labels = dict(labels or {})
        self._unset = tuple(unset)
        self._store_bytes = store_bytes
        self._address = address
        self._log_dir = log_dir
        self._run_id = run_id
        self._head: subprocess.Popen[bytes] | None = None
        self._temp: Path | None = None

    def start(self, *, timeout_s: float = 60.0) -> None:
        """Connect; a local head is started first when no address was given. Raises PlacementError."""
        for name in [n for n in os.environ if n.lower() in _PROXIES or n in self._unset]:
            del os.environ[name]
        address = self._address or self._start_head()
        import ray

        deadline = time.monotonic() + timeout_s
        self._wait_for_port(address, deadline)
        while True:
            try:
                ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False, namespace=f"vime-{self._run_id}")
                return
            except (ConnectionError, RuntimeError, ValueError) as error:
                self._check_head(address)
                if time.monotonic() > deadline:
                    raise PlacementError(
                        f"no Ray cluster answered at {address} within {timeout_s:.0f} s: {error}",
                        fix="check the address and that this machine is a node of the cluster (`vime node start --address "
                        f"{address}`), or leave it out to start a local cluster",
                    ) from error
                time.sleep(0.1)

    def _start_head(self) -> str:
        port = _free_port()
        self._temp = Path(tempfile.mkdtemp(prefix="vime-ray-"))
        self._log_dir.mkdir(parents=True, exist_ok=True)
        command = [
            *guardian_command(segments=f"vime-{self._run_id}"),
            *START,
            "--head",
            f"--node-ip-address={LOOPBACK}",
            f"--port={port}",
            "--include-dashboard=false",
            # The autoscaler, and what sends logs to a driver: nobody reads either.
            "--no-monitor",
            "--include-log-monitor=false",
            *_client_server(),
            f"--dashboard-agent-listen-port={_free_port()}",
            f"--num-cpus={os.cpu_count() or 1}",
            *offered(self._resources, self._labels),
            f"--object-store-memory={STORE_BYTES + min(self._store_bytes, shutil.disk_usage(SHARED_MEMORY).free // 2)}",
            f"--temp-dir={self._temp}",
            "--disable-usage-stats",
        ]
        with (self._log_dir / "ray.log").open("wb") as log:
            self._head = subprocess.Popen(
                command,
                env={k: v for k, v in clean_environment(RAY_ENV).items() if k not in self._unset},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return f"{LOOPBACK}:{port}"

    def _wait_for_port(self, address: str, deadline: float) -> None:
        """Ray's client can wait for ever in native code for a server that was not there when it first asked."""
        host, _, port = address.rpartition(":")
        while time.monotonic() < deadline:
            try:
                socket.create_connection((host, int(port)), timeout=1.0).close()
                return
            except OSError:
                self._check_head(address)
                time.sleep(0.05)

    def _check_head(self, address: str) -> None:
        if self._head is not None and self._head.poll() is not None:
            tail = (self._log_dir / "ray.log").read_text(errors="replace")[-2000:]
            raise PlacementError(f"Ray did not start at {address}: {tail}", fix="read ray.log in the run's logs folder")

    def close(self) -> None:
        """Disconnect; end the local head and everything below it."""
        import ray

        ray.shutdown()
        if self._head is not None:
            end_head(self._head)
        if self._temp is not None:
            keep_process_logs(self._temp / "session_latest" / "logs", self._log_dir / PROCESS_LOGS)
            shutil.rmtree(self._temp, ignore_errors=True)


def offered(resources: Mapping[str, float], labels: Mapping[str, str]) -> list[str]:
    """Words for `ray start` that say what a node offers."""
    named = dict(resources)
    devices = named.pop("GPU", 0)  # Ray refuses its own resource among the named ones, and counts devices itself unless told.
    words = [f"--num-gpus={devices:g}", f"--resources={json.dumps(named)}"]
    return words + ([f"--labels={','.join(f'{name}={value}' for name, value in labels.items())}"] if labels else [])


def end_head(head: subprocess.Popen[Any]) -> None:
    """End a head politely, then what is below its guardian by force, then the guardian too."""
    for end in (head.terminate, lambda: kill_below(head.pid), head.kill):
        end()
        with suppress(subprocess.TimeoutExpired):
            head.wait(PATIENCE_S)
            return


def keep_process_logs(source: Path, target: Path, *, file_bytes: int = KEPT_FILE_BYTES, total_bytes: int = KEPT_BYTES) -> None:
    """Copy the ends of what actors and Ray's own processes printed: Ray's folder vanishes with its session.

    Standard error comes before standard output, actors before the rest, and the newest first, until `total_bytes` are kept.
    A file that cannot be read or written is left out: the run has ended, and its own error matters more.
    """
    found = [(path, _size(path)) for pattern in _KEPT for path in sorted(source.glob(pattern), key=_age)]
    left = total_bytes
    for path, size in found:
        length = min(size, file_bytes, left)
        if length <= 0:
            continue
        with suppress(OSError), path.open("rb") as file:
            file.seek(size - length)
            target.mkdir(parents=True, exist_ok=True)
            left -= (target / path.name).write_bytes(file.read(length))


_KEPT = ("worker-*.err", "worker-*.out", "raylet.err", "raylet.out", "gcs_server.err", "gcs_server.out")


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _age(path: Path) -> float:
    """Smaller for newer files."""
    try:
        return -path.stat().st_mtime
    except OSError:
        return 0.0


def restore_signals() -> None:
    """Put Python's handlers back in the main thread: connecting installs native ones that only dump a stack."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.getsignal(number))


def _client_server() -> list[str]:
    """Nobody uses Ray's client server. Where its packages are installed a head starts one, on a fixed port unless told; where
    they are not, Ray refuses to be told a port.
    """
    return [f"--ray-client-server-port={_free_port()}"] if find_spec("grpc") else []


def _free_port() -> int:
    with socket.socket() as s:
        s.bind((LOOPBACK, 0))
        return s.getsockname()[1]
