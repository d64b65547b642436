"""Weights by broadcast in flat buckets over a process group of their own.

Rank 0 is the trainer, ranks 1.. are engine workers. The group is built on a store of its own and never touches
torch.distributed's default group, which belongs to Megatron on one side and to vLLM on the other. The trainer packs its own
tensors into two buckets in turn, one of which travels while the other is filled; `keep` copies the weights to the host, from
where an engine that restarts is served.
"""

from __future__ import annotations

import dataclasses
import socket
import time
from collections import deque
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

from vime.errors import DeadlineError, WeightSyncError
from vime.weights.buckets import Bucket, plan_buckets
from vime.weights.fingerprint import word_digest
from vime.weights.hosts import own_address
from vime.weights.manifest import manifest_from_json, manifest_to_json
from vime.weights.transports.base import Manifest, NamedTensors, TransferContext
from vime.weights.transports.flat import (
    HostCopy,
    asks_for_copy,
    bytes_of,
    exhaust,
    host_buffer,
    in_order,
    own_digest,
    stage_in_place,
    view_of,
)

PROTOCOL = "collective"
BUCKET_BYTES = 64 * 2**20
BUFFERS = 2


@dataclasses.dataclass(frozen=True, slots=True)
class Seat:
    """A place in a group: where its members meet, which one this is, how long each may wait."""

    store: Any
    host: str
    rank: int
    world: int
    timeout_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class Medium:
    """What carries the bytes: a backend of torch.distributed, and the device whose memory it reads and writes."""

    backend: str = "gloo"
    device: str = "cpu"

    @property
    def is_host(self) -> bool:
        return self.device == "cpu"

    def group(self, seat: Seat) -> Any:
        """A group beside the default one. Raises WeightSyncError for a backend that this torch does not have."""
        if self.backend == "gloo":
            return _gloo_group(seat)
        registry = _dist().Backend
        if (plugin := registry._plugins.get(self.backend.upper())) is not None:
            return _registered_group(seat, plugin.creator_fn, extended=plugin.extended_api)
        group_class = getattr(_dist(), f"ProcessGroup{self.backend.upper()}", None)
        if group_class is None:
            raise WeightSyncError(
                f"torch.distributed of this process has no backend {self.backend}",
                fix="install the torch build or extension of this platform on both sides",
            )
        return _native_group(seat, group_class)


