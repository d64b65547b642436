"""The policy under its Hugging Face names: read into this rank's shards, and put together again from them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from vime.errors import ConfigError
from vime.facts.model import ModelShape
from vime.models.base import Join, NameRow, NameTable
from vime.trainer.megatron.folders import CarriedTensors, FolderWriter, TensorSource, write_small_files
from vime.trainer.megatron.model import Model
from vime.trainer.megatron.parallel import Axes
from vime.weights.manifest import build_manifest
from vime.weights.transports.base import Manifest, TensorSpec


@dataclass(frozen=True)
class Entry:
    """One local parameter or buffer: its name here, row, Hugging Face names and the full shapes behind them.

    `is_copy`: it is held elsewhere too. `groups` are the names that this place in the model stands for on each
    expert-parallel rank: one expert's a rank, or `names` alone for a parameter that is no expert's.
    """

    local_name: str
    param: Tensor
    row: NameRow
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    is_copy: bool
    groups: tuple[tuple[str, ...], ...]


class WeightsView:
    """Both directions between this rank's parameters and full tensors under Hugging Face names."""

    def __init__(self, model: Model, axes: Axes) -> None:
        self._model = model
        self._axes = axes
        self._manifest: Manifest | None = None

    def entries(self) -> list[Entry]:
        """This stage's parameters in model order. Raises ConfigError for one that the family's table lacks."""
        from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

        table, shape = self._model.family.table, self._model.shape
        each, entries = shape.experts // self._axes.ep_size, []
        pieces = [
            (get_transformer_layer_offset(self._model.config, getattr(bare, "vp_stage", None)), name, param)
            for bare in self._model.chunks
            for name, param in _named_tensors(bare, table)
        ]
        for offset, name, param in pieces:
            row, _ = table.to_hf(name)
            ranks = range(self._axes.ep_size) if row.is_expert else range(1)
            groups = tuple(table.to_hf(name, layer_offset=offset, expert_offset=each * rank)[1] for rank in ranks)
            names = groups[self._axes.ep_rank if row.is_expert else 0]
            is_copy = shape.tied_embeddings and names[0] in table.tied
            entries.append(Entry(name, param, row, names, self._full_shapes(param, row), is_copy, groups))
        return entries

    def _split(self, row: NameRow) -> tuple[int, int, Any]:
        """(rank, size, group) of the ranks that hold the shards of a parameter."""
        axes = self._axes
        if row.is_expert:
            return axes.etp_rank, axes.etp_size, axes.etp_group
        return axes.tp_rank, axes.tp_size, axes.tp_group

    def _full_shapes(self, param: Tensor, row: NameRow) -> tuple[tuple[int, ...], ...]:
        shape = self._model.shape
        sizes = list(param.shape)
        if row.tp_dim is not None:
            sizes[row.tp_dim] *= self._split(row)[1]
        if row.is_vocab:
            sizes[0] = shape.vocab
        return tuple((rows, *sizes[1:]) for rows in _part_rows(row.join, sizes[0], shape))

    @torch.no_grad()
    def load(self, source: TensorSource) -> None:
        """Fill every local parameter from full tensors. Raises ConfigError for a tensor of another shape."""
        for entry in self.entries():
            entry.param.data.copy_(self.shard_of(entry, source))

    def shard_of(self, entry: Entry, source: TensorSource) -> Tensor:
        """This rank's part of a parameter, from full tensors. Raises ConfigError for a tensor of another shape."""
        tied, parts = self._model.family.table.tied, []
        for name, expected in zip(entry.names, entry.shapes, strict=True):
            name = tied[name] if entry.is_copy else name
            part = source(name, expected)
            if tuple(part.shape) != expected:
                raise ConfigError(f"{name} has shape {tuple(part.shape)}, config.json implies {expected}")
            parts.append(part)
        return self._shard(_joined(parts, entry.row.join, self._model.shape), entry)

    def parts_of(self, entry: Entry, whole: Tensor) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of the Hugging Face parts of a parameter that this rank holds whole."""
        whole = whole[: self._model.shape.vocab] if entry.row.is_vocab else whole
        yield from zip(entry.names, _parted(whole, entry.row.join, entry.shapes, self._model.shape), strict=True)

    def _shard(self, full: Tensor, entry: Entry) -> Tensor:
        """This rank's part of a joined tensor; vocabulary rows are padded with zeros first."""
        row = entry.row
        rank, size, _ = self._split(row)
        if row.is_vocab and (missing := entry.param.shape[0] * size - full.shape[0]):
            full = torch.cat([full, full.new_zeros(missing, *full.shape[1:])])
        if row.tp_dim is None or size == 1:
            return full
        if row.join is Join.GATE_UP:
            return torch.cat([half.chunk(size)[rank] for half in full.chunk(2)])
        return full.chunk(size, dim=row.tp_dim)[rank]

    @torch.no_grad()
    def full_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(name, full tensor) of this stage in manifest order; a collective over all ranks of the stage.

        A tensor may be a view of a parameter: copy it before the next update, and never take `.numpy()` of it, which would
        keep the parameter's storage from ever being freed. The copy of a tied tensor is left out.
        """
        for entry in self.entries():
            if entry.is_copy:
                continue
            for names, whole in zip(entry.groups, self._of_each_rank(entry, self._gathered(entry)), strict=True):
                yield from zip(names, _parted(whole, entry.row.join, entry.shapes, self._model.shape), strict=True)

    def _of_each_rank(self, entry: Entry, own: Tensor) -> list[Tensor]:
        """The tensor of every expert-parallel rank for an expert, else this one alone."""
        if len(entry.groups) == 1:
            return [own]
        parts = [torch.empty_like(own) for _ in entry.groups]
        dist.all_gather(parts, own.contiguous(), group=self._axes.ep_group)
        return parts

    def _gathered(self, entry: Entry) -> Tensor:
        own, row = entry.param.detach(), entry.row
        _, size, group = self._split(row)
        if row.tp_dim is not None and size > 1:
            parts = [torch.empty_like(own) for _ in range(size)]
            dist.all_gather(parts, own.contiguous(), group=group)
            if row.join is Join.GATE_UP:
                halves = [part.chunk(2) for part in parts]
                own = torch.cat([half[side] for side in (0, 1) for half in halves])
            else:
                own = torch.cat(parts, dim=row.tp_dim)
        return own[: self._model.shape.vocab] if row.is_vocab else own

    def manifest(self) -> Manifest:
        """Every tensor of the whole model, stage after stage; a collective over the pipeline the first time."""
        if self._manifest is None:
            local = [
                (name, str(entry.param.dtype).removeprefix("torch."), shape)
                for entry in self.entries()
                if not entry.is_copy
                for names in entry.groups
                for name, shape in zip(names, entry.shapes, strict=True)
            ]
            stages: list[Any] = [local]
            if self._axes.pp_size > 1:
                stages = [None] * self._axes.pp_size
                dist.all_gather_object(stages, local, group=self._axes.pp_group)
            self._manifest = build_manifest(row for stage in stages for row in stage)
        return self._manifest

    def on_first_rank(self) -> Iterator[tuple[str, Tensor]]:
        """(name, full tensor) of the whole model on global rank 0, nothing elsewhere; every rank must exhaust it."""
        stages = self._stage_writers()
        manifest = {spec.name: spec for spec in self.manifest().tensors}
        rank = dist.get_rank()
        is_sender = self._axes.is_writer and rank != 0
        for name, tensor in self.full_tensors():
            if rank == 0:
                yield name, tensor
            elif is_sender:
                dist.send(tensor.contiguous(), dst=0)
        if rank == 0:
            for writer, names in stages:
                for name in names if writer != 0 else ():
                    yield name, self._receive(manifest[name], writer)

    @torch.no_grad()
    def on_every_rank(self) -> Iterator[tuple[str, Tensor]]:
        """(name, full tensor) of the whole model in manifest order on every rank, which must exhaust it.

        Gathered inside a stage, then broadcast from there over each pipeline.
        """
        manifest = {spec.name: spec for spec in self.manifest().tensors}
        for stage, (sender, names) in enumerate(self._stage_writers()):
            own = self.full_tensors() if stage == self._axes.pp_rank else ((name, None) for name in names)
            for name, tensor in own:
                whole = self._empty(manifest[name]) if tensor is None else tensor
                if self._axes.pp_size > 1:
                    whole = whole.contiguous()
                    dist.broadcast(whole, src=sender, group=self._axes.pp_group)
                yield name, whole

    def _stage_writers(self) -> list[tuple[int, tuple[str, ...]]]:
        """(global rank, names) of every stage of this rank's pipeline; on rank 0 these ranks are the writers."""
        names = tuple(n for entry in self.entries() if not entry.is_copy for group in entry.groups for n in group)
        if self._axes.pp_size == 1:
            return [(0, names)]
        gathered: list[Any] = [None] * self._axes.pp_size
        dist.all_gather_object(gathered, (dist.get_rank(), names), group=self._axes.pp_group)
        return gathered

    def _receive(self, spec: TensorSpec, writer: int) -> Tensor:
        tensor = self._empty(spec)
        dist.recv(tensor, src=writer)
        return tensor

    def _empty(self, spec: TensorSpec) -> Tensor:
        device = next(self._model.bare.parameters()).device
        return torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device=device)

    def save_hf(self, directory: Path, *, model_path: Path, dtype: str) -> None:
        """Write a Hugging Face folder: safetensors, config.json, and the tokenizer and other small files as they are.

        Layers for multi-token prediction that `model_path` holds go along as they are. A collective over all ranks; rank 0
        writes.
        """
        manifest, tensors = self.manifest(), self.on_first_rank()
        if dist.get_rank() == 0:
            carried = CarriedTensors(model_path, self._model.shape)
            writer = FolderWriter(directory, {spec.name: spec.nbytes for spec in manifest.tensors} | carried.sizes())
            for name, tensor in chain(tensors, carried.read()):
                writer.put(name, tensor)
            writer.finish()
            write_small_files(directory, model_path, hf_config={**self._model.hf_config}, dtype=dtype)
        else:
            deque(tensors, maxlen=0)
        dist.barrier()


