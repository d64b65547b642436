"""`acme_link`: weights over a local socket, one frame a tensor. Imported in trainer ranks and vLLM's workers only.

The trainer listens on a socket in the shared-memory folder, under the name that guardians and sweeps of vime look for, so
that nothing is left of a run that was killed. Rank 0 sends its own tensors; it keeps a copy of what was published last, from
which an engine that restarts is served.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from acme_accelerator.process import FRAME_BYTES, FRAME_VARIABLE
from acme_accelerator.weights import PROTOCOL
from vime.errors import DeadlineError, WeightSyncError
from vime.weights.fingerprint import digest
from vime.weights.manifest import manifest_from_json, manifest_to_json
from vime.weights.transports.base import Manifest, NamedTensors, TensorSpec, TransferContext
from vime.weights.transports.flat import HostCopy, asks_for_copy, bytes_of, exhaust, in_order, stage_in_place, view_of

DIRECTORY = Path("/dev/shm")
SUFFIX = "w"
"""`vime-<run>-<pid>-w`: what vime removes once the process is gone."""

_HEADER = struct.Struct("!IQ")
"""Before each tensor: its number in the manifest and its bytes."""
_HELLO_BYTES = 4096


class LinkTrainer:
    """The trainer's half. Only rank 0 has one: where a transport streams, the other ranks' weights come to it."""

    streams = True

    def __init__(self, *, run_id: str, manifest: Manifest, timeout_s: float = 120.0, directory: Path | str = DIRECTORY) -> None:
        self._manifest = manifest
        self._timeout_s = timeout_s
        self._path = Path(directory) / f"vime-{run_id}-{os.getpid()}-{SUFFIX}"
        self._frame = frame_bytes()
        self._listener: socket.socket | None = _listen(self._path)
        self._peers: list[socket.socket] = []
        self._receivers = 0
        self._token = ""
        self._kept = HostCopy(manifest, _host_memory)

    @classmethod
    def from_context(cls, context: TransferContext, **options: Any) -> LinkTrainer:
        return cls(run_id=context.run_id, manifest=context.manifest, timeout_s=context.timeout_s, **options)

    def init_info(self, receivers: int) -> Mapping[str, Any]:
        """A new round: earlier connections end, and only who knows the round's token is let in."""
        self._hang_up()
        self._receivers, self._token = receivers, secrets.token_hex(8)
        info = {
            "path": str(self._path),
            "token": self._token,
            "frame_bytes": self._frame,
            "timeout_s": self._timeout_s,
        }
        return {"protocol": PROTOCOL, "manifest": manifest_to_json(self._manifest), "info": info}

    def connect(self) -> None:
        """Wait until every worker has called. Raises DeadlineError naming those that did not."""
        if self._listener is None:
            raise WeightSyncError("the link is closed", fix="build a new trainer half")
        deadline = time.monotonic() + self._timeout_s
        arrived: dict[int, socket.socket] = {}
        while len(arrived) < self._receivers:
            self._listener.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                peer, _ = self._listener.accept()
            except TimeoutError:
                missing = sorted(set(range(self._receivers)) - arrived.keys())
                raise DeadlineError(
                    f"engine workers {missing} did not connect to {self._path} within {self._timeout_s:g} s",
                    fix="read the logs of the engines; trainer and engines must run on one node",
                ) from None
            if (worker := self._welcome(peer, deadline)) is not None:
                arrived[worker] = peer
        self._peers = [arrived[worker] for worker in sorted(arrived)]

    def stage(self, weights: NamedTensors, *, version: str, fingerprint: bool) -> Mapping[str, Any]:
        digest_of = (lambda tensor: digest(tensor.clone())) if fingerprint else None
        return stage_in_place(weights, self._manifest, version=version, digest_of=digest_of)

    def stream(self, weights: NamedTensors) -> None:
        """Send `weights`, or for `()` what is kept, to every worker at the pace of the slowest."""
        if len(self._peers) != self._receivers:
            raise WeightSyncError("stream before connect", fix="initialise the engines' weight transfer first")
        arriving = iter(weights)
        try:
            for spec, data in self._kept_bytes() if asks_for_copy(weights) else in_order(arriving, self._manifest):
                # A numpy view would hold a parameter's own storage for good, which then could not leave the device.
                self._send_tensor(spec, bytes_of(data).clone().numpy().data)
        finally:
            exhaust(arriving)

    def keep(self, weights: NamedTensors) -> None:
        """Copy what was sent, for engines that restart."""
        self._kept.write(weights)

    def close(self) -> None:
        """Hang up and remove the socket. Calling it again does nothing."""
        self._hang_up()
        if self._listener is not None:
            self._listener.close()
            self._path.unlink(missing_ok=True)
        self._listener = None
        self._kept.drop()

    def _welcome(self, peer: socket.socket, deadline: float) -> int | None:
        """The number of a worker of this round; anybody else is hung up on."""
        peer.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            hello = json.loads(_line(peer))
            if hello["token"] == self._token:
                peer.settimeout(self._timeout_s)
                return int(hello["worker"])
        except (OSError, ValueError, KeyError, TypeError):
            pass
        peer.close()
        return None

    def _kept_bytes(self) -> Iterator[tuple[TensorSpec, Any]]:
        kept = self._kept.buffer
        return ((spec, kept[spec.offset : spec.offset + spec.nbytes]) for spec in self._manifest.tensors)

    def _send_tensor(self, spec: TensorSpec, data: memoryview) -> None:
        self._send(spec, _HEADER.pack(self._manifest.tensors.index(spec), spec.nbytes))
        for start in range(0, spec.nbytes, self._frame):
            self._send(spec, data[start : start + self._frame])

    def _send(self, spec: TensorSpec, data: bytes | memoryview) -> None:
        for worker, peer in enumerate(self._peers):
            try:
                peer.sendall(data)
            except OSError as error:
                self._hang_up()
                raise WeightSyncError(
                    f"engine worker {worker} did not take tensor {spec.name}: {_words(error)}",
                    fix="publish again; if it repeats, read the engine's log",
                ) from None

    def _hang_up(self) -> None:
        for peer in self._peers:
            peer.close()
        self._peers = []


