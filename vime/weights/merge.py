"""What the ranks of a trainer say of their halves, as one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from vime.errors import WeightSyncError


def merge_stage_info(infos: Iterable[Mapping[str, Any]], num_tensors: int) -> Mapping[str, Any]:
    """Merge the ranks' `stage` results: mappings are joined, `tensors` summed, other entries must agree.

    Raises WeightSyncError unless the ranks together staged every tensor of the manifest exactly once.
    """
    merged: dict[str, Any] = {"tensors": 0}
    for rank, info in enumerate(infos):
        for key, value in info.items():
            if key == "tensors":
                merged[key] += value
            elif isinstance(value, Mapping):
                merged.setdefault(key, {}).update(value)
            elif merged.setdefault(key, value) != value:
                raise WeightSyncError(f"trainer rank {rank} staged {key} {value}, another {merged[key]}", fix="report a bug")
    if merged["tensors"] != num_tensors:
        raise WeightSyncError(
            f"the trainer staged {merged['tensors']} tensors, the manifest has {num_tensors}",
            fix="every rank yields all tensors it owns, and no tensor has two owners",
        )
    return merged


def merge_offers(offers: Sequence[Mapping[str, Any]], hosts: Sequence[str]) -> dict[str, Mapping[str, Any]]:
    """What `TrainerHalf.init_info` returns on the ranks -> the offer for the engines of each host.

    `hosts` are those of the ranks. An offer is that of the host's first rank, with the `rings` of all ranks there in their
    order and rank 0's manifest, which every rank has.
    """
    manifest = offers[0].get("manifest", [])
    at: dict[str, list[Mapping[str, Any]]] = {}
    for offer, host in zip(offers, hosts, strict=True):
        at.setdefault(host, []).append(offer)
    return {host: _with_rings(found, manifest) for host, found in at.items()}


def _with_rings(offers: Sequence[Mapping[str, Any]], manifest: Any) -> Mapping[str, Any]:
    first = offers[0]
    rings = [ring for offer in offers for ring in offer["info"]["rings"]]
    return {**first, "manifest": manifest, "info": {**first["info"], "rings": rings}}