def _named_tensors(bare: Any, table: NameTable) -> Iterator[tuple[str, Tensor]]:
    """Parameters, then buffers that a checkpoint holds; other buffers are the module's own."""
    yield from bare.named_parameters()
    kept = [row.pattern for row in table.rows if row.is_buffer]
    for name, buffer in bare.named_buffers():
        if any(pattern.match(name) for pattern in kept):
            yield name, buffer


def _part_rows(join: Join, rows: int, shape: ModelShape) -> tuple[int, ...]:
    """Rows of each Hugging Face part of a joined tensor with `rows` rows."""
    if join is Join.GATE_UP:
        return (rows // 2, rows // 2)
    if join is Join.QKV:
        return (shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim, shape.kv_heads * shape.head_dim)
    return (rows,)


def _joined(parts: list[Tensor], join: Join, shape: ModelShape) -> Tensor:
    """Full Hugging Face parts -> one full tensor in Megatron's row order."""
    if join is Join.ONE:
        return parts[0]
    if join is Join.GATE_UP:
        return torch.cat(parts)
    grouped = [part.reshape(shape.kv_heads, -1, *part.shape[1:]) for part in parts]
    return torch.cat(grouped, dim=1).reshape(-1, *parts[0].shape[1:])


def _parted(whole: Tensor, join: Join, shapes: tuple[tuple[int, ...], ...], shape: ModelShape) -> list[Tensor]:
    """Inverse of `_joined`."""
    if join is Join.ONE:
        return [whole]
    if join is Join.GATE_UP:
        return list(whole.chunk(2))
    grouped = whole.reshape(shape.kv_heads, -1, *whole.shape[1:])
    rows = [part[0] // shape.kv_heads for part in shapes]
    return [part.reshape(size) for part, size in zip(grouped.split(rows, dim=1), shapes, strict=True)]
