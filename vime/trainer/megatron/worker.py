"""One rank of a training role. Every public method is called on all ranks at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from vime.algorithms.registry import algorithm_of
from vime.errors import MemoryStateError, TrainerError
from vime.facts.memory import MemoryBackend, Tag
from vime.memory.residency import TRAINER_TAGS, Residency, check_semantics
from vime.models.registry import family_of, read_config
from vime.trainer.megatron import checkpoint, optimizer, parallel
from vime.trainer.megatron.checkpoint import Progress, TrainState
from vime.trainer.megatron.logprobs import HeadScores
from vime.trainer.megatron.model import build_model, wrap_model
from vime.trainer.megatron.packing import (
    ALIGNMENT,
    Pack,
    PackShape,
    check_samples,
    make_pack,
    pack_samples,
    split_by_tokens,
    target_tensors,
)
from vime.trainer.megatron.regions import tagged_tensors, total_bytes
from vime.trainer.megatron.shared_prompts import arrange, pack_shared, saves_enough
from vime.trainer.megatron.step import MicroBatch, Passes, finalize_unscaled, reduce_sums
from vime.trainer.megatron.weights_view import WeightsView, drawn_source, folder_source
from vime.trainer.runtime import BindsHost, DeviceRuntime
from vime.trainer.setup import TrainerSetup
from vime.types import TrainSample, UpdateWork
from vime.weights.transports.base import Manifest

ROLE = "actor"


class MegatronWorker:
    """Model, optimizer and schedule of one rank.

    Building it joins the role's process group and waits for the other ranks. Raises ConfigError for a model or setting
    that cannot be trained and TrainerError for a layout that does not fit.
    """

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
            self._model = build_model(setup, axes=self._axes, family=family, hf_config=hf_config, device=self._device)
            self._view = WeightsView(self._model, self._axes)
            self._load_weights()
            self._build_training()
            self._register_memory()
        except BaseException:
            parallel.stop_process_group()
            raise

    def _load_weights(self) -> None:
        """Read or draw the weights before the optimizer copies them."""
        seed = self._setup.from_scratch_seed
        if seed is None:
            self._view.load(folder_source(self._setup.model_path))
        else:
            std = float(self._model.hf_config.get("initializer_range", 0.02))
            self._view.load(drawn_source(seed, std=std))

    def _build_training(self) -> None:
        section = self._setup.trainer
        optimizer.use_fused_adam(self._setup.adaptation.optimizer)
        optimizer.use_list_operations()
        self._wrapped = wrap_model(self._model)
        self._optimizer = optimizer.build_optimizer(section.optimizer, model=self._model, wrapped=self._wrapped)
        self._scheduler = optimizer.build_scheduler(
            section.optimizer,
            optimizer=self._optimizer,
            num_steps=self._setup.num_steps,
            updates_per_step=section.updates_per_step,
        )
        self._model.config.finalize_model_grads_func = finalize_unscaled
        self._model.config.grad_scale_func = self._optimizer.scale_loss
        self._algorithm = algorithm_of(self._setup.algorithm)
        self._temperature = self._setup.temperature if self._algorithm.needs_rollout_log_probs else 1.0
        self._passes = Passes(
            self._model,
            self._wrapped,
            axes=self._axes,
            algorithm=self._algorithm,
            temperature=self._temperature,
            chunk_rows=section.log_prob_chunk_tokens,
        )
        self._progress = Progress()
        attention = self._setup.adaptation.core_attention
        self._shares_prompts = attention is not None and getattr(attention.load(), "shares_prompts", False)
        self._shape = PackShape(ALIGNMENT * self._axes.tp_size, self._model.shape.vocab, self._device)

    def _register_memory(self) -> None:
        self._residency = Residency()
        self._residency.register(ROLE, TRAINER_TAGS)
        backend = self._setup.memory
        self._memory = backend.factory.build() if isinstance(backend, MemoryBackend) else None
        if self._memory is not None:
            for tag in TRAINER_TAGS:
                self._memory.region(tag, lambda tag=tag: self._tensors()[tag])

    # ---- training

    def train_step(self, updates: Sequence[UpdateWork]) -> dict[str, float]:
        """One optimizer step per update -> metrics, the same on every rank.

        Raises TrainerError when a sample does not fit, or a loss or gradient is not finite; no weight is changed by that
        update. Metrics of several updates are averaged; counts are summed, maxima are maxima, the rate is the last one.
        """
        self._residency.require(ROLE, TRAINER_TAGS, to="train")
        prepared = [[self._micro_batch(samples, work) for samples in work.micro_batches] for work in updates]
        if self._algorithm.needs_old_log_probs:
            prepared = [self._with_old_log_probs(jobs) for jobs in prepared]
        rows = [self._update(jobs, work) for jobs, work in zip(prepared, updates, strict=True)]
        self._progress.steps += 1
        return _merged(rows)

    def _micro_batch(self, samples: Sequence[TrainSample], work: UpdateWork) -> tuple[Pack, MicroBatch]:
        check_samples(samples, self._algorithm)
        if self._shares_prompts and samples and saves_enough(samples):
            samples = arrange(samples)
            pack = pack_shared(samples, self._shape)
        else:
            pack = pack_samples(samples, self._shape)
        return pack, MicroBatch(target_tensors(samples, algorithm=self._algorithm, work=work, device=self._device))

    def _with_old_log_probs(self, jobs: Sequence[tuple[Pack, MicroBatch]]) -> list[tuple[Pack, MicroBatch]]:
        """Score every micro-batch with the weights from before the step's first update."""
        packs = [pack for pack, _ in jobs]
        scores = self._passes.score(packs, temperature=self._temperature)
        if not scores:
            return list(jobs)
        return [(pack, MicroBatch(m.targets, s.log_probs)) for (pack, m), s in zip(jobs, scores, strict=True)]

    def _update(self, jobs: Sequence[tuple[Pack, MicroBatch]], work: UpdateWork) -> dict[str, float]:
        self._wrapped.zero_grad_buffer()
        self._optimizer.zero_grad()
        sums = self._passes.train(jobs)
        totals = reduce_sums(sums, axes=self._axes, like=self._algorithm.empty_sums())
        norm, rate = optimizer.update(self._optimizer, self._scheduler)
        self._progress.updates += 1
        rollouts = torch.tensor(float(sum(len(m) for m in work.micro_batches)), dtype=torch.float64)
        dist.all_reduce(rollouts, group=self._axes.dp_group)
        named = {**totals.weighted, **totals.token_means, **totals.token_maxima}
        own = {"grad_norm": norm, "lr-pg_0": rate, "tokens": float(totals.tokens), "rollouts": float(rollouts)}
        return {f"train/{name}": value for name, value in {**named, **own}.items()}

    @property
    def step_count(self) -> int:
        """Completed calls of `train_step`, those before a resume included."""
        return self._progress.steps

    @property
    def update_count(self) -> int:
        """Completed optimizer updates, those before a resume included."""
        return self._progress.updates

    # ---- scoring

    def log_probs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """For every sequence the log-probs of its tokens from the second on, at temperature 1; the same on every rank."""
        self._residency.require(ROLE, [Tag.PARAMS], to="compute log-probs")
        lengths = [len(sequence) for sequence in sequences]
        if min(lengths, default=2) < 2:
            raise TrainerError("a sequence of fewer than two tokens has no log-probs", fix="send longer sequences")
        parts = split_by_tokens(lengths, self._setup.trainer.max_tokens_per_micro_batch)
        packs = [make_pack([sequences[i] for i in part], [1] * len(part), self._shape) for part in parts]
        scores = self._passes.score(packs, temperature=1.0)
        flat = self._from_last_stage([s.log_probs for s in scores], sum(lengths) - len(lengths)).tolist()
        result, start = [], 0
        for length in lengths:
            result.append(flat[start : start + length - 1])
            start += length - 1
        return result

    def evaluate_rows(self, samples: Sequence[TrainSample]) -> dict[str, float]:
        """Teacher-forced scores of supervised rows, the same list given to every rank.

        `loss` is the mean negative log-likelihood over response tokens; `exact_match` the share of rows whose response
        tokens are all the argmax, which is what greedy decoding would then produce.
        """
        self._residency.require(ROLE, [Tag.PARAMS], to="evaluate")
        own = samples[self._axes.dp_rank :: self._axes.dp_size]
        lengths = [len(s.prompt_ids) + len(s.response_ids) for s in own]
        parts = split_by_tokens(lengths, self._setup.trainer.max_tokens_per_micro_batch)
        groups = [[own[i] for i in part] for part in parts]
        packs = [pack_samples(group, self._shape) for group in groups]
        scores = self._passes.score(packs, temperature=1.0, greedy=True)
        sums = torch.zeros(4, dtype=torch.float64)
        for group, score in zip(groups, scores, strict=False):
            sums += _row_sums(group, score)
        dist.all_reduce(sums, group=self._axes.dp_group)
        if self._axes.pp_size > 1:
            dist.broadcast(sums, src=self._axes.last_stage_rank, group=self._axes.pp_group)
        loss, tokens, matches, rows = sums.tolist()
        return {"loss": loss / max(tokens, 1.0), "exact_match": matches / max(rows, 1.0)}

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

    def manifest(self) -> Manifest:
        """Every tensor of the model under its Hugging Face name; a tied head is left out."""
        return self._view.manifest()

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """(name, full tensor) of this rank's pipeline stage; every tensor-parallel rank must exhaust it."""
        self._residency.require(ROLE, [Tag.PARAMS], to="read weights")
        return self._view.full_tensors()

    def weights_on_first_rank(self) -> Iterator[tuple[str, Tensor]]:
        """(name, full tensor) of the whole model on global rank 0; other ranks exhaust an empty iterator."""
        self._residency.require(ROLE, [Tag.PARAMS], to="read weights")
        return self._view.on_first_rank()

    def weights_on_every_rank(self) -> Iterator[tuple[str, Tensor]]:
        """(name, full tensor) of the whole model in manifest order on every rank; every rank must exhaust it."""
        self._residency.require(ROLE, [Tag.PARAMS], to="read weights")
        return self._view.on_every_rank()

    # ---- checkpoints

    def save(self, directory: Path) -> None:
        """Write a checkpoint from which training goes on bit for bit. Raises CheckpointError."""
        self._residency.require(ROLE, TRAINER_TAGS, to="save a checkpoint")
        checkpoint.save(self._state(), directory)

    def load(self, directory: Path) -> None:
        """Restore a checkpoint. Raises CheckpointError when it is torn or of another model."""
        self._residency.require(ROLE, TRAINER_TAGS, to="load a checkpoint")
        checkpoint.load(self._state(), directory)

    def save_hf(self, directory: Path) -> None:
        """Write the policy as a Hugging Face folder."""
        self._residency.require(ROLE, [Tag.PARAMS], to="save weights")
        self._view.save_hf(directory, model_path=self._setup.model_path, dtype=self._setup.dtype)

    def _state(self) -> TrainState:
        return TrainState(
            model=self._model,
            wrapped=self._wrapped,
            optimizer=self._optimizer,
            scheduler=self._scheduler,
            runtime=self._runtime,
            axes=self._axes,
            progress=self._progress,
        )

    # ---- memory

    def memory_bytes(self) -> dict[Tag, int]:
        """Device bytes by tag."""
        return total_bytes(self._tensors())

    def park(self, tags: Iterable[Tag]) -> None:
        """Take tags off the device; gradients are dropped, everything else is kept on the host.

        Raises MemoryStateError when a tag is not on the device or the platform cannot free it.
        """
        tags = list(tags)
        memory, semantics = self._backend(tags)
        kept = [tag for tag in tags if tag is not Tag.GRADS and semantics[tag].preserves]
        lost = [tag for tag in tags if tag not in kept]
        if wrong := [tag for tag in lost if tag is not Tag.GRADS]:
            raise MemoryStateError(f"the platform would lose the content of {', '.join(wrong)}", fix="use residency: resident")
        for tag in tags:
            self._residency.require(ROLE, [tag], to=f"park {tag}")
        self._residency.park(ROLE, kept)
        self._residency.discard(ROLE, lost)
        self._runtime.synchronize()
        memory.pause(kept)
        memory.discard(lost)
        self._runtime.empty_cache()

    def wake(self, tags: Iterable[Tag]) -> None:
        """Bring parked tags back: gradients as zeros, everything else as it was."""
        tags = list(tags)
        memory, _ = self._backend(tags)
        self._residency.wake(ROLE, tags)
        memory.resume(tags)

    def _backend(self, tags: Sequence[Tag]) -> tuple[Any, Mapping[Tag, Any]]:
        backend = self._setup.memory
        if self._memory is None or not isinstance(backend, MemoryBackend):
            reason = "it has no memory backend" if isinstance(backend, MemoryBackend) else backend.reason
            raise MemoryStateError(f"this trainer cannot leave its device: {reason}", fix="use residency: resident")
        check_semantics(tags, backend.tags, platform=self._runtime.device_type)
        return self._memory, backend.tags

    def _tensors(self) -> dict[Tag, list[Tensor]]:
        return tagged_tensors(self._wrapped, self._optimizer)

    def close(self) -> None:
        """Leave the process group. The object is of no use afterwards."""
        parallel.stop_process_group()


