"""Several Ray nodes on this machine, each started by `vime node start` with an address of its own on loopback.

127.0.0.1 itself is left out: Ray takes it for an outside address where nodes may come from elsewhere.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from live_runs import descendants, environment, wait_for

STORE_BYTES = 80_000_000
"""Near Ray's least for an object store."""


def free_port(host: str) -> int:
    with socket.socket() as held:
        held.bind((host, 0))
        return held.getsockname()[1]


class RayNodes:
    """A head and further nodes with so many slots; `names` are n1, n2, ... at 127.0.0.2, 127.0.0.3, ..."""

    def __init__(self, folder: Path, slots: Sequence[int]) -> None:
        self._folder = folder
        self.slots = tuple(slots)
        self.address = f"127.0.0.2:{free_port('127.0.0.2')}"
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        for number in range(len(self.slots)):
            self._start(number)
            if number == 0:
                wait_for(self._head_listens, timeout_s=60, what="the head's start")
        wait_for(lambda: all(self._up(n) for n in range(len(self.slots))), timeout_s=90, what="the start of every node")

    def _start(self, number: int) -> None:
        host, port = f"127.0.0.{number + 2}", self.address.rpartition(":")[2]
        to = ["--address", self.address] if number else ["--head", "--port", port]
        command = [sys.executable, "-m", "vime.cli.main", "node", "start", "--platform", "cpu", *to, "--host", host]
        command += ["--name", f"n{number + 1}", "--slots", str(self.slots[number]), "--", "--num-cpus=2"]
        command += [f"--object-store-memory={STORE_BYTES}", "--include-log-monitor=false", f"--temp-dir={self._temp(number)}"]
        command += [f"--dashboard-agent-listen-port={free_port(host)}", *([] if number else ["--no-monitor"])]
        with self._log(number).open("wb") as log:
            process = subprocess.Popen(
                command, env=environment(), stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )
        self.processes.append(process)

    def _temp(self, number: int) -> str:
        """Short: a socket's path may have 107 bytes."""
        return f"/tmp/vime-n{os.getpid()}-{number + 1}"

    def _log(self, number: int) -> Path:
        return self._folder / f"n{number + 1}.log"

    def _head_listens(self) -> bool:
        host, _, port = self.address.rpartition(":")
        with socket.socket() as asked:
            return asked.connect_ex((host, int(port))) == 0

    def _up(self, number: int) -> bool:
        text = self._log(number).read_text(errors="replace")
        assert self.processes[number].poll() is None, text[-2000:]
        return "Ray runtime started" in text

    def alive(self) -> list[bool]:
        return [process.poll() is None for process in self.processes]

    def kill(self, number: int) -> None:
        """End a node as a power cut does: nobody cleans up or says goodbye."""
        for process in [*descendants(self.processes[number].pid), self.processes[number]]:
            process.kill()
        self.processes[number].wait(60)

    def close(self) -> None:
        """The head last."""
        for process in reversed(self.processes):
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in self.processes:
            process.wait(60)
        for number in range(len(self.slots)):
            subprocess.run(["rm", "-rf", self._temp(number)], check=True)
