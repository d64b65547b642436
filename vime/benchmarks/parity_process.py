"""One rank of `make parity`, in a process forked from one that has imported what a trainer needs and done nothing else."""

from __future__ import annotations

import json
import os
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from vime.data.routing import Routing
from vime.data.schedule import Split, plan_updates
from vime.models.registry import read_shape
from vime.trainer.setup import TrainerSetup
from vime.types import Group, PromptId, SampleInfo, SampleStatus, TrainSample, UpdateWork

GROUPS, GROUP_SIZE = 6, 4
VOCAB = 260
SQUARE = 0.01


def batch(step: int) -> list[list[TrainSample]]:
    """The step's groups, the same on every rank; lengths differ, prompts and masked tokens included."""
    draw = random.Random(step)
    made = []
    for _ in range(GROUPS):
        prompt = tuple(draw.randrange(VOCAB) for _ in range(draw.randint(2, 12)))
        rewards = (1.0, 0.0, *(float(draw.random() < 0.5) for _ in range(GROUP_SIZE - 2)))
        responses = [tuple(draw.randrange(VOCAB) for _ in range(draw.randint(1, 40))) for _ in rewards]
        lengths = tuple(len(response) for response in responses)
        group = []
        for reward, response in zip(rewards, responses, strict=True):
            log_probs = tuple(-5.0 + 0.2 * draw.random() for _ in response)
            mask = (1, *(int(draw.random() < 0.9) for _ in response[1:]))
            group.append(TrainSample(prompt, response, log_probs, mask, reward, rewards, group_lengths=lengths))
        made.append(group)
    return made


def prescribed(groups: list[list[TrainSample]], routing: Routing, step: int) -> list[list[TrainSample]]:
    """The same samples, whose tokens were sent to experts by chance."""
    draw = np.random.default_rng(step)

    def chosen(sample: TrainSample) -> TrainSample:
        scores = draw.random((len(sample.prompt_ids) + len(sample.response_ids), len(routing.moe_layers), routing.experts))
        return replace(sample, routed_experts=scores.argsort(-1)[..., : routing.top_k].astype(np.uint8))

    return [[chosen(sample) for sample in group] for group in groups]


def share(groups: list[list[TrainSample]], split: Split, rank: int, updates: int) -> list[UpdateWork]:
    """What the run's schedule gives a data-parallel rank."""

    def info(index: int, sample: TrainSample) -> SampleInfo:
        lengths = len(sample.prompt_ids), len(sample.response_ids), sum(sample.loss_mask)
        return SampleInfo(index, *lengths, sample.reward, SampleStatus.COMPLETED)

    known = [
        Group(PromptId(n, 0, n), tuple(info(i, sample) for i, sample in enumerate(group)), payload=None)
        for n, group in enumerate(groups)
    ]
    plans = plan_updates(known, split=split, updates_per_step=updates, skip_flat=False, supervised=False)
    return [
        UpdateWork(
            tuple(tuple(groups[ref.group][ref.sample] for ref in micro) for micro in plan.micro_batches[rank]),
            num_rollouts=plan.num_rollouts,
            num_tokens=plan.num_tokens,
        )
        for plan in plans
    ]


def train(setup: TrainerSetup, steps: int) -> list[dict[str, float]]:
    """Metrics of the first steps."""
    from vime.trainer.megatron.worker import MegatronWorker

    worker, parallel, section = MegatronWorker(setup), setup.parallel, setup.trainer
    split = Split(parallel.dp, section.max_tokens_per_micro_batch, parallel.pp if parallel.vpp > 1 else 1, SQUARE)
    rank = setup.rank // (parallel.tp * parallel.cp) % parallel.dp
    routing = Routing.of(read_shape(setup.model_path)) if section.routing_replay == "rollout" else None

    def samples(step: int) -> list[list[TrainSample]]:
        return batch(step) if routing is None else prescribed(batch(step), routing, step)

    try:
        return [worker.train_step(share(samples(step), split, rank, section.updates_per_step)) for step in range(steps)]
    finally:
        worker.close()


def run(setup: TrainerSetup, port: int, steps: int, out: Path, log: Path) -> None:
    """Train in this process, whose output goes to `log`, and write what came of it to `out`."""
    with log.open("w") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    torch.set_num_threads(1)
    out.write_text(json.dumps(train(replace(setup, master_address="127.0.0.1", master_port=port), steps)))
