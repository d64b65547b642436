"""Digests of a tensor's bytes: what the trainer sent against what the engine received."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vime.errors import WeightSyncError


def digest(tensor: Any) -> str:
    """xxh3_64 (hex) of a torch tensor's bytes in row-major order. A device tensor is copied to the host first."""
    import torch
    import xxhash

    host = tensor.detach().to("cpu").contiguous()
    return xxhash.xxh3_64_hexdigest(host.reshape(-1).view(torch.uint8).numpy().data)


def check_digest(expected: Mapping[str, str], name: str, tensor: Any) -> None:
    """Raise WeightSyncError naming the tensor unless its bytes are the ones the trainer sent."""
    if name not in expected:
        raise WeightSyncError(f"tensor {name} arrived without a fingerprint", fix="publish again; the engine is unchanged")
    if (found := digest(tensor)) != expected[name]:
        raise WeightSyncError(
            f"tensor {name} was altered on its way: sent {expected[name]}, received {found}",
            fix="publish again; if it repeats, forbid this transport in the topology's sync section",
        )
