"""Files of a distributed checkpoint, a few tensors at a time. Import it after the platform's bootstrap.

megatron-core reads and writes a whole state dict at once, and on one rank only all layers of a parameter together.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.strategies.torch import MCoreSavePlanner, TorchDistSaveShardedStrategy
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _item_size, _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from vime.trainer.megatron.checkpoint import parts_of
from vime.trainer.megatron.checkpoint_writer import put_item, save_tensors
from vime.trainer.megatron.convert import Report
from vime.trainer.megatron.folders import cut_by_bytes

Read = Callable[[str], Tensor]
"""Local name -> this rank's tensor."""


class LazySave(TorchDistSaveShardedStrategy):
    """The `torch_dist` format in files of `batch_bytes` at most; `cuts` says which sharded tensors a local name stands for."""

    def __init__(self, read: Read, cuts: Mapping[str, Any], *, report: Report, batch_bytes: int) -> None:
        super().__init__("torch_dist", 1)
        self._planner = _LazyPlanner(read, cuts)
        self._report, self._batch_bytes = report, batch_bytes

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
        """Write what is not written yet."""
        writer = _ResumingWriter(Path(checkpoint_dir), self._report, self._batch_bytes)
        save_tensors(sharded_state_dict, writer, self._planner)


class _LazyPlanner(MCoreSavePlanner):
    """Hands out tensors by their place in the checkpoint."""

    def __init__(self, read: Read, cuts: Mapping[str, Any]) -> None:
        super().__init__(dedup_replicated_tensors=False, flatten_state_dict=False)
        self._read, self._cuts = read, cuts
        self._where = {
            (part.key, tuple(part.global_offset)): (name, position)
            for name, cut in cuts.items()
            for position, part in enumerate(parts_of(cut))
        }
        self._last: tuple[str, list[Tensor]] = ("", [])

    def resolve_data(self, write_item: WriteItem) -> Any:
        """The tensor behind an item; what has no tensor is megatron-core's own."""
        data = write_item.tensor_data
        if data is None:
            return super().resolve_data(write_item)
        name, position = self._where[write_item.index.fqn, tuple(write_item.index.offset or ())]
        if self._last[0] != name:
            cut = dataclasses.replace(self._cuts[name], data=self._read(name))
            self._last = name, [part.data for part in parts_of(cut)]
        return self._last[1][position].contiguous().view(data.chunk.sizes)


class _ResumingWriter(FileSystemWriter):
    """Files of at most `batch_bytes`, each with a note of what is in it; a file with a note is not written again."""

    def __init__(self, directory: Path, report: Report, batch_bytes: int) -> None:
        super().__init__(str(directory), single_file_per_rank=True, thread_count=1)
        self._directory, self._report, self._batch_bytes = directory, report, batch_bytes

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """One file after the other; afterwards the notes go."""
        results: list[WriteResult] = []
        files = list(cut_by_bytes(plan.items, _bytes, self._batch_bytes))
        total, done = sum(_bytes(item) for items in files for item in items), 0
        for number, items in enumerate(files):
            path = self._directory / f"__0_{number}.distcp"
            results += self._known(path, items) or self._written(path, items, planner)
            done += sum(map(_bytes, items))
            self._report(done, total, path.name)
        for note in self._directory.glob("*.note"):
            note.unlink()
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def _known(self, path: Path, items: Sequence[WriteItem]) -> list[WriteResult]:
        note = path.with_suffix(".note")
        if not note.is_file() or not path.is_file():
            return []
        places = [_StorageInfo(path.name, *place) for place in json.loads(note.read_text(encoding="utf-8"))]
        if len(places) != len(items):
            return []
        return [WriteResult(item.index, place.length, place) for item, place in zip(items, places, strict=True)]

    def _written(self, path: Path, items: Sequence[WriteItem], planner: SavePlanner) -> list[WriteResult]:
        partial = path.with_suffix(".partial")
        with partial.open("wb") as stream:
            results = [put_item(stream, item, planner, path.name) for item in items]
        partial.replace(path)
        places = [[result.storage_data.offset, result.storage_data.length] for result in results]
        path.with_suffix(".note").write_text(json.dumps(places), encoding="utf-8")
        return results


def _bytes(item: WriteItem) -> int:
    return 0 if item.tensor_data is None else _item_size(item)


class CheckpointReader:
    """Reads tensors of a checkpoint, whatever layout wrote it."""

    def __init__(self, directory: Path) -> None:
        self._reader = FileSystemReader(str(directory))
        self._metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)

    def read(self, cuts: Mapping[str, Any]) -> dict[str, Tensor]:
        """Whole local tensors by local name, on the host; rows that the checkpoint lacks (of a padded vocabulary) are 0."""
        whole = {name: torch.zeros_like(cut.data, device="cpu") for name, cut in cuts.items()}
        targets: dict[tuple[str, torch.Size], Tensor] = {}
        items: list[ReadItem] = []
        for name, cut in cuts.items():
            for part in parts_of(dataclasses.replace(cut, data=whole[name])):
                target = part.data[(None,) * part.prepend_axis_num]
                chunk = ChunkStorageMetadata(torch.Size(part.global_offset), target.shape)
                targets[part.key, chunk.offsets] = target
                found: Any = self._metadata.state_dict_metadata[part.key]
                items += create_read_items_for_chunk_list(part.key, found, [chunk])
        self._reader.read_data(LoadPlan(items), _Into(targets)).wait()
        return whole


class _Into(DefaultLoadPlanner):
    """Puts what is read into given tensors, by the place of each in the checkpoint."""

    def __init__(self, targets: Mapping[tuple[str, torch.Size], Tensor]) -> None:
        super().__init__()
        self._targets = targets

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """The part of a target that an item fills."""
        index = read_item.dest_index
        target = self._targets[index.fqn, torch.Size(index.offset or ())]
        for dim, (start, size) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            target = target.narrow(dim, start, size)
        return target
