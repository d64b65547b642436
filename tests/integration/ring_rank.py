"""Weights from trainer ranks on several planted devices and hosts: each rank has an engine worker beside it, in a thread."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from vime.weights.merge import merge_offers
from vime.weights.transports.base import TransferContext
from vime.weights.transports.device_ipc import DeviceIpcEngine, DeviceIpcTrainer

EXPORTER = "vime.weights.transports.exporters:HostExporter"


def received(worker: Any, job: dict[str, Any], digest: Callable[[torch.Tensor], str]) -> list[dict[str, str]]:
    """Digests by name of what this rank's engine worker gets: from the live weights, then from the copy of them.

    `job["rings"]` is the number of planted hosts.
    """
    with tempfile.TemporaryDirectory(prefix="vime-ring-") as folder:
        return _received(worker, job, digest, Path(folder))


def _received(worker: Any, job: dict[str, Any], digest: Callable[[torch.Tensor], str], folder: Path) -> list[dict[str, str]]:
    rank, world = job["rank"], job["world"]
    context = TransferContext(folder.name, worker.manifest(), rank, "127.0.0.1", folder, 10_000, 30.0, lead={})
    half = DeviceIpcTrainer.from_context(context, exporter=EXPORTER, identity=f"device {rank}", directory=folder)
    engine = DeviceIpcEngine(identity=f"device {rank}")
    with ThreadPoolExecutor(1) as beside:
        host, first, count = _host_of(rank, world, job["rings"])
        told: list[Any] = [None] * world
        dist.all_gather_object(told, (half.init_info(count), host))
        offer = merge_offers([offer for offer, _ in told], [host for _, host in told])[host]
        identities = [ring["identity"] for ring in offer["info"]["rings"]]
        assert identities == [f"device {r}" for r in range(first, first + count)], "rings of the worker's own host alone"
        info = {**offer["info"], "manifest": offer["manifest"], "rank_offset": 0, "worker_rank": rank - first}
        joining = beside.submit(engine.connect, info)
        assert half.connect() == 1, "only the worker on this rank's device takes from it"
        joining.result()
        found = []
        for kept in (False, True):
            taking = beside.submit(lambda: {name: digest(tensor) for name, tensor in engine.receive({})})
            half.stream(() if kept else worker.weights_on_every_rank())
            found.append(taking.result())
            half.keep(worker.weights_on_every_rank())
    engine.close()
    half.close()
    return found


def _host_of(rank: int, world: int, hosts: int) -> tuple[str, int, int]:
    """(planted host of a rank, the first rank there, how many ranks are there): ranks fill the hosts in their order."""
    each = world // hosts
    return f"host {rank // each}", rank // each * each, each
