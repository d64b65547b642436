"""Distributed checkpoints: model, optimizer, schedule, counters and the random state of every rank."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from vime.data.written import BackgroundWriter, leave_note
from vime.errors import CheckpointError
from vime.trainer.megatron.model import Model
from vime.trainer.megatron.parallel import Axes, random_state, set_random_state
from vime.trainer.runtime import DeviceRuntime
from vime.weights.manifest import short_list

FORMAT = 1
_SHOWN = 3


@dataclass
class Progress:
    """How far training is: steps of the run and optimizer updates."""

    steps: int = 0
    updates: int = 0


@dataclass(frozen=True)
class TrainState:
    """Everything that a checkpoint holds."""

    model: Model
    optimizer: Any
    scheduler: Any
    runtime: DeviceRuntime
    axes: Axes
    progress: Progress


def save(state: TrainState, directory: Path, *, background: BackgroundWriter | None = None) -> None:
    """Write a checkpoint into an empty directory; a collective over all ranks. Raises CheckpointError.

    With `background` this rank's file is copied to the host's memory, and being written when this returns. Either way the
    rank leaves a note in the directory once its file is on the disk: see `vime.data.written`.
    """
    from megatron.core import dist_checkpointing

    from vime.trainer.megatron.checkpoint_writer import InProcessSave

    if background is not None:
        background.wait()  # One copy of the training state is all that a host must have room for.
    if dist.get_rank() == 0:
        directory.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    content = _content(state)
    tensors = _sharded(state, is_loading=False, with_random_state=True)
    tensors["progress"] = dataclasses.asdict(state.progress)
    tensors["scheduler"] = state.scheduler.state_dict()
    strategy = InProcessSave(copies=background is not None)
    try:
        dist_checkpointing.save(tensors, str(directory), strategy, content_metadata=content)
        if background is None:
            leave_note(directory, dist.get_rank(), strategy.written)
    except _failures() as error:
        raise CheckpointError(f"cannot write a checkpoint: {error}", where=str(directory), fix="check the disk") from error
    if background is not None:
        background.start(directory, dist.get_rank(), strategy.copied)


def load(state: TrainState, directory: Path) -> None:
    """Restore in place; a collective over all ranks.

    In another layout the random state cannot be restored and is left as it is. Raises CheckpointError for a checkpoint
    that is torn or of another model.
    """
    from megatron.core import dist_checkpointing

    if not (directory / "metadata.json").is_file():
        raise CheckpointError("not a complete checkpoint", where=str(directory), fix="use the checkpoint before it")
    try:
        content = dist_checkpointing.load_content_metadata(str(directory)) or {}
        _check_content(content, _content(state), directory)
        same_layout = content["layout"] == _content(state)["layout"]
        tensors = _sharded(state, is_loading=True, with_random_state=same_layout)
        _check_there(tensors, directory)
        loaded: Any = dist_checkpointing.load(tensors, str(directory))
    except _failures() as error:
        raise CheckpointError(
            f"cannot read the checkpoint: {error}", where=str(directory), fix="use the checkpoint before it"
        ) from error
    _restore(state, loaded)


def _restore(state: TrainState, loaded: dict[str, Any]) -> None:
    for name, bare in _pieces(state):
        bare.load_state_dict(loaded[name])
    state.progress.steps, state.progress.updates = loaded["progress"]["steps"], loaded["progress"]["updates"]
    _count_updates(loaded["optimizer"], state.progress.updates)
    with torch.no_grad():
        state.optimizer.load_state_dict(loaded["optimizer"])
    state.scheduler.num_steps = 0
    state.scheduler.load_state_dict(loaded["scheduler"])
    if "random" in loaded:
        set_random_state(loaded["random"], state.runtime)


def _count_updates(optimizer: dict[Any, Any], updates: int) -> None:
    """Let every parameter group of a loaded optimizer know how many updates there were, which Adam corrects its moments by.

    megatron-core keeps that count as the first rank has it. Of a kind of parameters that this rank has none of, such as
    experts where the first pipeline stage is dense, it has no count, or the one that it was loaded with.
    """
    parts = [optimizer] if "optimizer" in optimizer else optimizer.values()
    for group in (group for part in parts for group in part["optimizer"]["param_groups"]):
        group["step"] = updates


def _sharded(state: TrainState, *, is_loading: bool, with_random_state: bool) -> dict[str, Any]:
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    model = {name: bare.sharded_state_dict(metadata=metadata) for name, bare in _pieces(state)}
    parameters = model if len(model) > 1 else model["model"]
    optimizer = state.optimizer.sharded_state_dict(parameters, is_loading=is_loading, metadata=metadata)
    tensors = {**model, "optimizer": optimizer}
    if with_random_state:
        value = None if is_loading else random_state(state.runtime)
        tensors["random"] = ShardedObject("random", value, (dist.get_world_size(),), (dist.get_rank(),))
    return tensors


def _pieces(state: TrainState) -> list[tuple[str, Any]]:
    """This rank's modules under the names that megatron-core gives them in a checkpoint's tree (not in its files)."""
    chunks = state.model.chunks
    return [("model", chunks[0])] if len(chunks) == 1 else [(f"model{i}", bare) for i, bare in enumerate(chunks)]


def _content(state: TrainState) -> dict[str, Any]:
    axes = state.axes
    experts = [axes.ep_size, axes.etp_size] if state.model.shape.experts else []
    others = [axes.cp_size, axes.vpp_size] if axes.cp_size * axes.vpp_size > 1 else []
    return {
        "format": FORMAT,
        "layout": [axes.tp_size, axes.pp_size, axes.dp_size, *experts, *others],
        "model": dataclasses.asdict(state.model.shape),
        "dtype": str(state.model.config.params_dtype),
    }


def _check_content(found: dict[str, Any], expected: dict[str, Any], directory: Path) -> None:
    where = str(directory)
    if found.get("format") != expected["format"]:
        raise CheckpointError(
            f"the checkpoint has format {found.get('format')}, this vime reads {expected['format']}",
            where=where,
            fix="resume with the version of vime that wrote it",
        )
    then, now = found["dtype"].removeprefix("torch."), expected["dtype"].removeprefix("torch.")
    if then != now:
        raise CheckpointError(
            f"the checkpoint is of a model in {then}, this run's is in {now}", where=where, fix=f"set model.dtype: {then}"
        )
    before, after = found["model"], expected["model"]
    if changed := [key for key in sorted({*before, *after}) if before.get(key) != after.get(key)]:
        rows = ", ".join(f"{key} {before.get(key)} (this run's: {after.get(key)})" for key in changed)
        raise CheckpointError(
            f"the checkpoint is of another model: {rows}",
            where=where,
            fix="set model.path to the folder that the run began with, or begin a new run from the model that it wrote",
        )


def _check_there(tensors: dict[str, Any], directory: Path) -> None:
    """Raise CheckpointError, on every rank, when the checkpoint lacks a tensor that any rank needs."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    parts = (part for value in nested_values(tensors) for part in parts_of(value))
    needed = {part.key for part in parts if isinstance(part, ShardedTensor)}
    own = sorted(needed - dist_checkpointing.load_tensors_metadata(str(directory)).keys())
    lacking: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(lacking, own)
    if names := sorted({name for names in lacking for name in names}):
        raise CheckpointError(
            f"the checkpoint lacks what this run trains: {short_list(names, _SHOWN)}",
            where=str(directory),
            fix="train the same parameters as the run that wrote it (trainer.freeze_router: true if routers are named)",
        )


def parts_of(cut: Any) -> list[Any]:
    """The sharded tensors behind one entry of a sharded state dict, a factory's own included."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

    return list(nested_values(cut.build())) if isinstance(cut, ShardedTensorFactory) else [cut]


def _failures() -> tuple[type[BaseException], ...]:
    from megatron.core.dist_checkpointing.core import CheckpointingException
    from torch.distributed.checkpoint.api import CheckpointException

    return (CheckpointingException, CheckpointException, OSError, KeyError, ValueError, RuntimeError, AssertionError)
