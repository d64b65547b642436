"""The list of tensors that trainer and engines agree on. Torch-free."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

from vime.errors import WeightSyncError
from vime.weights.fused import fused_key
from vime.weights.transports.base import Manifest, TensorSpec

ALIGNMENT = 64
"""Bytes: every tensor starts on a cache line, which suits every element type."""

ITEM_BYTES = {
    "float64": 8, "int64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2, "int16": 2,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "uint8": 1, "int8": 1, "bool": 1,
}  # fmt: skip


def build_manifest(tensors: Iterable[tuple[str, str, Sequence[int]]]) -> Manifest:
    """Lay (name, dtype, full shape) out in one flat segment; siblings of a fused parameter become neighbours.

    Raises WeightSyncError for a name given twice or an unknown dtype.
    """
    groups: dict[str, list[tuple[str, str, tuple[int, ...]]]] = {}
    seen: set[str] = set()
    for name, dtype, shape in tensors:
        if name in seen:
            raise WeightSyncError(f"tensor {name} is listed twice", fix="each tensor belongs to one trainer rank")
        if dtype not in ITEM_BYTES:
            raise WeightSyncError(f"tensor {name} has dtype {dtype}", fix=f"send one of {', '.join(ITEM_BYTES)}")
        seen.add(name)
        groups.setdefault(fused_key(name), []).append((name, dtype, tuple(int(size) for size in shape)))
    return manifest_from_json(_placed(tensor for group in groups.values() for tensor in group))


def _placed(named: Iterable[tuple[str, str, Sequence[int]]]) -> list[list[Any]]:
    """Rows of (name, dtype, shape) with their places, one after the other."""
    rows: list[list[Any]] = []
    offset = 0
    for name, dtype, shape in named:
        nbytes = ITEM_BYTES[dtype] * math.prod(shape)
        rows.append([name, dtype, list(shape), offset, nbytes])
        offset += -(-nbytes // ALIGNMENT) * ALIGNMENT
    return rows


def manifest_to_json(manifest: Manifest) -> list[list[Any]]:
    """One `[name, dtype, shape, offset, nbytes]` a tensor."""
    return [[t.name, t.dtype, list(t.shape), t.offset, t.nbytes] for t in manifest.tensors]


def manifest_from_json(rows: Iterable[Sequence[Any]]) -> Manifest:
    """Inverse of `manifest_to_json`."""
    specs = tuple(
        TensorSpec(name=name, dtype=dtype, shape=tuple(shape), offset=offset, nbytes=nbytes)
        for name, dtype, shape, offset, nbytes in rows
    )
    end = max((t.offset + -(-t.nbytes // ALIGNMENT) * ALIGNMENT for t in specs), default=0)
    return Manifest(tensors=specs, nbytes=end)


def pack_manifest(rows: Sequence[Sequence[Any]]) -> str:
    """The rows of `manifest_to_json` as a short text. Places are left out: they follow from the order.

    Raises WeightSyncError where they do not, since both sides would then cut the segment differently.
    """
    named = [list(row[:3]) for row in rows]
    if _placed((name, dtype, shape) for name, dtype, shape in named) != [list(row) for row in rows]:
        raise WeightSyncError("the manifest's places are not those of its order", fix="make manifests with build_manifest")
    return base64.b64encode(zlib.compress(json.dumps(named, separators=(",", ":")).encode())).decode()


def unpack_manifest(packed: str) -> list[list[Any]]:
    """Inverse of `pack_manifest`. Raises WeightSyncError for a text that is none of it."""
    try:
        named = json.loads(zlib.decompress(base64.b64decode(packed)))
        return _placed((name, dtype, shape) for name, dtype, shape in named)
    except (ValueError, KeyError, TypeError, zlib.error) as error:
        raise WeightSyncError(f"not a packed manifest: {error}", fix="run one vime release on both sides") from None


def manifest_id(manifest: Manifest) -> str:
    """Short digest of names, dtypes and shapes, so that an update can say which manifest it follows."""
    rows = [[t.name, t.dtype, list(t.shape)] for t in manifest.tensors]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]


def short_list(names: Iterable[str], limit: int = 6) -> str:
    """The first few names and how many more there are: an error must stay readable through HTTP."""
    names = list(names)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def check_same_manifest(accepted: Manifest, offered: Manifest) -> None:
    """Raise WeightSyncError naming what differs in name, dtype or shape; places in the segment may differ."""
    old, new = {t.name: t for t in accepted.tensors}, {t.name: t for t in offered.tensors}
    findings = []
    if missing := sorted(old.keys() - new.keys()):
        findings.append(f"missing: {short_list(missing)}")
    if extra := sorted(new.keys() - old.keys()):
        findings.append(f"not in the first manifest: {short_list(extra)}")
    for name in old.keys() & new.keys():
        a, b = old[name], new[name]
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            findings.append(f"{name} was {a.dtype}{list(a.shape)}, now {b.dtype}{list(b.shape)}")
    if findings:
        raise WeightSyncError(
            "manifest differs from the one accepted first; " + "; ".join(findings[:4]),
            fix="restart the engine, or send the same set of tensors in every update",
        )
