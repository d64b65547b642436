"""Digests of a tensor's bytes: what the trainer sent against what the engine received.

Two kinds: `digest` for bytes on a host and `word_digest`, in torch operations, for bytes that should stay where they are.
A digest says itself which kind it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from vime.errors import WeightSyncError

WORDS = "words:"
"""How a `word_digest` begins."""

_CHUNK_WORDS = 2**20
_MASK = 2**64 - 1


def digest(tensor: Any) -> str:
    """xxh3_64 (hex) of a torch tensor's bytes in row-major order. A device tensor is copied to the host first."""
    import torch
    import xxhash

    host = tensor.detach().to("cpu").contiguous()
    return xxhash.xxh3_64_hexdigest(host.reshape(-1).view(torch.uint8).numpy().data)


def word_digest(tensor: Any) -> str:
    """A 64-bit digest of a tensor's bytes in row-major order, computed on the tensor's own device; only the result leaves it.

    Multilinear hashing modulo 2^64 (Lemire & Kaser 2014, Strongly universal string hashing is fast, arXiv:1202.4961, with
    fixed odd multipliers): the bytes are 64-bit words, each times a multiplier of its place, summed; sums of chunks are
    hashed in the same way. Odd multipliers have inverses, so a change within one word always shows. Integer sums have no
    order, so every device gives the same digest. Against accidents, not against an adversary. Extra memory: two chunks of
    8 MiB.
    """
    import torch

    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    nbytes = flat.numel()
    if flat.storage_offset() % 8 or flat.data_ptr() % 8 or nbytes % 8:
        padded = flat.new_zeros(-(-nbytes // 8) * 8)
        padded[:nbytes] = flat
        flat = padded
    value = _hashed(flat.view(torch.int64))
    return f"{WORDS}{(value ^ nbytes * 0x9E3779B97F4A7C15) & _MASK:016x}"


def check_digest(expected: Mapping[str, str], name: str, tensor: Any) -> None:
    """Raise WeightSyncError naming the tensor unless its bytes are the ones the trainer sent."""
    if name not in expected:
        raise WeightSyncError(f"tensor {name} arrived without a fingerprint", fix="publish again; the engine is unchanged")
    found = word_digest(tensor) if expected[name].startswith(WORDS) else digest(tensor)
    if found != expected[name]:
        raise WeightSyncError(
            f"tensor {name} was altered on its way: sent {expected[name]}, received {found}",
            fix="publish again; if it repeats, forbid this transport in the topology's sync section",
        )


def _hashed(words: Any) -> int:
    """words [n] int64 -> their multilinear hash; long inputs are hashed to one word a chunk, which are then hashed."""
    import torch

    while len(words) > _CHUNK_WORDS:
        words = torch.stack([(c * _multipliers(words.device)[: len(c)]).sum() for c in words.split(_CHUNK_WORDS)])
    return int((words * _multipliers(words.device)[: len(words)]).sum()) & _MASK


@lru_cache(maxsize=8)
def _multipliers(device: Any) -> Any:
    """[_CHUNK_WORDS] odd int64: splitmix64's finalizer (Steele, Lea & Flood 2014) over the positions."""
    import torch

    z = torch.arange(1, _CHUNK_WORDS + 1, dtype=torch.int64, device=device) * _signed(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z = (z ^ _shifted(z, shift)) * _signed(factor)
    return (z ^ _shifted(z, 31)) | 1


def _shifted(z: Any, bits: int) -> Any:
    """A logical shift to the right: torch's own keeps the sign."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value
