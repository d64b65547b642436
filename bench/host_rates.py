"""Rates of this host for the plan, as words for `vime bench step --rate` and for `rates` of a pool.

    vime bench sync --platform cpu --shape 0.1b --out OUT
    python bench/host_rates.py OUT/bench-sync.json --model DIR

The transport's is that of the publications in FILE. `gather` is what one of two ranks receives of the other's half of every
matrix, put together again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors import safe_open

from vime.platforms.cpu.weights import COSTS
from vime.rollout.ports import lease_port

REPEATS = 5


def shapes_of(model: Path) -> list[tuple[int, ...]]:
    """Of every tensor in a folder of safetensors."""
    shapes = []
    for path in sorted(model.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            shapes += [tuple(file.get_slice(name).get_shape()) for name in file.keys()]  # noqa: SIM118 (no mapping)
    return shapes


def median_s(work: Callable[[], object]) -> float:
    """Of `REPEATS` calls after one that is left out."""
    seconds = []
    for _ in range(REPEATS + 1):
        begin = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds[1:])


def publishing(sync: Path) -> float:
    """Bytes a second from the trainer into a running engine, beside the fixed part that the host's offer has."""
    found = json.loads(sync.read_text())["parts"]["publications"]
    seconds = found["medians"]["plain"]["seconds"]
    return found["bytes"] / (seconds["hold"] + seconds["update"] - COSTS[found["transport"]].fixed_s)


def gather(rank: int, port: int, shapes: Sequence[tuple[int, ...]], out: Path) -> None:
    """One of two ranks; the first writes bytes a second that it receives."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    halves = [torch.randn(shape[0] // 2, *shape[1:]) for shape in shapes if len(shape) == 2]

    def all_halves() -> None:
        for own in halves:
            parts = [torch.empty_like(own) for _ in range(2)]
            dist.all_gather(parts, own)
            torch.cat(parts)

    rate = sum(4 * own.numel() for own in halves) / median_s(all_halves)
    if rank == 0:
        out.write_text(json.dumps(rate))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sync", type=Path, metavar="FILE", help="bench-sync.json of `vime bench sync --platform cpu`")
    parser.add_argument("--model", type=Path, required=True, metavar="DIR", help="the model that it published")
    args = parser.parse_args()
    lease = lease_port()
    lease.release()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "gather.json"
        mp.spawn(gather, (lease.port, shapes_of(args.model), out), nprocs=2)
        gathered = json.loads(out.read_text())
    transport = json.loads(args.sync.read_text())["parts"]["publications"]["transport"]
    print(f"{transport}={publishing(args.sync):.3g} gather={gathered:.3g}")


if __name__ == "__main__":
    main()