class CollectiveTrainer:
    """The trainer's half. Only rank 0 sends; other ranks iterate their weights, which may be a collective, and finish.

    `host` is the address under which engines reach rank 0. `init_info` opens a new rendezvous for the workers named by
    `receivers`; `connect` then waits for them. Every wait ends after `timeout_s`. Options `backend` (a name that
    torch.distributed knows) and `device` (torch's name of the device on both sides) choose what carries the bytes.
    """

    streams = True

    def __init__(
        self,
        *,
        manifest: Manifest,
        rank: int = 0,
        timeout_s: float = 120.0,
        host: str = "127.0.0.1",
        bucket_bytes: int = BUCKET_BYTES,
        **options: Any,
    ) -> None:
        self._medium = Medium(**options)
        self._manifest = manifest
        self._rank = rank
        self._host = host
        self._bucket_bytes = bucket_bytes
        self._timeout_s = timeout_s
        self._kept = HostCopy(manifest, lambda nbytes: host_buffer(nbytes, page_locked=not self._medium.is_host))
        self._buffers: list[Any] = []
        self._store: Any = None
        self._group: Any = None
        self._receivers = 0

    def init_info(self, receivers: int) -> Mapping[str, Any]:
        self._group, self._receivers = None, receivers
        self._store = _serve_store(self._host, self._timeout_s)
        info = {
            "host": self._host,
            "port": self._store.port,
            "world": receivers + 1,
            "bucket_bytes": self._bucket_bytes,
            "timeout_s": self._timeout_s,
            **dataclasses.asdict(self._medium),
        }
        return {"protocol": PROTOCOL, "manifest": manifest_to_json(self._manifest), "info": info}

    @classmethod
    def from_context(cls, context: TransferContext, **options: Any) -> CollectiveTrainer:
        c = context
        keywords = {"host": c.host, "bucket_bytes": c.bucket_bytes or BUCKET_BYTES, "timeout_s": c.timeout_s, **options}
        return cls(manifest=c.manifest, rank=c.rank, **keywords)

    def connect(self) -> None:
        """Wait for all workers, then build the group. Raises DeadlineError that lists the ranks that did not come."""
        if self._rank:
            return
        deadline = time.monotonic() + self._timeout_s
        missing = [r for r in range(1, self._receivers + 1) if not _arrived(self._store, r, deadline)]
        if missing:
            raise DeadlineError(
                f"engine workers with group ranks {missing} of 1..{self._receivers} did not connect "
                f"within {self._timeout_s:g} s",
                fix=f"check that they reach {self._host} and read their logs",
            )
        self._group = self._medium.group(Seat(self._store, self._host, 0, self._receivers + 1, self._timeout_s))

    def stage(self, weights: NamedTensors, *, version: str, fingerprint: bool) -> Mapping[str, Any]:
        """Digests, if asked, are computed where the tensors are; else nothing is read."""
        if self._rank:
            exhaust(weights if fingerprint else ())
            return {"version": version, "tensors": 0}
        digest_of = own_digest if self._medium.is_host else word_digest
        return stage_in_place(weights, self._manifest, version=version, digest_of=digest_of if fingerprint else None)

    def stream(self, weights: NamedTensors) -> None:
        """Broadcast `weights`, in manifest order, or for `()` the host's copy.

        Raises WeightSyncError for a tensor out of order and for a bucket that was not taken; workers must then join anew.
        `weights` is always exhausted, since for other ranks it may be a collective.
        """
        if self._rank:
            exhaust(weights)
            return
        arriving = iter(weights)
        try:
            if self._group is None:
                raise WeightSyncError("stream before connect", fix="initialise the engines' weight transfer first")
            self._send(self._kept_tensors() if asks_for_copy(weights) else _bytes_in_order(arriving, self._manifest))
        except BaseException:
            self._group = None
            exhaust(arriving)
            raise

    def keep(self, weights: NamedTensors) -> None:
        """Copy `weights` to the host."""
        if self._rank:
            exhaust(weights)
            return
        self._kept.write(weights)

    def close(self) -> None:
        self._group = self._store = None
        self._kept.drop()
        self._buffers = []

    def _kept_tensors(self) -> Iterator[Any]:
        kept = self._kept.buffer
        return (kept[spec.offset : spec.offset + spec.nbytes] for spec in self._manifest.tensors)

    def _send(self, tensors: Iterator[Any]) -> None:
        """Bytes of the manifest's tensors, in order. A bucket is filled anew when the broadcast from it has ended."""
        travelling: deque[tuple[str, Any]] = deque()
        try:
            for number, bucket in enumerate(plan_buckets(self._manifest.tensors, self._bucket_bytes)):
                if len(travelling) == BUFFERS:
                    self._finish_oldest(travelling)
                flat = self._buffer(number % BUFFERS, bucket.nbytes)
                for spec in bucket.tensors:
                    flat[spec.offset - bucket.start :][: spec.nbytes].copy_(next(tensors), non_blocking=True)
                travelling.append((f"bucket {number} ({bucket.tensors[0].name} …)", _broadcast(self._group, flat)))
            exhaust(tensors)
            while travelling:
                self._finish_oldest(travelling)
        finally:
            # The error that is on its way holds this frame: workers would wait until it, and with it the group, is gone.
            travelling.clear()

    def _finish_oldest(self, travelling: deque[tuple[str, Any]]) -> None:
        what, work = travelling.popleft()
        _finish(work, self._timeout_s, f"{what} was not taken by every engine worker")

    def _buffer(self, index: int, nbytes: int) -> Any:
        """uint8 [nbytes] on the medium's device; made once, as large as the largest bucket."""
        import torch

        if not self._buffers:
            largest = max(bucket.nbytes for bucket in plan_buckets(self._manifest.tensors, self._bucket_bytes))
            made = (torch.empty(largest, dtype=torch.uint8, device=self._medium.device) for _ in range(BUFFERS))
            self._buffers = list(made)
        return self._buffers[index][:nbytes]


