"""One rank of `vime bench train --layouts`: `python -m vime.benchmarks.parity_rank ORDER` trains and tells what it saw.

The environment and the mask are in place when this process starts, as the cluster's launcher puts them in a rank's.
"""

from __future__ import annotations

import base64
import json
import math
import pickle
import random
import sys
from pathlib import Path
from typing import Any

from vime.benchmarks.children import tell
from vime.trainer.setup import TrainerSetup
from vime.types import TrainSample, UpdateWork

GROUP = 4
"""Responses to a prompt."""


def groups(vocab: int, *, rows: int, length: int, step: int) -> list[list[TrainSample]]:
    """The step's batch, the same on every rank: random prompts and responses of `length` tokens together.

    The sampler's log-probs are near those of an even choice, which is what random weights give, so that ratios are near 1.
    """
    draw, even = random.Random(step), -math.log(vocab)
    found = []
    for _ in range(rows // GROUP):
        prompt = tuple(draw.randrange(vocab) for _ in range(max(1, length // 4)))
        rewards = (1.0, 0.0, *(float(draw.random() < 0.5) for _ in range(GROUP - 2)))
        group = []
        for reward in rewards:
            response = tuple(draw.randrange(vocab) for _ in range(length - len(prompt)))
            log_probs = tuple(even + 0.1 * draw.random() for _ in response)
            group.append(TrainSample(prompt, response, log_probs, (1,) * len(response), reward, rewards))
        found.append(group)
    return found


def share(batch: list[list[TrainSample]], *, tokens: int, length: int, place: tuple[int, int]) -> UpdateWork:
    """The part of data parallel rank `place[0]` of `place[1]`: every so many groups, packed to `tokens`."""
    rank, size = place
    own = [row for group in batch[rank::size] for row in group]
    each = tokens // length
    rows = [row for group in batch for row in group]
    packs = tuple(tuple(own[start : start + each]) for start in range(0, len(own), each))
    return UpdateWork(packs, num_rollouts=len(rows), num_tokens=sum(sum(row.loss_mask) for row in rows))


def train(setup: TrainerSetup, plugins: Any, sizes: dict[str, int], order: dict[str, Any]) -> dict[str, Any]:
    """Build the trainer of a rank and take the steps."""
    from vime.benchmarks.between import saw
    from vime.benchmarks.rank import Device
    from vime.cluster.trainer_process import TrainerProcess

    process = TrainerProcess(setup, plugins, order["unset"])
    process.start("127.0.0.1", sizes["port"])
    worker, device = process.worker, Device(order["device"])
    tokens, length, vocab = sizes["tokens"], sizes["length"], worker._model.shape.vocab
    place = (worker._axes.dp_rank, worker._axes.dp_size)
    rows = tokens // length * sizes["micro_batches"]
    metrics: list[dict[str, float]] = []
    spans: list[float] = []
    counts: list[int] = []
    try:
        for step in range(sizes["steps"]):
            work = share(groups(vocab, rows=rows, length=length, step=step), tokens=tokens, length=length, place=place)
            counts.append(len(work.micro_batches))
            spans.append(device.timed(lambda w=work: metrics.append(worker.train_step([w]))))
        return {
            "dtype": setup.dtype,
            "metrics": [{n: v for n, v in row.items() if n.startswith("train/")} for row in metrics],
            "step_s": spans,
            "tokens_per_step": rows * length,
            "micro_batches": counts,
            "peak_bytes": device.peak_bytes(),
            "bytes_by_tag": process.memory_bytes(),
            "saw": saw(device.module),
        }
    finally:
        process.close()


def main(path: str) -> int:
    order = json.loads(Path(path).read_text())
    setups, plugins = pickle.loads(base64.b64decode(order["parts"]))
    for setup, sizes in zip(setups, order["sizes"], strict=True):
        tell(train(setup, plugins, sizes, order))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
