"""What every rank of a training role has: a process group, its part of a model, weights under their names, memory by tag."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from vime.algorithms.base import LossSums
from vime.data.written import BackgroundWriter
from vime.errors import MemoryStateError, TrainerError
from vime.facts.memory import MemoryBackend, Tag
from vime.memory.residency import TRAINER_TAGS, Residency, check_semantics
from vime.models.base import Family
from vime.models.registry import family_of, read_config
from vime.trainer.megatron import checkpoint, optimizer, parallel
from vime.trainer.megatron.checkpoint import Progress, TrainState
from vime.trainer.megatron.folders import TensorSource, drawn_source, folder_source
from vime.trainer.megatron.model import Model, build_model
from vime.trainer.megatron.packing import Pack, pack_samples, pack_shape
from vime.trainer.megatron.regions import tagged_tensors, total_bytes
from vime.trainer.megatron.shared_prompts import arrange, pack_shared, saves_enough
from vime.trainer.megatron.step import Totals, finalize_unscaled, reduce_sums
from vime.trainer.megatron.weights_view import WeightsView
from vime.trainer.megatron.wrapping import Wrapped, wrap_model
from vime.trainer.runtime import BindsHost, DeviceRuntime
from vime.trainer.setup import TrainerSetup
from vime.types import TrainSample
from vime.weights.transports.base import Manifest


class Rank(ABC):
    """One rank of a training role. Every public method is called on all ranks of the role at once.

    Building it joins the role's process group and waits for the other ranks. Raises ConfigError for a model or setting
    that cannot be used and TrainerError for a layout that does not fit.
    """

    tags: tuple[Tag, ...] = TRAINER_TAGS
    """What the role has on a device."""
    _routed = False
    """Whether samples bring the experts of their tokens, which only siblings with the same ones in their prompt can share."""
    _wrapped: Wrapped

    def __init__(self, setup: TrainerSetup) -> None:
        parallel.check_parallel(setup)
        hf_config = read_config(setup.model_path)
        family = family_of(hf_config)
        self._setup = setup
        self._runtime: DeviceRuntime = setup.runtime.bootstrap.build()
        if isinstance(self._runtime, BindsHost) and setup.node_device is not None:
            self._runtime.bind_host(setup.node_device)
        self._runtime.set_device(setup.local_rank)
        self._device = _device(self._runtime)
        parallel.start_process_group(setup, self._runtime)
        try:
            self._axes = parallel.start_model_parallel(setup)
            parallel.seed_everything(setup.seed, self._runtime)
            self._model = self._build_model(family, hf_config)
            self._view = WeightsView(self._model, self._axes)
            self._load_weights()
            attention = setup.adaptation.core_attention
            able = attention is not None and getattr(attention.load(), "shares_prompts", False)
            self._shares_prompts = able and self._axes.cp_size == 1
            self._shape = pack_shape(self._axes, vocab=self._model.shape.vocab, device=self._device)
            self._build()
            self._register_memory()
        except BaseException:
            parallel.stop_process_group()
            raise

    # ---- what a kind of rank sets up

    def _build_model(self, family: Family, hf_config: Mapping[str, Any]) -> Model:
        """This rank's part of the model, with undefined weights."""
        return build_model(self._setup, axes=self._axes, family=family, hf_config=hf_config, device=self._device)

    @abstractmethod
    def _build(self) -> None:
        """What the rank does with its model: sets `_wrapped`."""

    @abstractmethod
    def _tensors(self) -> dict[Tag, list[Tensor]]:
        """The tensors behind each of `tags`."""

    # ---- model

    def _load_weights(self) -> None:
        """Read or draw the weights before an optimizer copies them."""
        self._view.load(self._source())

    def _source(self) -> TensorSource:
        seed = self._setup.from_scratch_seed
        if seed is None:
            return folder_source(self._setup.model_path, self._model.family.table, self._model.shape)
        return drawn_source(seed, std=self._deviation())

    def _deviation(self) -> float:
        """Of drawn weights."""
        return float(self._model.hf_config.get("initializer_range", 0.02))

    def _packed(self, samples: Sequence[TrainSample]) -> tuple[list[TrainSample], Pack]:
        """Samples in the order of their pack, with one copy of a prompt where the hardware and the samples allow it."""
        if self._shares_prompts and samples and saves_enough(samples, routed=self._routed):
            arranged = arrange(samples)
            return arranged, pack_shared(arranged, self._shape, routed=self._routed)
        return list(samples), pack_samples(samples, self._shape)

    def _by_sample(
        self, micro_batches: Sequence[Sequence[TrainSample]], run: Callable[[list[Pack]], list[Tensor]]
    ) -> list[list[tuple[float, ...]]]:
        """What `run` makes of packs ([targets] each, on the last stage), as one tuple a sample, in the order given.

        Only the rank that `speaks` gets them; on the others the list is empty. Raises TrainerError for a sample without a
        prompt.
        """
        if any(not sample.prompt_ids for samples in micro_batches for sample in samples):
            raise TrainerError("a sample has no prompt token to predict from", fix="check the rollout or data function")
        packed = [self._packed(samples) for samples in micro_batches]
        results = run([pack for _, pack in packed])
        if not self.speaks:
            return []
        found: dict[int, tuple[float, ...]] = {}
        for (arranged, _), result in zip(packed, results, strict=True):
            parts = result.float().cpu().split([len(sample.response_ids) for sample in arranged])
            found |= {id(sample): tuple(part.tolist()) for sample, part in zip(arranged, parts, strict=True)}
        return [[found[id(sample)] for sample in samples] for samples in micro_batches]

    def _from_last_stage(self, parts: Sequence[Tensor], size: int) -> Tensor:
        """[size] float32 values that the last stage holds, on every stage."""
        if self._axes.pp_size == 1:
            return torch.cat(list(parts)) if parts else torch.zeros(0)
        values = torch.cat(list(parts)) if self._axes.is_last_stage else torch.zeros(size, device=self._device)
        dist.broadcast(values, src=self._axes.last_stage_rank, group=self._axes.pp_group)
        return values

    # ---- weights

    @property
    def is_writer(self) -> bool:
        """This rank speaks for the weights of its pipeline stage."""
        return self._axes.is_writer

    @property
    def speaks(self) -> bool:
        """This rank tells what its data-parallel rank scored."""
        return self._axes.is_last_stage and self._axes.tp_rank == 0 and self._axes.cp_rank == 0

    def manifest(self) -> Manifest:
        """Every tensor of the model under its Hugging Face name; a tied head is left out."""
        return self._view.manifest()

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """(name, full tensor) of this rank's pipeline stage; every tensor-parallel rank must exhaust it."""
        self._require([Tag.PARAMS], to="read weights")
        return self._view.full_tensors()

    def weights_on_first_rank(self) -> Iterator[tuple[str, Tensor]]:
        """(name, full tensor) of the whole model on global rank 0; other ranks exhaust an empty iterator."""
        self._require([Tag.PARAMS], to="read weights")
        return self._view.on_first_rank()

    def weights_on_every_rank(self) -> Iterator[tuple[str, Tensor]]:
        """(name, full tensor) of the whole model in manifest order on every rank; every rank must exhaust it."""
        self._require([Tag.PARAMS], to="read weights")
        return self._view.on_every_rank()

    def save_hf(self, directory: Path) -> None:
        """Write the model as a Hugging Face folder."""
        self._require([Tag.PARAMS], to="save weights")
        self._view.save_hf(directory, model_path=self._setup.model_path, dtype=self._setup.dtype)

    # ---- memory

    def _register_memory(self) -> None:
        self._residency = Residency()
        self._residency.register(self._setup.role, self.tags)
        backend = self._setup.memory
        self._memory = backend.factory.build() if isinstance(backend, MemoryBackend) else None
        if self._memory is not None:
            for tag in self.tags:
                self._memory.region(tag, lambda tag=tag: self._tensors()[tag])

    def _require(self, tags: Iterable[Tag], *, to: str) -> None:
        self._residency.require(self._setup.role, tags, to=to)

    def memory_bytes(self) -> dict[Tag, int]:
        """Device bytes by tag."""
        return total_bytes(self._tensors())

    def park(self, tags: Iterable[Tag]) -> None:
        """Take tags off the device; gradients are dropped, everything else is kept on the host.

        Raises MemoryStateError when a tag is not on the device or the platform cannot free it.
        """
        tags, role = list(tags), self._setup.role
        memory, semantics = self._backend(tags)
        kept = [tag for tag in tags if tag is not Tag.GRADS and semantics[tag].preserves]
        lost = [tag for tag in tags if tag not in kept]
        if wrong := [tag for tag in lost if tag is not Tag.GRADS]:
            raise MemoryStateError(f"the platform would lose the content of {', '.join(wrong)}", fix="use residency: resident")
        for tag in tags:
            self._require([tag], to=f"park {tag}")
        self._residency.park(role, kept)
        self._residency.discard(role, lost)
        self._runtime.synchronize()
        memory.pause(kept)
        memory.discard(lost)
        self._runtime.empty_cache()

    def wake(self, tags: Iterable[Tag]) -> None:
        """Bring parked tags back: gradients as zeros, everything else as it was."""
        tags = list(tags)
        memory, _ = self._backend(tags)
        self._residency.wake(self._setup.role, tags)
        memory.resume(tags)

    def _backend(self, tags: Sequence[Tag]) -> tuple[Any, Mapping[Tag, Any]]:
        backend = self._setup.memory
        if self._memory is None or not isinstance(backend, MemoryBackend):
            reason = "it has no memory backend" if isinstance(backend, MemoryBackend) else backend.reason
            raise MemoryStateError(f"this trainer cannot leave its device: {reason}", fix="use residency: resident")
        check_semantics(tags, backend.tags, platform=self._runtime.device_type)
        return self._memory, backend.tags

    def close(self) -> None:
        """Leave the process group. The object is of no use afterwards."""
        self._wrapped.release()
        parallel.stop_process_group()


