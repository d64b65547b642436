"""Writes the tensors of a distributed checkpoint from the training process itself.

megatron-core's own writer starts a manager process and forks one child per file. Both are processes that nobody guards,
and a fork of a process with running threads may hang. Import this after the platform's bootstrap.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from vime.data.disk import FileSum
from vime.data.written import FileCopy, HashedFile, Sink


class InProcessSave(TorchDistSaveShardedStrategy):
    """The `torch_dist` format: one file per rank, and the metadata by rank 0.

    With `copies` a rank's file stays in its memory, for somebody to write it later; where every tensor lies in it is known
    then, so the metadata is written at once. Derived from megatron-core's own strategy, because newer releases put that one
    in the place of any other without a word.
    """

    def __init__(self, *, copies: bool) -> None:
        super().__init__("torch_dist", 1)
        self.copied: dict[str, FileCopy] = {}
        """This rank's files that are still to be written, by name."""
        self.written: dict[str, FileSum] = {}
        """This rank's files on the disk, by name."""
        self._copies = copies

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
        """Take or write what this rank is the main replica of; a collective. Raises CheckpointException naming the rank."""
        writer = _RankWriter(Path(checkpoint_dir), self.copied if self._copies else None, self.written)
        planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
        save_tensors(sharded_state_dict, writer, planner)


def save_tensors(sharded_state_dict: Any, writer: FileSystemWriter, planner: SavePlanner) -> None:
    """Let a writer write what this rank is the main replica of; a collective. Raises CheckpointException naming the rank."""
    by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, keep_only_main_replica=True)
    tensors: Any = mcore_to_pyt_state_dict(by_key, is_loading=False)
    with torch.no_grad():
        save(tensors, storage_writer=writer, planner=planner)


class _RankWriter(FileSystemWriter):
    """Puts all that a plan asks of this rank into one file: on the disk, or into `copied` if that is given."""

    def __init__(self, directory: Path, copied: dict[str, FileCopy] | None, written: dict[str, FileSum]) -> None:
        super().__init__(str(directory), single_file_per_rank=True, thread_count=1)
        self._directory, self._copied, self._written = directory, copied, written

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Where each item of the plan is."""
        results: list[WriteResult] = []
        name = f"__{dist.get_rank()}_0.distcp"
        if plan.items and self._copied is not None:
            copy = self._copied[name] = FileCopy()
            results = [put_item(copy, item, planner, name) for item in plan.items]
        elif plan.items:
            file = HashedFile(self._directory / name)
            results = [put_item(file, item, planner, name) for item in plan.items]
            self._written[name] = file.close()
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future


def put_item(sink: Sink | BinaryIO, item: WriteItem, planner: SavePlanner, name: str) -> WriteResult:
    """Append one item to the file of this name, as torch's own writer does it."""
    start = sink.tell()
    data: Any = planner.resolve_data(item)
    if item.type is WriteItemType.BYTE_IO:
        sink.write(data.getbuffer())
    else:
        tensor = data.detach().cpu()
        # A view would be saved with all that it is a view of.
        whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
        stream: Any = sink
        torch.save(tensor if whole else tensor.clone(), stream)
    length = sink.tell() - start
    return WriteResult(item.index, length, _StorageInfo(name, start, length))