def _device(runtime: DeviceRuntime) -> torch.device:
    """The current device. Its number is what this process counts, which need not be the rank's place on the node."""
    if runtime.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(runtime.device_type, torch.get_device_module(runtime.device_type).current_device())


def _row_sums(samples: Sequence[TrainSample], score: HeadScores) -> Tensor:
    """[negative log-likelihood, tokens, matching rows, rows] of a pack; float64 on the host."""
    lengths = torch.tensor([len(s.response_ids) for s in samples])
    row = torch.repeat_interleave(torch.arange(len(samples)), lengths)
    assert score.greedy is not None
    misses = torch.zeros(len(samples), dtype=torch.float64).index_add_(0, row, (~score.greedy.cpu()).double())
    values = [-score.log_probs.cpu().double().sum(), lengths.sum().double(), (misses == 0).sum().double()]
    return torch.stack([*values, values[0].new_tensor(float(len(samples)))])


def _merged(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Metrics of a step from those of its updates."""
    if len(rows) == 1:
        return dict(rows[0])
    result: dict[str, float] = {}
    for name in rows[0] if rows else ():
        values = [row[name] for row in rows]
        if name.endswith("_max"):
            result[name] = max(values)
        elif name in ("train/tokens", "train/rollouts"):
            result[name] = sum(values)
        else:
            result[name] = values[-1] if name == "train/lr-pg_0" else sum(values) / len(values)
    return result
