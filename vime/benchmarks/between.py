"""What two devices of a node do without vime: a copy from one to the other, and a broadcast between two processes.

`python -m vime.benchmarks.between ORDER` is a process that copies, or one of the two that broadcast.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from vime.benchmarks.children import tell, together
from vime.benchmarks.engines import Clock, Planned
from vime.benchmarks.layouts import mask_over
from vime.benchmarks.moves import median
from vime.errors import WeightSyncError

LIMIT_S = 60.0
ROUNDS = 3
MIB = 2**20


def copy_between(planned: Planned, buckets: Mapping[int, int], clock: Clock) -> dict[str, Any]:
    """A copy from the trainer's device to the engine's, by one process that sees both; on a host from memory to memory.

    Args:
        buckets: how many copies of how many bytes make a measurement.

    Raises WeightSyncError with the process's last words.
    """
    mask = mask_over(planned, [planned.plan.actor.request.placement.slots[0].device, _engine_position(planned)])
    order = {"work": "copy", "device": planned.device_type, "buckets": list(buckets.items())}
    return _measured(planned, [order], [mask], clock)


def broadcast_between(planned: Planned, buckets: Mapping[int, int], clock: Clock) -> dict[str, Any]:
    """A broadcast from a process on the trainer's device to one on the engine's, by the backend that the plan's transport has.

    Raises WeightSyncError with both processes' last words.
    """
    actor, engine = planned.plan.actor, planned.plan.engines[0]
    offered = planned.plan.transport.trainer.factory.options if planned.plan.transport else {}
    backend = offered.get("backend", actor.collective.backend)
    orders = [
        {"work": "broadcast", "device": planned.device_type, "buckets": list(buckets.items()), "backend": backend, "rank": rank}
        for rank in range(2)
    ]
    return {
        "backend": backend,
        **_measured(planned, orders, [*actor.masks[:1], engine.mask] if actor.masks else [{}, {}], clock),
    }


def _engine_position(planned: Planned) -> int:
    return planned.plan.engines[0].request.placement.slots[0].device


def _measured(planned: Planned, orders: list[dict[str, Any]], masks: list[Mapping[str, str]], clock: Clock) -> dict[str, Any]:
    limit_s = clock.left(LIMIT_S)
    with tempfile.TemporaryDirectory(prefix="vime-between-") as folder:
        shared = {"store": str(Path(folder) / "store"), "limit_s": limit_s}
        envs = [{**planned.plan.actor.env, **mask} for mask in masks]
        told = together(
            "vime.benchmarks.between", [{**o, **shared} for o in orders], envs=envs, folder=Path(folder), limit_s=limit_s
        )
    if told.error is not None or not all(told.results):
        raise WeightSyncError(
            f"two devices do not reach each other: {told.error}", fix="the last words of each process say why"
        )
    found: dict[str, Any] = {"saw": [results[0]["saw"] for results in told.results], "buckets": {}}
    for rows in zip(*(results[0]["rows"] for results in told.results), strict=True):
        nbytes, count = rows[0]["bytes"], rows[0]["count"]
        seconds = max(row["seconds"] for row in rows)
        rate = nbytes * count / seconds
        found["buckets"][str(nbytes)] = {"count": count, "seconds": seconds, "bytes_per_s": rate, "gb_per_s": rate / 1e9}
    found["bytes_per_s"] = max(row["bytes_per_s"] for row in found["buckets"].values())
    return found


# ---- in the children


def main(path: str) -> int:
    import torch

    order = json.loads(Path(path).read_text())
    kind = order["device"]
    module = None if kind == "cpu" else torch.get_device_module(kind)
    works: dict[str, Callable[[dict[str, Any], Any], list[dict[str, Any]]]] = {"copy": _copies, "broadcast": _broadcasts}
    rows = works[order["work"]](order, module)
    tell({"rows": rows, "saw": saw(module)})
    return 0


def saw(module: Any) -> list[str]:
    """What identifies each device that this process sees; nothing on a host."""
    found = [module.get_device_properties(number) for number in range(module.device_count())] if module else []
    return [str(getattr(device, "uuid", device.name)) for device in found]


def _copies(order: dict[str, Any], module: Any) -> list[dict[str, Any]]:
    import torch

    places = [f"{order['device']}:{number}" for number in range(2)] if module else ["cpu"] * 2

    def ready() -> None:
        for place in places if module else ():
            module.synchronize(place)

    def prepare(nbytes: int) -> tuple[Callable[[], None], Callable[[], bool]]:
        source = torch.full((nbytes,), 7, dtype=torch.uint8, device=places[0])
        target = torch.zeros(nbytes, dtype=torch.uint8, device=places[1])

        def copy() -> None:
            target.copy_(source, non_blocking=True)

        return copy, lambda: bool((target == 7).all())

    return _timed(order, prepare, ready)


def _broadcasts(order: dict[str, Any], module: Any) -> list[dict[str, Any]]:
    import torch
    import torch.distributed

    dist: Any = torch.distributed  # its stores are not declared as exports
    rank, kind = int(order["rank"]), order["device"]
    if module is not None:
        module.set_device(0)
    store = dist.FileStore(order["store"], 2)
    patience = timedelta(seconds=order["limit_s"])
    dist.init_process_group(order["backend"], store=store, rank=rank, world_size=2, timeout=patience)

    def ready() -> None:
        if module is not None:
            module.synchronize()

    def prepare(nbytes: int) -> tuple[Callable[[], None], Callable[[], bool]]:
        flat = torch.full((nbytes,), 7 * (1 - rank), dtype=torch.uint8, device=kind)

        def broadcast() -> None:
            dist.broadcast(flat, src=0)

        return broadcast, lambda: bool((flat == 7).all())

    try:
        return _timed(order, prepare, ready)
    finally:
        dist.destroy_process_group()


def _timed(order: dict[str, Any], prepare: Callable[[int], Any], ready: Callable[[], None]) -> list[dict[str, Any]]:
    """Median seconds of `ROUNDS` times `count` moves, after one that also shows that the bytes arrive."""
    rows = []
    for nbytes, count in order["buckets"]:
        move, arrived = prepare(nbytes)
        move()
        ready()
        if not arrived():
            raise WeightSyncError(f"{nbytes} bytes did not arrive as they were sent", fix="check the link between the devices")
        spans = []
        for _ in range(ROUNDS):
            began = time.perf_counter()
            for _ in range(count):
                move()
            ready()
            spans.append(time.perf_counter() - began)
        rows.append({"bytes": nbytes, "count": count, "seconds": median(spans), "spans": spans})
    return rows


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
