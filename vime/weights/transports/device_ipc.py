"""Weights through a ring of buffers in device memory that the engine's workers open.

A rank of the trainer packs a piece of the flat segment into a buffer, waits for its device and counts the piece on a control
page; every worker copies it into memory of its own and counts it as taken. With two buffers, packing and copying overlap.
A worker never hands out a view of a buffer, because a loader may keep tensors until their layer is whole.

**Several devices.** A process may see one device only, so every rank has a ring, known by the identity of its device. A worker
takes from the first ring of its own device, or from that of its host's first rank where no rank is on its device; on the
control pages of the host's other rings it says so. A rank from which nobody takes has its buffers all the same: device memory
that was exported is not surely free again when its owner lets it go, so a ring is made once.

**Several hosts.** Pages and buffers are of one host: a worker is offered the rings of the ranks on its own, and a rank expects
the workers of its own, of which there may be none (`vime.weights.joining`).

`stream` sends from the tensors that it is given, without a detour, and `stage` reads them for digests only. **The last
published weights** are kept on the host: `keep` copies them there once the engines have them, and `stream(())` sends from that
copy. So an engine that restarts is served while the parameters are parked or already newer. The copy costs the size of the
weights in host memory.

What a device can do stands behind `vime.weights.transports.exporters.Exporter`.
"""

from __future__ import annotations

import itertools
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from vime.errors import DeadlineError, WeightSyncError
from vime.weights.buckets import Bucket, plan_buckets
from vime.weights.fingerprint import word_digest
from vime.weights.manifest import manifest_from_json, manifest_to_json
from vime.weights.transports.base import Manifest, NamedTensors, TransferContext
from vime.weights.transports.control_page import ControlPage, State
from vime.weights.transports.exporters import SHARED_MEMORY, Exporter, HostExporter, build_exporter
from vime.weights.transports.flat import (
    HostCopy,
    asks_for_copy,
    bytes_of,
    exhaust,
    in_order,
    stage_in_place,
    view_of,
)

__all__ = ["DeviceIpcEngine", "DeviceIpcTrainer", "HostExporter"]

PROTOCOL = "device_ipc"
BUCKET_BYTES = 256 * 2**20
BUFFERS = 2

Piece = tuple[int, int]
"""First byte and end in the flat segment."""


def cut(bucket: Bucket, buffer_bytes: int) -> tuple[Piece, ...]:
    """The pieces in which a bucket travels: one, unless a tensor or fused group is larger than a buffer."""
    starts = range(bucket.start, bucket.end, buffer_bytes)
    return tuple((start, min(start + buffer_bytes, bucket.end)) for start in starts)


