"""The two halves of a transport. The trainer's half runs in trainer ranks, the engine's half in vLLM worker processes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

NamedTensors = Iterable[tuple[str, Any]]
"""(Hugging Face name, full unsharded tensor) pairs in manifest order."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of the manifest. `dtype` is torch's short name (`float32`); `offset` counts bytes in a flat segment."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """Every tensor that an update carries, agreed before the first update and checked against the engine's model."""

    tensors: tuple[TensorSpec, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class TransferContext:
    """What a trainer's half may need to know of its run.

    `lead` is rank 0's `init_info(0)`, empty on rank 0 itself; `directory` is the run's, for transports that write files.
    """

    run_id: str
    manifest: Manifest
    rank: int
    host: str
    directory: Path
    bucket_bytes: int
    timeout_s: float
    lead: Mapping[str, Any]


class TrainerHalf(Protocol):
    """One per trainer rank that holds weights; rank 0 talks for all.

    A half that streams is built on rank 0 alone, unless its class says `every_rank = True`: then each rank sends to the
    workers that share its device. All ranks answer `init_info`, each for the workers on its own host, and the `rings` of a
    host are merged into one offer; `connect` answers how many workers take from its rank, and those that have any are given
    all tensors by `stream` and `keep`.

    `stage` runs before the engines are told to receive, `stream` while they receive, `keep` afterwards. A half that
    streams sends from the trainer's own tensors, so its `stage` copies nothing and `keep` makes the copy from which engines
    that start later are served. One that does not stream copies in `stage`; its `stream` and `keep` do nothing.
    """

    streams: bool

    @classmethod
    def from_context(cls, context: TransferContext, **options: Any) -> TrainerHalf:
        """Build it for one rank; `options` are those of the offer's factory."""
        ...

    def init_info(self, receivers: int) -> Mapping[str, Any]:
        """JSON for the engines' half: how to reach this one. `receivers` engine workers will connect."""
        ...

    def connect(self) -> int | None:
        """Finish the handshake while the engines run their half's `connect`."""
        ...

    def stage(self, weights: NamedTensors, *, version: str, fingerprint: bool) -> Mapping[str, Any]:
        """Make the weights readable; return JSON for the engines' `receive`. `fingerprint`: add per-tensor digests.

        A half that streams reads `weights` for digests only: without `fingerprint` it does not touch them.
        """
        ...

    def stream(self, weights: NamedTensors) -> None:
        """Send `weights`, which for other ranks may be a collective: they are exhausted also when sending fails.

        `()` asks for what `keep` took.
        """
        ...

    def keep(self, weights: NamedTensors) -> None:
        """Copy what was sent to the host. A copy that fails leaves none."""
        ...

    def close(self) -> None: ...


class EngineHalf(Protocol):
    """One per vLLM worker process."""

    def connect(self, info: Mapping[str, Any]) -> None: ...

    def receive(self, info: Mapping[str, Any]) -> NamedTensors:
        """Yield the tensors of one update in manifest order. Raises WeightSyncError naming what did not arrive."""
        ...

    def close(self) -> None: ...
