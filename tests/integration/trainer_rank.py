"""One trainer rank in a process of its own: trains and writes what it saw (JSON)."""

from __future__ import annotations

import hashlib
import json
import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import ring_rank
import torch
import torch.distributed as dist

from vime.config.algorithms import CriticSection, GrpoSection, PpoSection
from vime.config.schema import OptimizerSection, TrainerSection
from vime.facts.collectives import CollectiveSpec
from vime.facts.memory import NullMemory
from vime.facts.process import Factory, MegatronAdaptation, Parallel, TrainerRuntime
from vime.trainer.setup import TrainerSetup
from vime.types import TrainSample, UpdateWork

GROUPS, GROUP_SIZE = 5, 4


def samples(vocab: int, step: int) -> list[TrainSample]:
    """The step's batch, the same on every rank; lengths differ."""
    draw = random.Random(step)
    made = []
    for _ in range(GROUPS):
        prompt = tuple(draw.randrange(vocab) for _ in range(draw.choice([3, 4, 6])))
        rewards = tuple(float(draw.random() < 0.5) for _ in range(GROUP_SIZE))
        for reward in rewards:
            response = tuple(draw.randrange(vocab) for _ in range(draw.choice([1, 2, 5])))
            log_probs = tuple(-4.0 + 0.1 * draw.random() for _ in response)
            made.append(TrainSample(prompt, response, log_probs, (1,) * len(response), reward, rewards))
    return made


def routed(rows: list[TrainSample], step: int, *, layers: int, experts: int, top_k: int = 2) -> list[TrainSample]:
    """Rows whose tokens were sent to experts by chance, the same on every rank."""
    draw = np.random.default_rng(step)

    def ids(row: TrainSample) -> np.ndarray:
        tokens = len(row.prompt_ids) + len(row.response_ids)
        return draw.random((tokens, layers, experts)).argsort(-1)[..., :top_k].astype(np.uint8)

    return [replace(row, routed_experts=ids(row)) for row in rows]