class DeviceIpcTrainer:
    """The trainer's half, on every rank. One without workers iterates its weights, which may be a collective, and finishes.

    Args:
        exporter: `module:callable` of an `Exporter`; both halves use it.
        identity: a name for this rank's device in place of the exporter's.
        bucket_bytes: size of a buffer in device memory; there are `buffers` of them as long as this half lives.
        timeout_s: limit of every single wait.
    """

    streams = True
    every_rank = True

    def __init__(
        self,
        *,
        context: TransferContext,
        exporter: str,
        identity: str = "",
        buffers: int = BUFFERS,
        directory: Path | str = SHARED_MEMORY,
    ) -> None:
        if buffers < 1:
            raise WeightSyncError(f"device_ipc with {buffers} buffers", fix="set buffers to 2 or more")
        self._manifest: Manifest = context.manifest
        self._rank, self._timeout_s = context.rank, context.timeout_s
        self._target, self._stem, self._identity = exporter, f"vime-{context.run_id}", identity
        self._directory = Path(directory)
        self._bucket_bytes = context.bucket_bytes or BUCKET_BYTES
        buckets = plan_buckets(context.manifest.tensors, self._bucket_bytes)
        largest = max((b.nbytes for b in buckets), default=0)
        self._buffer_bytes = max(1, min(self._bucket_bytes, largest))
        self._pieces = tuple(itertools.chain.from_iterable(cut(b, self._buffer_bytes) for b in buckets))
        self._num_buffers = buffers
        self._exporter: Exporter | None = None
        self._buffers: list[Any] = []
        self._kept = HostCopy(context.manifest, lambda nbytes: self._open_exporter().host(nbytes))
        self._page: ControlPage | None = None
        self._pages = itertools.count()
        self._receivers: int | None = None
        self._keeps = context.rank == 0

    @classmethod
    def from_context(cls, context: TransferContext, **options: Any) -> DeviceIpcTrainer:
        return cls(context=context, **options)

    def init_info(self, receivers: int) -> Mapping[str, Any]:
        """Make the buffers, the first time, and a new control page for `receivers` workers."""
        exporter = self._open_exporter()
        self._drop_page()
        # The name ends like every segment of ours, so that a sweep finds its owner.
        path = self._directory / f"{self._stem}-c{next(self._pages)}-{os.getpid()}-w"
        self._page, self._receivers = ControlPage.create(path, receivers), None
        if not self._buffers:
            self._buffers = [exporter.allocate(self._buffer_bytes) for _ in range(self._num_buffers)]
        ring = {
            "identity": self._identity or exporter.identity(),
            "page": str(path),
            "handles": [dict(exporter.export(buffer)) for buffer in self._buffers],
        }
        info = {
            "exporter": self._target,
            "name": self._stem,
            "rings": [ring],
            "bucket_bytes": self._bucket_bytes,
            "buffer_bytes": self._buffer_bytes,
            "timeout_s": self._timeout_s,
        }
        return {"protocol": PROTOCOL, "manifest": manifest_to_json(self._manifest), "info": info}

    def connect(self) -> int:
        """Wait until every worker has joined some ring -> how many have joined this one.

        Raises DeadlineError that lists those that did not come.
        """
        self._receivers = self._live_page().await_receivers(self._timeout_s)
        self._keeps = self._keeps or self._receivers > 0
        return self._receivers

    def stage(self, weights: NamedTensors, *, version: str, fingerprint: bool) -> Mapping[str, Any]:
        """Digests, if asked, are computed where the tensors are; else nothing is read."""
        if self._rank:
            exhaust(weights if fingerprint else ())
            return {"version": version, "tensors": 0}
        return stage_in_place(weights, self._manifest, version=version, digest_of=word_digest if fingerprint else None)

    def stream(self, weights: NamedTensors) -> None:
        """Send `weights`, in manifest order, or for `()` the host's copy; return when every worker has taken all.

        Raises WeightSyncError or DeadlineError naming the worker in the way. The workers then give up too, and the next
        `init_info` starts afresh. `weights` is always exhausted, since for other ranks it may be a collective.
        """
        arriving = iter(weights)
        try:
            if self._receivers is None and self._rank == 0:
                raise WeightSyncError("no connected engines", fix="initialise the engines' weight transfer first")
            if not self._receivers:
                exhaust(arriving)
                return
            self._live_page()
            self._send([(0, self._kept.buffer)] if asks_for_copy(weights) else _spans_of(arriving, self._manifest))
        except BaseException:
            if self._page is not None:
                self._page.end(State.BROKEN)
            exhaust(arriving)
            raise

    def keep(self, weights: NamedTensors) -> None:
        """Copy `weights` to page-locked memory of the host, where there is enough of it.

        Rank 0 does, and every rank from which a worker took once: one that is restarted there will again.
        """
        if self._keeps:
            self._kept.write(weights)
        else:
            exhaust(weights)

    def close(self) -> None:
        """Remove the control page and give the buffers up. Calling it again does nothing."""
        self._drop_page()
        self._kept.drop()
        self._buffers = []
        if self._exporter is not None:
            self._exporter.close()
            self._exporter = None

    # ---- sending

    def _send(self, spans: Iterable[tuple[int, Any]]) -> None:
        """Each span is (place in the segment, bytes there), in ascending order."""
        exporter, page = self._open_exporter(), self._live_page()
        waiting = deque(self._pieces)
        buffer: Any = None
        for at, data in spans:
            end = at + data.numel()
            while waiting and waiting[0][0] < end:
                start, stop = waiting[0]
                if buffer is None:
                    buffer = self._buffers[page.await_room(self._num_buffers, self._timeout_s) % self._num_buffers]
                begin, until = max(at, start), min(end, stop)
                if begin < until:
                    buffer[begin - start : until - start].copy_(data[begin - at : until - at], non_blocking=True)
                if end < stop:
                    break
                exporter.synchronize()
                page.fill()
                waiting.popleft()
                buffer = None
        page.await_taken(self._timeout_s)

    # ---- what is there

    def _open_exporter(self) -> Exporter:
        if self._exporter is None:
            self._exporter = build_exporter(self._target, name=self._stem)
        return self._exporter

    def _live_page(self) -> ControlPage:
        if self._page is None or self._page.header("state") != State.READY:
            raise WeightSyncError("no connected engines", fix="initialise the engines' weight transfer first")
        return self._page

    def _drop_page(self) -> None:
        if self._page is not None:
            self._page.end(State.LEFT)
            self._page.path.unlink(missing_ok=True)
            self._page.close()
            self._page = None


