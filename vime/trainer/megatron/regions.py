"""Which tensors make up the trainer's memory, tag by tag."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from vime.facts.memory import Tag


def tagged_tensors(wrapped: Any, optimizer: Any) -> dict[Tag, list[Tensor]]:
    """Tensors whose storages hold parameters, gradients and optimizer state; no storage appears under two tags.

    With a distributed optimizer the parameters, their main copies in float32 training and the bucket views all alias
    `param_data`; main copies of lower precisions and the moments are the optimizer's own.
    """
    buffers = wrapped.buffers
    params = [b.param_data for b in buffers if b.param_data is not None]
    params += [p.data for p in wrapped.parameters()]
    grads = [b.grad_data for b in buffers]
    taken = {_identity(t) for t in (*params, *grads)}
    own: list[Tensor] = []
    for part in optimizer.chained_optimizers:
        inner = part.optimizer
        own += [p.data for group in inner.param_groups for p in group["params"]]
        own += [t for state in inner.state.values() for t in state.values() if isinstance(t, Tensor)]
    return {Tag.PARAMS: params, Tag.GRADS: grads, Tag.OPTIMIZER: [t for t in own if _identity(t) not in taken]}


def total_bytes(tensors: Mapping[Tag, Iterable[Tensor]]) -> dict[Tag, int]:
    """Bytes of the distinct storages behind each tag."""
    return {tag: sum({_identity(t): t.untyped_storage().nbytes() for t in group}.values()) for tag, group in tensors.items()}


def _identity(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