class CollectiveEngine:
    """The engine's half in one worker; its group rank is `1 + rank_offset + worker_rank`."""

    def __init__(self) -> None:
        self._manifest: Manifest | None = None
        self._group: Any = None
        self._timeout_s = 0.0
        self._bucket_bytes = BUCKET_BYTES
        self._medium = Medium()

    def connect(self, info: Mapping[str, Any]) -> None:
        dist = _dist()
        self._group = None
        self._manifest = manifest_from_json(info["manifest"])
        self._timeout_s, self._bucket_bytes = float(info["timeout_s"]), int(info["bucket_bytes"])
        self._medium = Medium(info["backend"], info["device"])
        rank = 1 + int(info["rank_offset"]) + int(info["worker_rank"])
        try:
            store = dist.TCPStore(
                info["host"], info["port"], is_master=False, wait_for_workers=False, timeout=timedelta(seconds=self._timeout_s)
            )
            store.set(_here(rank), "1")
            self._group = self._medium.group(Seat(store, info["host"], rank, int(info["world"]), self._timeout_s))
        except RuntimeError as error:
            raise WeightSyncError(
                f"group rank {rank} could not join the trainer at {info['host']}:{info['port']}: {_first_line(error)}",
                fix="check that the trainer lives and that the address is reachable",
            ) from None

    def receive(self, info: Mapping[str, Any]) -> NamedTensors:
        """Yield bucket by bucket; the next one travels while the caller loads this one.

        Closing the generator early takes the rest off the wire, so that the trainer's broadcast ends too.
        """
        import torch

        if self._group is None or self._manifest is None:
            raise WeightSyncError("receive before connect", fix="initialise the engine's weight transfer first")
        waiting = deque(plan_buckets(self._manifest.tensors, self._bucket_bytes))
        travelling: deque[tuple[Bucket, Any, Any]] = deque()

        def take_next() -> None:
            if waiting:
                bucket = waiting.popleft()
                flat = torch.empty(bucket.nbytes, dtype=torch.uint8, device=self._medium.device)
                travelling.append((bucket, flat, _broadcast(self._group, flat)))

        try:
            take_next()
            while travelling:
                take_next()
                yield from self._unpack(*travelling.popleft())
        finally:
            while waiting or travelling:
                take_next()
                bucket, _, work = travelling.popleft()
                _finish(work, self._timeout_s, f"the bucket that starts with {bucket.tensors[0].name} did not arrive")

    def close(self) -> None:
        self._group = self._manifest = None

    def _unpack(self, bucket: Bucket, flat: Any, work: Any) -> Iterator[tuple[str, Any]]:
        _finish(work, self._timeout_s, f"the bucket that starts with {bucket.tensors[0].name} did not arrive")
        for spec in bucket.tensors:
            yield spec.name, view_of(flat, spec, start=bucket.start)


def _bytes_in_order(weights: NamedTensors, manifest: Manifest) -> Iterator[Any]:
    return (bytes_of(tensor) for _, tensor in in_order(weights, manifest))


def _dist() -> Any:
    """torch.distributed, untyped: its stores and gloo classes are not declared as exports."""
    import torch.distributed

    return torch.distributed


def _serve_store(host: str, timeout_s: float) -> Any:
    """A store that listens on `host` only, on a port that the system chose."""
    dist = _dist()
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.bind((host, 0))
        listener.listen()
        port = listener.getsockname()[1]
        return dist.TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
            master_listen_fd=listener.detach(),
        )


def _here(rank: int) -> str:
    return f"here/{rank}"


def _arrived(store: Any, rank: int, deadline: float) -> bool:
    try:
        store.wait([_here(rank)], timedelta(seconds=max(0.001, deadline - time.monotonic())))
    except RuntimeError:
        return False
    return True


def _gloo_group(seat: Seat) -> Any:
    dist = _dist()
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=own_address(seat.host))]
    options._timeout = timedelta(seconds=seat.timeout_s)
    return gloo(dist.PrefixStore("weights", seat.store), seat.rank, seat.world, options)


def _registered_group(seat: Seat, creator: Any, *, extended: bool) -> Any:
    """By a backend that registered itself with torch.distributed; the two signatures are those of `register_backend`."""
    store, timeout = _dist().PrefixStore("weights", seat.store), timedelta(seconds=seat.timeout_s)
    if not extended:
        return creator(store, seat.rank, seat.world, timeout)
    options = _dist().distributed_c10d._DistributedBackendOptions()
    options.store, options.group_rank, options.group_size, options.timeout = store, seat.rank, seat.world, timeout
    options.group_id, options.global_ranks_in_group = "weights", list(range(seat.world))
    return creator(options, None)


def _native_group(seat: Seat, group_class: Any) -> Any:
    """By a class of torch itself that takes options."""
    options = group_class.Options()
    options._timeout = timedelta(seconds=seat.timeout_s)
    return group_class(_dist().PrefixStore("weights", seat.store), seat.rank, seat.world, options)


def _broadcast(group: Any, flat: Any) -> Any:
    dist = _dist()
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    return group.broadcast([flat], options)


def _finish(work: Any, timeout_s: float, what: str) -> None:
    try:
        work.wait(timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise WeightSyncError(
            f"{what}: {_first_line(error)}", fix="publish again; if it repeats, read the log of the side that stopped"
        ) from None


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
