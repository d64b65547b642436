"""What training puts around a rank's pieces of a model: mixed precision, data parallelism, and one handle for all of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from vime.trainer.megatron.model import Model


class Wrapped:
    """The pieces of a pipeline stage as megatron-core's schedules take them; one piece without a virtual pipeline.

    With `overlaps` gradients are reduced while the last micro-batch's backward pass runs, and an update leaves parameters to
    be gathered by the next forward pass: `settle` gathers them at once, for whoever reads them otherwise.
    """

    def __init__(self, chunks: Sequence[Any], *, overlaps: bool = False) -> None:
        self.chunks = list(chunks)
        self.overlaps = overlaps

    @property
    def buffers(self) -> list[Any]:
        """megatron-core's parameter and gradient buffers, those of experts included; of a model that is trained."""
        return [buffer for part in self.chunks for buffer in (*part.buffers, *part.expert_parallel_buffers)]

    def release(self) -> None:
        """Let go of all pieces, which are of no use afterwards.

        megatron-core hangs hooks on the nodes that collect gradients. They hold its wrapper in a ring that Python's collector
        does not see, and with it buffers and process groups, whose threads run on in a process that builds another rank.
        """
        for part in self.chunks:
            vars(part).clear()
        self.chunks.clear()

    def parameters(self) -> Iterator[Tensor]:
        return chain.from_iterable(part.parameters() for part in self.chunks)

    def train(self) -> None:
        for part in self.chunks:
            part.train()

    def eval(self) -> None:
        for part in self.chunks:
            part.eval()

    def zero_grad_buffer(self) -> None:
        for part in self.chunks:
            part.zero_grad_buffer()

    def settle(self) -> None:
        """Gather parameters that an update has left apart; a collective over data-parallel ranks."""
        for part in self.chunks if self.overlaps else ():
            part.start_param_sync(force_sync=True)


def frozen_model(model: Model) -> Wrapped:
    """The model under mixed precision (where asked for), without gradients and what they need."""
    for bare in model.chunks:
        bare.requires_grad_(False)
    return Wrapped([_in_precision(model, bare) for bare in model.chunks])


def wrap_model(model: Model, *, overlap: bool = False) -> Wrapped:
    """The model under mixed precision (where asked for) and data parallelism with a distributed optimizer."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=True,
        check_for_nan_in_grad=False,
        overlap_grad_reduce=overlap,
        overlap_param_gather=overlap,
    )
    # Only the first piece is cut into buckets: the others are reduced while it is still computed.
    parts = [
        DistributedDataParallel(model.config, settings, _in_precision(model, bare), disable_bucketing=index > 0)
        for index, bare in enumerate(model.chunks)
    ]
    if overlap:
        pauses = [part.no_sync for part in parts]
        model.config.no_sync_func = pauses[0] if len(pauses) == 1 else pauses
    return Wrapped(parts, overlaps=overlap)


def _in_precision(model: Model, bare: Any) -> Any:
    from megatron.core.transformer.module import Float16Module

    if not model.config.bf16:
        return bare
    wide = {name: buffer for name, buffer in bare.named_buffers() if buffer.dtype == torch.float32}
    module = Float16Module(model.config, bare)
    # It rounds buffers too; a router's bias would lose the digits by which it differs from the engine's.
    for name, buffer in wide.items():
        owner, _, last = name.rpartition(".")
        setattr(bare.get_submodule(owner), last, buffer)
    return module