def share(rows: list[TrainSample], job: dict[str, Any], dp_rank: int) -> UpdateWork:
    """This data-parallel rank's part, in `parts` micro-batches; with `idle_rank` the last rank has no sample at all."""
    dp, parts = job["parallel"].get("dp", 1), job["parts"]
    own = rows[dp_rank::dp]
    if job.get("idle_rank"):
        own = rows if dp_rank == 0 else []
    size = max(1, -(-len(own) // parts))
    cut = tuple(tuple(own[i * size : (i + 1) * size]) for i in range(parts))
    return UpdateWork(cut, num_rollouts=len(rows), num_tokens=sum(sum(r.loss_mask) for r in rows))


def setup_of(job: dict[str, Any]) -> TrainerSetup:
    task = job.get("task", "actor")
    section = TrainerSection(
        optimizer=OptimizerSection(lr=1e-3, warmup_steps=2, decay="linear", weight_decay=0.01, clip_grad=0.5),
        megatron=job.get("megatron", {}),
        recompute=job.get("recompute", "none"),
        overlap=job.get("overlap", False),
        freeze_router=job.get("freeze_router", False),
        routing_replay=job.get("routing_replay", "none"),
        max_tokens_per_micro_batch=job.get("max_tokens", 8192),
    )
    return TrainerSetup(
        model_path=Path(job["model"]),
        dtype=job.get("dtype", "float32"),
        parallel=Parallel(**job["parallel"]),
        rank=job["rank"],
        world=job["world"],
        local_rank=job["rank"],
        master_address="127.0.0.1",
        master_port=job["port"],
        seed=1,
        num_steps=20,
        temperature=0.9,
        algorithm=PpoSection(lam=0.9, critic=CriticSection(value_clip=0.5))
        if task == "critic"
        else GrpoSection(entropy_coef=0.01, whiten=True, old_log_probs=job.get("old_log_probs", "rollout")),
        trainer=section,
        runtime=TrainerRuntime(Factory("vime.platforms.cpu.trainer_runtime:HostRuntime"), "cpu"),
        adaptation=MegatronAdaptation(
            norm=Factory("vime.trainer.megatron.attention:RmsNorm"),
            core_attention=Factory("vime.platforms.cpu.attention:HostCoreAttention"),
            optimizer=Factory("vime.platforms.cpu.fused_adam:HostFusedAdam"),
        ),
        collective=CollectiveSpec("gloo", 60.0, ("sum", "max")),
        memory=NullMemory("not needed here"),
        role=task,
        task=task,
    )


def digest(tensor: Any) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def beside(worker: Any, job: dict[str, Any]) -> dict[str, Any]:
    """What a role beside the actor does: it scores its share, and a critic trains on it with its own values."""
    dp_rank, metrics, scores = worker._axes.dp_rank, [], []
    if job.get("load"):
        worker.load(Path(job["load"]))
    for step in range(job.get("first", 0), job["steps"]):
        work = share(samples(job["vocab"], step), job, dp_rank)
        found = worker.score(work.micro_batches)
        assert worker.speaks or found == []
        scores.append(found if worker.speaks else None)
        if job["task"] != "critic":
            continue
        everywhere: list[Any] = [None] * job["world"]
        dist.all_gather_object(everywhere, (dp_rank, scores[-1]))
        (own,) = [rows for rank, rows in everywhere if rank == dp_rank and rows is not None]
        batches = tuple(
            tuple(replace(sample, values=values) for sample, values in zip(batch, rows, strict=True))
            for batch, rows in zip(work.micro_batches, own, strict=True)
        )
        metrics.append(worker.train_step([replace(work, micro_batches=batches)]))
        if job.get("save") and worker.step_count == job["save_at"]:
            worker.save(Path(job["save"]), background=job.get("background", False))
    if job.get("save_hf"):
        worker.save_hf(Path(job["save_hf"]))
    digests = {n: digest(t) for n, t in worker.weights_on_first_rank()}
    worker.close()
    return {"metrics": metrics, "scores": scores, "digests": digests}


def main(job: dict[str, Any]) -> dict[str, Any]:
    from vime.trainer.megatron.tasks import build_rank

    worker: Any = build_rank(setup_of(job))
    if job.get("task", "actor") != "actor":
        return beside(worker, job)
    if job.get("load"):
        worker.load(Path(job["load"]))
    if job.get("save_loaded"):
        worker.save(Path(job["save_loaded"]))
    dp_rank = worker._axes.dp_rank
    metrics = []
    for step in range(worker.step_count, job["steps"]):
        rows = samples(job["vocab"], step)
        if job.get("routed"):
            rows = routed(rows, step, **job["routed"])
        metrics.append(worker.train_step([share(rows, job, dp_rank)] * job.get("updates", 1)))
        if job.get("save") and worker.step_count == job["save_at"]:
            worker.save(Path(job["save"]), background=job.get("background", False))
    names = [t.name for t in worker.manifest().tensors]
    held = [name for name, _ in worker.weights()]
    digests = {n: digest(t) for n, t in worker.weights_on_first_rank()}
    result = {
        "metrics": metrics,
        "log_probs": worker.log_probs(job["sequences"]),
        "rows": worker.evaluate_rows(samples(job["vocab"], 0)),
        "manifest": names,
        "held": held,
        "digests": digests,
        "digests_on_every_rank": {n: digest(t) for n, t in worker.weights_on_every_rank()},
        "is_writer": worker.is_writer,
    }
    if job.get("rings"):
        result["rings"] = ring_rank.received(worker, job, digest)
    if job.get("save_hf"):
        worker.save_hf(Path(job["save_hf"]))
    worker.close()
    return result


def train_once(model: Path, rows: list[TrainSample], *, temperature: float) -> dict[str, float]:
    """Metrics of the first step of one rank in this process, whose weights are the folder's."""
    from vime.trainer.megatron.tasks import build_rank

    job = {"model": str(model), "parallel": {}, "rank": 0, "world": 1, "port": 0}
    worker: Any = build_rank(replace(setup_of(job), temperature=temperature))
    try:
        return worker.train_step([UpdateWork((tuple(rows),), len(rows), sum(sum(row.loss_mask) for row in rows))])
    finally:
        worker.close()


def run(job: dict[str, Any], out: Path, log: Path) -> None:
    """Do a job in this process, whose output goes to `log`."""
    with log.open("w") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    torch.set_num_threads(1)
    out.write_text(json.dumps(main(job)))
