"""Weights through one shared-memory file of the host, mapped once by both sides.

The file always holds the last published weights, so an engine that restarts loads them from it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vime.errors import WeightSyncError
from vime.weights.manifest import manifest_from_json, manifest_to_json
from vime.weights.transports.base import Manifest, NamedTensors, TransferContext
from vime.weights.transports.flat import FlatImage, view_of

PROTOCOL = "host_shm"
DIRECTORY = Path("/dev/shm")
SUFFIX = "w"


class HostShmTrainer:
    """The trainer's half. Rank 0 creates the file; other ranks (pipeline stages) open it by its path, `segment`.

    Writers fill disjoint parts of one manifest.
    """

    streams = False

    def __init__(
        self,
        *,
        run_id: str,
        manifest: Manifest,
        segment: str | None = None,
        directory: Path | str = DIRECTORY,
    ) -> None:
        self._owner = segment is None
        self._path = Path(segment) if segment else Path(directory) / f"vime-{run_id}-{os.getpid()}-{SUFFIX}"
        if self._owner:
            _create(self._path, manifest.nbytes)
        self._image: FlatImage | None = FlatImage(manifest, _map(self._path, manifest.nbytes))

    @classmethod
    def from_context(cls, context: TransferContext, **options: Any) -> HostShmTrainer:
        segment = context.lead["info"]["path"] if context.rank else None
        return cls(run_id=context.run_id, manifest=context.manifest, segment=segment, **options)

    @property
    def path(self) -> Path:
        return self._path

    def init_info(self, receivers: int) -> Mapping[str, Any]:
        manifest = self._live().manifest
        return {
            "protocol": PROTOCOL,
            "manifest": manifest_to_json(manifest),
            "info": {"path": str(self._path), "nbytes": manifest.nbytes},
        }

    def connect(self) -> None:
        """The engines need no handshake: they open the file."""

    def stage(self, weights: NamedTensors, *, version: str, fingerprint: bool) -> Mapping[str, Any]:
        return {"version": version, **self._live().write(weights, fingerprint=fingerprint)}

    def stream(self, weights: NamedTensors) -> None:
        """Nothing travels while the engines receive."""

    def keep(self, weights: NamedTensors) -> None:
        """Engines that start later read what `stage` wrote."""

    def close(self) -> None:
        """Unmap, and remove the file if this rank made it. Calling it again does nothing."""
        if self._image is not None and self._owner:
            self._path.unlink(missing_ok=True)
        self._image = None

    def _live(self) -> FlatImage:
        if self._image is None:
            raise WeightSyncError("the shared-memory segment is closed", fix="build a new trainer half")
        return self._image


class HostShmEngine:
    """The engine's half: views into the mapping, every worker takes its own shard from them."""

    def __init__(self) -> None:
        self._views: list[tuple[str, Any]] = []

    def connect(self, info: Mapping[str, Any]) -> None:
        path, manifest = Path(info["path"]), manifest_from_json(info["manifest"])
        try:
            size = path.stat().st_size
        except OSError as error:
            raise WeightSyncError(
                f"cannot open the weights segment {path}: {error.strerror}",
                fix="trainer and engine must run on one host and share /dev/shm; otherwise choose another transport",
            ) from None
        if size < manifest.nbytes:
            raise WeightSyncError(
                f"segment {path} has {size} bytes, the manifest needs {manifest.nbytes}", fix="restart the run"
            )
        buffer = _map(path, manifest.nbytes)
        self._views = [(spec.name, view_of(buffer, spec)) for spec in manifest.tensors]

    def receive(self, info: Mapping[str, Any]) -> NamedTensors:
        if not self._views:
            raise WeightSyncError("receive before connect", fix="initialise the engine's weight transfer first")
        return iter(self._views)

    def close(self) -> None:
        self._views = []


@dataclass(frozen=True, slots=True)
class Sweep:
    """Names in the shared-memory directory: `removed` belonged to dead processes of ours, `alive` to living ones."""

    removed: tuple[str, ...]
    alive: tuple[str, ...]
    foreign: tuple[str, ...]


def sweep_segments(run_prefix: str, directory: Path | str = DIRECTORY) -> Sweep:
    """Remove segments `<run_prefix>…-<pid>-w` whose process is gone; list all the rest.

    `run_prefix` is `vime-<run_id>-` for one run or `vime-` for all runs of this host.
    """
    removed, alive, foreign = [], [], []
    for path in sorted(Path(directory).iterdir()):
        pid = _owner_pid(path.name) if path.name.startswith(run_prefix) else None
        if pid is None:
            foreign.append(path.name)
        elif _is_alive(pid):
            alive.append(path.name)
        else:
            path.unlink(missing_ok=True)
            removed.append(path.name)
    return Sweep(tuple(removed), tuple(alive), tuple(foreign))


def _owner_pid(name: str) -> int | None:
    parts = name.rsplit("-", 2)
    if len(parts) == 3 and parts[0].startswith("vime-") and parts[1].isdigit() and parts[2] == SUFFIX:
        return int(parts[1])
    return None


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _create(path: Path, nbytes: int) -> None:
    """Make the file with all its pages reserved: a full tmpfs then fails here and not with SIGBUS in a copy."""
    try:
        handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    except FileExistsError:
        raise WeightSyncError(f"{path} exists already", fix="give the run its own id, or close the other half first") from None
    try:
        os.posix_fallocate(handle, 0, max(nbytes, 1))
    except OSError as error:
        path.unlink(missing_ok=True)
        raise WeightSyncError(
            f"cannot reserve {nbytes} bytes in {path.parent}: {error.strerror}",
            fix="free shared memory (`df -h /dev/shm`), enlarge it, or choose the collective or disk transport",
        ) from None
    finally:
        os.close(handle)


def _map(path: Path, nbytes: int) -> Any:
    import torch

    return torch.from_file(str(path), shared=True, size=max(nbytes, 1), dtype=torch.uint8)
