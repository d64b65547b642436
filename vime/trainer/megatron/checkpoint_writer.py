"""Writes the tensors of a distributed checkpoint from the training process itself.

megatron-core's own writer starts a manager process and forks one child per file. Both are processes that nobody guards,
and a fork of a process with running threads may hang. Import this after the platform's bootstrap.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save


class InProcessSave(TorchDistSaveShardedStrategy):
    """The `torch_dist` format, written synchronously: one file per rank and the metadata by rank 0.

    Derived from megatron-core's own strategy, because newer releases put that one in the place of any other without a word.
    """

    def __init__(self) -> None:
        super().__init__("torch_dist", 1)

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
        """Write what this rank is the main replica of; a collective. Raises CheckpointException naming the rank."""
        by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, keep_only_main_replica=True)
        tensors: Any = mcore_to_pyt_state_dict(by_key, is_loading=False)
        writer = FileSystemWriter(str(checkpoint_dir), single_file_per_rank=True, sync_files=True, thread_count=1)
        planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
        with torch.no_grad():
            save(tensors, storage_writer=writer, planner=planner)