class TrainingRank(Rank):
    """A rank that trains: gradients, optimizer, learning-rate schedule and checkpoints."""

    def _build(self) -> None:
        section = self._setup.trainer
        optimizer.use_fused_adam(self._setup.adaptation.optimizer)
        optimizer.use_list_operations()
        self._wrapped = wrap_model(self._model, overlap=section.overlap)
        self._optimizer = optimizer.build_optimizer(section.optimizer, model=self._model, wrapped=self._wrapped)
        self._scheduler = optimizer.build_scheduler(
            section.optimizer,
            optimizer=self._optimizer,
            num_steps=self._setup.num_steps,
            updates_per_step=section.updates_per_step,
        )
        self._model.config.finalize_model_grads_func = finalize_unscaled
        self._model.config.grad_scale_func = self._optimizer.scale_loss
        self._progress = Progress()
        self._writer = BackgroundWriter()

    def _tensors(self) -> dict[Tag, list[Tensor]]:
        return tagged_tensors(self._wrapped, self._optimizer)

    def _updated(self, learn: Callable[[], list[LossSums]], like: LossSums) -> tuple[Totals, float, float]:
        """One optimizer update with the gradients that `learn` leaves -> its numbers, the gradient norm, the rate.

        `like` names the numbers; see `reduce_sums`. Raises TrainerError, on every rank and before any weight changes, when
        a loss or the norm is not finite.
        """
        self._wrapped.zero_grad_buffer()
        self._optimizer.zero_grad()
        totals = reduce_sums(learn(), axes=self._axes, like=like)
        norm, rate = optimizer.update(self._optimizer, self._scheduler)
        self._progress.updates += 1
        return totals, norm, rate

    @property
    def step_count(self) -> int:
        """Completed steps, those before a resume included."""
        return self._progress.steps

    @property
    def update_count(self) -> int:
        """Completed optimizer updates, those before a resume included."""
        return self._progress.updates

    def save(self, directory: Path, *, background: bool = False) -> None:
        """Write a checkpoint from which training goes on bit for bit; see `checkpoint.save`. Raises CheckpointError."""
        self._require(TRAINER_TAGS, to="save a checkpoint")
        checkpoint.save(self._state(), directory, background=self._writer if background else None)

    def load(self, directory: Path) -> None:
        """Restore a checkpoint. Raises CheckpointError when it is torn or of another model."""
        self._require(TRAINER_TAGS, to="load a checkpoint")
        checkpoint.load(self._state(), directory)

    def close(self) -> None:
        """Leave when what was begun is on the disk."""
        self._writer.wait()
        super().close()

    def _state(self) -> TrainState:
        return TrainState(
            model=self._model,
            optimizer=self._optimizer,
            scheduler=self._scheduler,
            runtime=self._runtime,
            axes=self._axes,
            progress=self._progress,
        )


def _device(runtime: DeviceRuntime) -> torch.device:
    """The current device. Its number is what this process counts, which need not be the rank's place on the node."""
    if runtime.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(runtime.device_type, torch.get_device_module(runtime.device_type).current_device())
