"""One trainer rank in its own process: the Megatron worker plus the trainer half of the weight transport."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vime.cluster.payload import RankWork, resolve
from vime.facts.memory import Tag
from vime.facts.process import Factory
from vime.platforms.discovery import ResolvedPlugin, impose
from vime.trainer.setup import TrainerSetup
from vime.types import Sample, TrainSample
from vime.weights.transports.base import TransferContext


@dataclass(frozen=True)
class TrainerInfo:
    """What a rank tells the driver once it is up."""

    pid: int
    memory_bytes: Mapping[str, int]


@dataclass(frozen=True)
class TransferSetup:
    """Which trainer half to build and what it needs to know beside its own options."""

    factory: Factory
    run_id: str
    directory: Path
    bucket_bytes: int
    timeout_s: float
    host: str = "127.0.0.1"


class TrainerProcess:
    """Runs as a Ray actor. Every method is called on all ranks at once and in the same order."""

    def __init__(self, setup: TrainerSetup, plugins: Sequence[ResolvedPlugin] = (), unset: Sequence[str] = ()) -> None:
        for name in unset:
            os.environ.pop(name, None)
        impose(plugins)
        self._setup = setup
        self._half: Any = None
        self._streams = False

    def rendezvous(self) -> tuple[str, int]:
        """An address and a free port for the process group; asked of rank 0."""
        from vime.rollout.ports import lease_port

        with lease_port() as lease:
            return lease.host, lease.port

    def start(self, address: str, port: int) -> TrainerInfo:
        """Build the model and the optimizer."""
        from vime.trainer.megatron.worker import MegatronWorker

        self._setup = replace(self._setup, master_address=address, master_port=port)
        self.worker = MegatronWorker(self._setup)
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
        import ray

        return self.worker.train_step(resolve(work, ray.get(list(work.refs))))

    def evaluate_rows(self, samples: Sequence[Sample]) -> dict[str, float]:
        rows = [TrainSample(s.prompt_ids, s.response_ids, s.log_probs, s.loss_mask, s.reward, ()) for s in samples]
        return self.worker.evaluate_rows(rows)

    def log_probs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return self.worker.log_probs(sequences)

    # ---- checkpoints

    def save(self, directory: Path) -> None:
        self.worker.save(directory)

    def load(self, directory: Path) -> int:
        """Restore everything; returns the number of optimizer steps done."""
        self.worker.load(directory)
        return self.worker.step_count

    def save_hf(self, directory: Path) -> None:
        self.worker.save_hf(directory)

    # ---- weights

    def open_transfer(self, transfer: TransferSetup, lead: Mapping[str, Any]) -> tuple[bool, Mapping[str, Any], int]:
        """Build this rank's half if it has one; returns (streams, rank 0's info, tensors of the manifest)."""
        half_class = transfer.factory.load()
        self._streams = half_class.streams
        if self._setup.rank == 0 or (self.worker.is_writer and not self._streams):
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
            self._half = half_class.from_context(context, **transfer.factory.options)
        return self._streams, self.init_info(0) if self._setup.rank == 0 else {}, len(self._manifest.tensors)

    def init_info(self, receivers: int) -> Mapping[str, Any]:
        return self._half.init_info(receivers)

    def connect_transfer(self) -> None:
        self._half.connect()

    def stage(self, version: str, fingerprint: bool) -> Mapping[str, Any]:
        """Make the weights readable for engines; every rank takes part in gathering them."""
        weights = self.worker.weights_on_first_rank() if self._streams else self.worker.weights()
        if self._half is not None:
            return self._half.stage(weights, version=version, fingerprint=fingerprint)
        for _ in weights:
            pass
        return {"tensors": 0}

    def stream(self) -> None:
        """Send what was staged while engines receive (broadcast transports, rank 0)."""
        self._half.stream(())

    def close(self) -> None:
        if self._half is not None:
            self._half.close()
        self.worker.close()
