"""A rank of a training role in its own process: its Megatron part and, for the actor, the trainer half of the transport."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vime.cluster.guardian import guard_segments
from vime.cluster.payload import RankWork, placed, resolve
from vime.facts.memory import Tag
from vime.facts.process import Factory
from vime.platforms.discovery import ResolvedPlugin, impose
from vime.trainer.setup import TrainerSetup
from vime.types import Sample, TrainSample, UpdateWork
from vime.weights.hosts import host_identity
from vime.weights.transports.base import NamedTensors, TransferContext
from vime.weights.transports.flat import exhaust


@dataclass(frozen=True)
class TrainerInfo:
    """What a rank tells the driver once it is up."""

    pid: int
    memory_bytes: Mapping[str, int]


@dataclass(frozen=True)
class HalfInfo:
    """What a rank says of its half: whether the transport streams, and from every rank; `host` as of `vime.weights.hosts`.

    `lead` is rank 0's `init_info(0)` without the manifest, which every rank has.
    """

    streams: bool
    every_rank: bool
    lead: Mapping[str, Any]
    num_tensors: int
    host: str = ""


@dataclass(frozen=True)
class TransferSetup:
    """Which trainer half to build and what it needs to know beside its own options.

    `guarded`: the rank's node outlives the run, so what the half leaves in shared memory needs a guardian.
    """

    factory: Factory
    run_id: str
    directory: Path
    bucket_bytes: int
    timeout_s: float
    host: str = "127.0.0.1"
    guarded: bool = False


class TrainerProcess:
    """Runs as a Ray actor. Every method is called on all ranks at once and in the same order."""

    def __init__(self, setup: TrainerSetup, plugins: Sequence[ResolvedPlugin] = (), unset: Sequence[str] = ()) -> None:
        for name in unset:
            os.environ.pop(name, None)
        impose(plugins)
        self._setup = setup
        self._half: Any = None
        self._streams = False

    def rendezvous(self, host: str = "127.0.0.1") -> tuple[str, int]:
        """An address and a free port for the process group; asked of rank 0, whose node has the address `host`."""
        from vime.rollout.ports import lease_port

        if self._setup.rank != 0:
            return host, 0
        with lease_port(host) as lease:
            return lease.host, lease.port

    def start(self, address: str, port: int) -> TrainerInfo:
        """Build the model and what the role's task needs beside it."""
        from vime.trainer.megatron.tasks import build_rank

        self._setup = replace(self._setup, master_address=address, master_port=port)
        self.worker: Any = build_rank(self._setup)
        # The manifest covers all pipeline stages, so every rank must ask for it at the same time.
        self._manifest = self.worker.manifest()
        return TrainerInfo(os.getpid(), self.memory_bytes())

    def memory_bytes(self) -> dict[str, int]:
        return {str(tag): size for tag, size in self.worker.memory_bytes().items()}

    def park(self, tags: Sequence[Tag]) -> None:
        self.worker.park(tags)

    def wake(self, tags: Sequence[Tag]) -> None:
        self.worker.wake(tags)

    # ---- steps

    def train(self, work: RankWork) -> dict[str, float]:
        """One step: fetch this rank's samples, then one optimizer step an update."""
        return self.worker.train_step(self._fetched(work))

    def score(self, work: RankWork) -> Any:
        """Score this rank's samples -> a reference to `Scores`; None on ranks that another one speaks for."""
        import ray

        batches = [samples for update in self._fetched(work) for samples in update.micro_batches]
        rows = self.worker.score(batches)
        return ray.put(placed(work, rows)) if self.worker.speaks else None

    @staticmethod
    def _fetched(work: RankWork) -> tuple[UpdateWork, ...]:
        import ray

        facts = {name: ray.get(list(refs)) for name, refs in work.facts.items()}
        return resolve(work, ray.get(list(work.refs)), facts)

    def evaluate_rows(self, samples: Sequence[Sample]) -> dict[str, float]:
        rows = [TrainSample(s.prompt_ids, s.response_ids, s.log_probs, s.loss_mask, s.reward, ()) for s in samples]
        return self.worker.evaluate_rows(rows)

    def log_probs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return self.worker.log_probs(sequences)

    # ---- checkpoints

    def save(self, directory: Path, background: bool = False) -> None:
        self.worker.save(directory, background=background)

    def load(self, directory: Path) -> int:
        """Restore everything; returns the number of optimizer steps done."""
        self.worker.load(directory)
        return self.worker.step_count

    def save_hf(self, directory: Path) -> None:
        self.worker.save_hf(directory)

    # ---- weights

    def open_transfer(self, transfer: TransferSetup, lead: Mapping[str, Any]) -> HalfInfo:
        """Build this rank's half if it has one. `lead` is what rank 0 says of itself, for the other ranks."""
        half_class = transfer.factory.load()
        self._streams, every_rank = half_class.streams, getattr(half_class, "every_rank", False)
        if self._setup.rank == 0 or every_rank or (self.worker.is_writer and not self._streams):
            context = TransferContext(
                run_id=transfer.run_id,
                manifest=self._manifest,
                rank=self._setup.rank,
                host=transfer.host,
                directory=transfer.directory,
                bucket_bytes=transfer.bucket_bytes,
                timeout_s=transfer.timeout_s,
                lead=lead,
            )
            if transfer.guarded:
                guard_segments(f"vime-{transfer.run_id}")
            self._half = half_class.from_context(context, **transfer.factory.options)
        own = {**self.init_info(0), "manifest": []} if self._setup.rank == 0 else {}
        return HalfInfo(self._streams, every_rank, own, len(self._manifest.tensors), host_identity())

    def init_info(self, receivers: int) -> Mapping[str, Any]:
        """What this rank's half offers to so many workers: to those of its own host where every rank sends.

        All ranks have one manifest, which rank 0 tells.
        """
        offer = self._half.init_info(receivers)
        return offer if self._setup.rank == 0 else {**offer, "manifest": []}

    def connect_transfer(self) -> int:
        """Finish the handshake -> engine workers that take from this rank, where every rank sends."""
        return self._half.connect() or 0

    def stage(self, version: str, fingerprint: bool) -> Mapping[str, Any]:
        """Make the weights readable for engines; every rank takes part where they are gathered.

        A half that streams reads them for digests only, so without `fingerprint` no rank does.
        """
        weights = self.worker.weights_on_first_rank() if self._streams else self.worker.weights()
        if self._half is not None:
            return self._half.stage(weights, version=version, fingerprint=fingerprint)
        exhaust(weights if fingerprint or not self._streams else ())
        return {"tensors": 0}

    def stream(self, kept: bool, on_every_rank: bool) -> None:
        """Send the live weights while engines receive, or with `kept` the copy that `keep` made.

        `on_every_rank`: other ranks than the first send as well, so all of them gather all weights.
        """
        weights = () if kept else self._whole(on_every_rank)
        if self._half is not None:
            self._half.stream(weights)
        else:
            exhaust(weights)

    def keep(self, on_every_rank: bool) -> None:
        """Copy the weights for engines that start later. Ray runs an actor's calls in order, so no step comes between."""
        weights = self._whole(on_every_rank)
        if self._half is not None:
            self._half.keep(weights)
        else:
            exhaust(weights)

    def _whole(self, on_every_rank: bool) -> NamedTensors:
        return self.worker.weights_on_every_rank() if on_every_rank else self.worker.weights_on_first_rank()

    def close(self) -> None:
        if self._half is not None:
            self._half.close()
        self.worker.close()
