"""One of two ranks of a process group on devices: `python -m vime.testing.conformance.rank_side ORDER` prints what it saw."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from vime.facts.process import Factory

MARK = "vime-rank-side:"
HELD = (2.0, 3.0)
"""What the ranks hold before each reduction."""
PASSED = 7.0


def main(order: Mapping[str, Any]) -> dict[str, Any]:
    """Meet the other rank with the whole backend, in a group of both beside the default one, and with the object backend."""
    import torch
    import torch.distributed

    dist: Any = torch.distributed  # its stores are not declared as exports
    rank, kind = int(order["rank"]), order["kind"]
    runtime = Factory(order["runtime"]["target"], order["runtime"]["options"]).build()
    runtime.set_device(0)
    patience = timedelta(seconds=order["limit_s"])
    dist.init_process_group(order["backend"], store=dist.FileStore(order["path"], 2), rank=rank, world_size=2, timeout=patience)
    try:
        reduced: dict[str, float] = {}
        for operation in order["operations"]:
            value = torch.tensor([HELD[rank]], device=kind)
            dist.all_reduce(value, op=getattr(dist.ReduceOp, operation.upper()))
            reduced[operation] = value.item()
        both = dist.new_group([0, 1], timeout=patience)
        passed = torch.tensor([PASSED if rank == 1 else 0.0], device=kind)
        dist.broadcast(passed, src=1, group=both)
        gathered: list[Any] = [None, None]
        dist.all_gather_object(gathered, rank, group=dist.new_group([0, 1], backend=order["object_backend"], timeout=patience))
        return {"reduced": reduced, "passed": passed.item(), "gathered": gathered, **_seen(kind)}
    finally:
        dist.destroy_process_group()


def _seen(kind: str) -> dict[str, Any]:
    """How many devices this process sees, and what identifies its own; None on a host."""
    import torch

    if kind == "cpu":
        return {"visible": None, "identity": None}
    module = torch.get_device_module(kind)
    identity = getattr(module.get_device_properties(0), "uuid", None)
    return {"visible": module.device_count(), "identity": None if identity is None else str(identity)}


if __name__ == "__main__":
    print(f"\n{MARK}{json.dumps(main(json.loads(sys.argv[1])))}", flush=True)