class DeviceIpcEngine:
    """The engine's half in one worker; its number is `rank_offset + worker_rank`.

    `identity` names this worker's device in place of the exporter's.
    """

    def __init__(self, *, identity: str = "") -> None:
        self._identity = identity
        self._page: ControlPage | None = None
        self._exporter: Exporter | None = None
        self._number = 0
        self._next_piece = 0
        self._is_lost = False
        self._timeout_s = 0.0
        self._buffers: list[Any] = []
        self._plan: list[tuple[Bucket, tuple[Piece, ...]]] = []

    def connect(self, info: Mapping[str, Any]) -> None:
        """Open the buffers and join. Raises WeightSyncError saying why this worker cannot reach them."""
        self.close()
        buckets = plan_buckets(manifest_from_json(info["manifest"]).tensors, int(info["bucket_bytes"]))
        self._plan = [(bucket, cut(bucket, int(info["buffer_bytes"]))) for bucket in buckets]
        self._number = int(info["rank_offset"]) + int(info["worker_rank"])
        self._timeout_s = float(info["timeout_s"])
        exporter = build_exporter(info["exporter"], name=info["name"])
        rings = info["rings"]
        own = self._identity or exporter.identity()
        ring = next((ring for ring in rings if ring["identity"] == own), rings[0])
        self._buffers = [exporter.open(handle) for handle in ring["handles"]]
        for other in rings:
            if other is not ring:
                page = ControlPage.open(Path(other["page"]))
                page.decline(self._number)
                page.close()
        page = ControlPage.open(Path(ring["page"]))
        page.join(self._number)
        self._page, self._exporter, self._next_piece = page, exporter, page.of(self._number, "taken")
        self._is_lost = False

    def receive(self, info: Mapping[str, Any]) -> NamedTensors:
        """Yield bucket by bucket out of memory of this worker's own.

        Closing the generator early takes the rest off the ring unread, so that trainer and other workers go on.
        """
        if self._page is None or self._exporter is None or self._is_lost:
            raise WeightSyncError("not connected to the trainer", fix="initialise the engine's weight transfer first")
        end = self._next_piece + sum(len(pieces) for _, pieces in self._plan)
        try:
            for bucket, pieces in self._plan:
                flat = self._exporter.empty(bucket.nbytes)
                for start, stop in pieces:
                    with self._taking() as buffer:
                        flat[start - bucket.start : stop - bucket.start].copy_(buffer[: stop - start], non_blocking=True)
                        self._exporter.synchronize()
                for spec in bucket.tensors:
                    yield spec.name, view_of(flat, spec, start=bucket.start)
        finally:
            self._skip_to(end)

    def close(self) -> None:
        """Leave the ring; the trainer no longer waits for this worker but fails at once."""
        if self._page is not None:
            self._page.leave(self._number)
            self._page.close()
        if self._exporter is not None:
            self._exporter.close()
        self._page, self._exporter, self._buffers = None, None, []

    @contextmanager
    def _taking(self) -> Iterator[Any]:
        """The buffer of the next piece, which counts as taken afterwards, also when it could not be copied."""
        assert self._page is not None
        number = self._next_piece
        try:
            self._page.await_piece(number, self._timeout_s)
        except (WeightSyncError, DeadlineError):
            self._is_lost = True
            raise
        try:
            yield self._buffers[number % len(self._buffers)]
        finally:
            self._next_piece = number + 1
            self._page.take(self._number, number)

    def _skip_to(self, end: int) -> None:
        """After an early end. Where the trainer fails as well, the error that is on its way already tells more."""
        with suppress(WeightSyncError, DeadlineError):
            while self._page is not None and not self._is_lost and self._next_piece < end:
                with self._taking():
                    pass


def _spans_of(weights: NamedTensors, manifest: Manifest) -> Iterator[tuple[int, Any]]:
    """(place in the segment, bytes) of every tensor. Raises WeightSyncError unless they come as the manifest lists them."""
    for spec, tensor in in_order(weights, manifest):
        yield spec.offset, bytes_of(tensor)
