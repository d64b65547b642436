"""Weights through a ring of buffers in device memory that the engine's workers open.

Rank 0 of the trainer packs a piece of the flat segment into a buffer, waits for its device and counts the piece on a control
page; every worker copies it into memory of its own and counts it as taken. With two buffers, packing and copying overlap.
A worker never hands out a view of a buffer, because a loader may keep tensors until their layer is whole.

**The last published weights** are kept on the host: `stage` writes them there, which also gives the digests. `stream` sends
from the tensors that it is given, without a detour, or from the host's copy when it is given none: that is how an engine
that restarts is served while the parameters are parked or already newer. It costs the size of the weights in host memory.

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
from vime.weights.transports.flat import FlatImage, check_spec, view_of

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
    """The trainer's half. Only rank 0 sends; other ranks iterate their weights, which may be a collective, and finish.

    Args:
        exporter: `module:callable` of an `Exporter`; both halves use it.
        bucket_bytes: size of a buffer in device memory; there are `buffers` of them as long as this half lives.
        timeout_s: limit of every single wait.
    """

    streams = True

    def __init__(
        self,
        *,
        context: TransferContext,
        exporter: str,
        buffers: int = BUFFERS,
        directory: Path | str = SHARED_MEMORY,
    ) -> None:
        if buffers < 1:
            raise WeightSyncError(f"device_ipc with {buffers} buffers", fix="set buffers to 2 or more")
        self._manifest: Manifest = context.manifest
        self._rank, self._timeout_s = context.rank, context.timeout_s
        self._target, self._stem = exporter, f"vime-{context.run_id}"
        self._directory = Path(directory)
        self._bucket_bytes = context.bucket_bytes or BUCKET_BYTES
        buckets = plan_buckets(context.manifest.tensors, self._bucket_bytes)
        largest = max((b.nbytes for b in buckets), default=0)
        self._buffer_bytes = max(1, min(self._bucket_bytes, largest))
        self._pieces = tuple(itertools.chain.from_iterable(cut(b, self._buffer_bytes) for b in buckets))
        self._num_buffers = buffers
        self._exporter: Exporter | None = None
        self._buffers: list[Any] = []
        self._image: FlatImage | None = None
        self._page: ControlPage | None = None
        self._pages = itertools.count()

    @classmethod
    def from_context(cls, context: TransferContext, **options: Any) -> DeviceIpcTrainer:
        return cls(context=context, **options)

    def init_info(self, receivers: int) -> Mapping[str, Any]:
        """Make the buffers, the first time, and a new control page for `receivers` workers."""
        exporter = self._open_exporter()
        self._drop_page()
        # The name ends like every segment of ours, so that a sweep finds its owner.
        path = self._directory / f"{self._stem}-c{next(self._pages)}-{os.getpid()}-w"
        self._page = ControlPage.create(path, receivers)
        info = {
            "exporter": self._target,
            "name": self._stem,
            "page": str(path),
            "handles": [dict(exporter.export(buffer)) for buffer in self._buffers],
            "bucket_bytes": self._bucket_bytes,
            "buffer_bytes": self._buffer_bytes,
            "timeout_s": self._timeout_s,
        }
        return {"protocol": PROTOCOL, "manifest": manifest_to_json(self._manifest), "info": info}

    def connect(self) -> None:
        """Wait for all workers. Raises DeadlineError that lists those that did not come."""
        if self._rank == 0:
            self._live_page().await_receivers(self._timeout_s)

    def stage(self, weights: NamedTensors, *, version: str, fingerprint: bool) -> Mapping[str, Any]:
        """Copy the weights to the host; digests are computed where the tensors are."""
        if self._rank:
            _exhaust(weights)
            return {"version": version, "tensors": 0}
        if self._image is None:
            self._image = FlatImage(self._manifest, self._open_exporter().host(self._manifest.nbytes))
        return {"version": version, **self._image.write(weights, fingerprint=fingerprint, digest_of=word_digest)}

    def stream(self, weights: NamedTensors) -> None:
        """Send `weights`, in manifest order, or without any the host's copy; return when every worker has taken all.

        Raises WeightSyncError or DeadlineError naming the worker in the way. The workers then give up too, and the next
        `init_info` starts afresh. `weights` is always exhausted, since for other ranks it may be a collective.
        """
        if self._rank:
            _exhaust(weights)
            return
        arriving = iter(weights)
        try:
            self._send(self._spans(next(arriving, None), arriving))
        except BaseException:
            if self._page is not None:
                self._page.end(State.BROKEN)
            _exhaust(arriving)
            raise

    def close(self) -> None:
        """Remove the control page and give the buffers up. Calling it again does nothing."""
        self._drop_page()
        self._buffers, self._image = [], None
        if self._exporter is not None:
            self._exporter.close()
            self._exporter = None

    # ---- sending

    def _spans(self, first: tuple[str, Any] | None, rest: Iterable[tuple[str, Any]]) -> Iterator[tuple[int, Any]]:
        """(place in the segment, bytes there) in ascending order."""
        if first is not None:
            yield from _spans_of(itertools.chain([first], rest), self._manifest)
        elif self._image is not None:
            yield 0, self._image.buffer
        else:
            raise WeightSyncError("stream before stage", fix="stage the weights first")

    def _send(self, spans: Iterable[tuple[int, Any]]) -> None:
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
            self._buffers = [self._exporter.allocate(self._buffer_bytes) for _ in range(self._num_buffers)]
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
    """The engine's half in one worker; its number is `rank_offset + worker_rank`."""

    def __init__(self) -> None:
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
        page = ControlPage.open(Path(info["page"]))
        exporter = build_exporter(info["exporter"], name=info["name"])
        self._buffers = [exporter.open(handle) for handle in info["handles"]]
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
    import torch

    due = iter(manifest.tensors)
    for name, tensor in weights:
        spec = next(due, None)
        if spec is None or spec.name != name:
            raise WeightSyncError(
                f"tensor {name} came where {spec.name if spec else 'nothing'} was due", fix="send tensors in manifest order"
            )
        place = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device="meta")
        check_spec(place, name, tensor, again=False)
        yield spec.offset, tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if (missing := next(due, None)) is not None:
        raise WeightSyncError(f"tensor {missing.name} was due and did not come", fix="send every tensor of the manifest")


def _exhaust(weights: Iterable[Any]) -> None:
    for _ in weights:
        pass