class LinkEngine:
    """The engine's half in one worker. `receive` takes exactly one update off the socket, also when it is left early."""

    def __init__(self) -> None:
        self._manifest: Manifest | None = None
        self._socket: socket.socket | None = None

    def connect(self, info: Mapping[str, Any]) -> None:
        self.close()
        if int(info["frame_bytes"]) != frame_bytes():
            raise WeightSyncError(
                f"the trainer cuts frames of {info['frame_bytes']} bytes, this worker of {frame_bytes()}",
                fix=f"give {FRAME_VARIABLE} one value for trainer and engine",
            )
        worker = int(info["rank_offset"]) + int(info["worker_rank"])
        link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        link.settimeout(float(info["timeout_s"]))
        try:
            link.connect(str(info["path"]))
            link.sendall(json.dumps({"token": info["token"], "worker": worker}).encode() + b"\n")
        except OSError as error:
            link.close()
            raise WeightSyncError(
                f"worker {worker} cannot reach the trainer at {info['path']}: {_words(error)}",
                fix="trainer and engine must run on one node and share /dev/shm",
            ) from None
        self._manifest, self._socket = manifest_from_json(info["manifest"]), link

    def receive(self, info: Mapping[str, Any]) -> NamedTensors:
        if self._manifest is None or self._socket is None:
            raise WeightSyncError("receive before connect", fix="initialise the engine's weight transfer first")
        return self._tensors(self._manifest, self._socket)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._manifest = self._socket = None

    def _tensors(self, manifest: Manifest, link: socket.socket) -> Iterator[tuple[str, Any]]:
        import torch

        waiting = list(enumerate(manifest.tensors))
        try:
            while waiting:
                number, spec = waiting.pop(0)
                buffer = torch.empty(spec.nbytes, dtype=torch.uint8)
                self._take(link, number, spec, buffer.numpy().data)
                yield spec.name, view_of(buffer, spec, start=spec.offset)
        finally:
            # A loader that gives up must not leave the rest of this update in front of the next one.
            if self._socket is link:
                for number, spec in waiting:
                    self._take(link, number, spec, memoryview(bytearray(spec.nbytes)))

    def _take(self, link: socket.socket, number: int, spec: TensorSpec, into: memoryview) -> None:
        header = bytearray(_HEADER.size)
        try:
            _fill(link, memoryview(header))
            if _HEADER.unpack(header) != (number, spec.nbytes):
                raise ConnectionError("a frame of another tensor came")
            _fill(link, into)
        except OSError as error:
            self.close()
            raise WeightSyncError(f"tensor {spec.name} did not arrive: {_words(error)}", fix="publish again") from None


def _host_memory(nbytes: int) -> Any:
    import torch

    return torch.empty(nbytes, dtype=torch.uint8)


def frame_bytes() -> int:
    """Bytes of one send. The plan gives both ends the same value."""
    return int(os.environ.get(FRAME_VARIABLE, FRAME_BYTES))


def _listen(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(path))
        os.chmod(path, 0o600)
        listener.listen()
    except OSError as error:
        listener.close()
        raise WeightSyncError(f"cannot listen on {path}: {_words(error)}", fix="give the run its own id") from None
    return listener


def _line(peer: socket.socket) -> bytes:
    """One line, read byte by byte so that nothing after it is taken."""
    line = bytearray()
    while len(line) < _HELLO_BYTES and (byte := peer.recv(1)) and byte != b"\n":
        line += byte
    return bytes(line)


def _fill(link: socket.socket, into: memoryview) -> None:
    while into.nbytes:
        got = link.recv_into(into)
        if not got:
            raise ConnectionError("the trainer hung up")
        into = into[got:]


def _words(error: OSError) -> str:
    return error.strerror or str(error) or type(error).__name__
