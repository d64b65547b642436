"""What routing replay changes: log-probs of a trainer in 16 bits beside those of the engine that sampled.

A real engine samples from a mixture of random weights, whose routers have many near ties, and tells which experts each token
took. Every layout of the trainer then makes its first update on these samples, once with routers that choose for themselves
and once with the engine's experts; weights are the same everywhere. Prints a line for each, and JSON at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import pickle
import random
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from vime.benchmarks import parity_process
from vime.benchmarks.comparing import axes_in, free_ports
from vime.benchmarks.parity_table import PRELOADED, Layout, planned
from vime.config.schema import SamplingSection
from vime.data.routing import Routing
from vime.data.schedule import Split
from vime.data.tiny_model import TinyShape, save_tiny
from vime.facts.model import ModelShape
from vime.models.registry import read_shape
from vime.platforms.cpu.engine import ARGS, LAUNCH
from vime.rollout.client import GenerateClient
from vime.rollout.engine import EngineServer, EngineSpec
from vime.rollout.sampling import sampling_params
from vime.trainer.setup import TrainerSetup
from vime.types import TrainSample
from vime.weights.control import EngineControl

SHAPE = TinyShape(vocab_size=264, layers=4, hidden=64, ffn=48, family="qwen3_moe", tied=False, experts=16, init_std=0.1)
LAYOUTS: Mapping[str, Mapping[str, Any]] = {
    "dp1": {},
    "dp2-ep2": {},
    "tp2-ep2": {},
    "cp2": {},
    "pp2": {"recompute": "full"},
}
NAMES = {
    "mean": "train/train_rollout_logprob_abs_diff",
    "max": "train/train_rollout_logprob_abs_diff_max",
    "k3": "train/rollout_corr/k3_kl",
    "differing": "train/routing_replay_differing",
}
TOKEN, KEY, MODEL = "routing-replay", "bench-key", "routed"
ENGINE_ENV = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
}


# ---- the engine


def engine_samples(model: Path, folder: Path, *, groups: int, tokens: int) -> list[list[TrainSample]]:
    """What an engine in bfloat16 samples."""
    args = {**ARGS, "enable_return_routed_experts": True}
    spec = EngineSpec(
        model, "bfloat16", folder / "engine.log", TOKEN, 512, args=args, env=ENGINE_ENV, entry_points=("vime", "vime_cpu"),
        expected_platform="vllm.platforms.cpu.CpuPlatform", api_key=KEY, launch=LAUNCH,
    )  # fmt: skip
    engine = EngineServer(spec)
    try:
        engine.start()
        return asyncio.run(sampled(engine, read_shape(model), groups=groups, tokens=tokens))
    finally:
        engine.stop()


async def sampled(engine: EngineServer, shape: ModelShape, *, groups: int, tokens: int) -> list[list[TrainSample]]:
    """Groups of four answers to prompts of random ids, with the engine's experts."""
    await engine.wait_ready(180.0)
    control = EngineControl(engine.url, api_key=KEY, run_token=TOKEN)
    await control.open("0.0")
    await control.close()
    params = sampling_params(SamplingSection(max_response_tokens=tokens), experts=True) | {"ignore_eos": True}
    draw, routing = random.Random(0), Routing.of(shape)
    prompts = [tuple(draw.randrange(4, 260) for _ in range(draw.randint(8, 24))) for _ in range(groups)]
    async with GenerateClient(engine.url, KEY, timeout_s=300.0) as client:
        answers = [client.generate(prompt, n=4, params=params, seed=7 * n) for n, prompt in enumerate(prompts)]
        made = []
        for prompt, answer in zip(prompts, await asyncio.gather(*answers), strict=True):
            group = []
            for choice, reward in zip(answer.choices, (1.0, 0.0, 0.0, 1.0), strict=True):
                assert choice.routed_experts is not None
                ids = routing.align(choice.routed_experts, tokens=len(prompt) + len(choice.token_ids))
                mask = (1,) * len(choice.token_ids)
                sample = TrainSample(prompt, choice.token_ids, choice.log_probs, mask, reward, (1.0, 0.0, 0.0, 1.0))
                group.append(replace(sample, routed_experts=ids))
            made.append(group)
    return made


# ---- the trainer


def trained(layout: Layout, folder: Path, *, replay: bool) -> dict[str, float]:
    """Metrics of a first update on the samples of `folder`, the same on all ranks."""
    (port,) = free_ports(1)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([parity_process.__name__, *PRELOADED])
    told = context.SimpleQueue()
    setups = [routed(setup, port, replay=replay) for setup in planned(layout, folder)]
    ranks = [context.Process(target=rank, args=(setup, folder, told), daemon=True) for setup in setups]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(300.0)
        if process.exitcode != 0:
            raise RuntimeError(f"{layout.name}: a rank ended with {process.exitcode}")
    return told.get()


def routed(setup: TrainerSetup, port: int, *, replay: bool) -> TrainerSetup:
    kind = "rollout" if replay else "none"
    section = setup.trainer.model_copy(update={"routing_replay": kind})
    return replace(setup, master_address="127.0.0.1", master_port=port, trainer=section)


def rank(setup: TrainerSetup, folder: Path, told: Any) -> None:
    """Train one update in this process; the first rank tells what came of it."""
    import torch

    from vime.trainer.megatron.worker import MegatronWorker

    torch.set_num_threads(1)
    worker, parallel = MegatronWorker(setup), setup.parallel
    groups = pickle.loads((folder / "samples").read_bytes())
    split = Split(parallel.dp, setup.trainer.max_tokens_per_micro_batch, 1, parity_process.SQUARE)
    own = setup.rank // (parallel.tp * parallel.cp) % parallel.dp
    metrics = worker.train_step(parity_process.share(groups, split, own, 1))
    worker.close()
    if setup.rank == 0:
        told.put(metrics)


def line(name: str, metrics: Mapping[str, float]) -> str:
    return f"{name:<24}" + "".join(f" {key} {metrics[of]:<11.3e}" for key, of in NAMES.items() if of in metrics)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, default=24, help="prompts, of four answers each")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=[*LAYOUTS])
    parser.add_argument("--std", type=float, default=SHAPE.init_std, help="of the random weights")
    args = parser.parse_args(argv)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="vime-routing-") as work:
        folder = Path(work)
        save_tiny(folder / MODEL, replace(SHAPE, init_std=args.std), seed=1)
        groups = engine_samples(folder / MODEL, folder, groups=args.groups, tokens=args.tokens)
        (folder / "samples").write_bytes(pickle.dumps(groups))
        for name in args.layouts:
            more = {"max_tokens_per_micro_batch": 2048, "optimizer": {"lr": 1e-6}, **LAYOUTS[name]}
            layout = Layout(MODEL, axes_in(name), more, "bfloat16")
            for replay in (False, True):
                metrics = trained(layout, folder, replay=replay)
                title = f"{name}{' recompute' if LAYOUTS[name] else ''} {'replay' if replay else 'own choice'}"
                found[title] = {key: metrics[of] for key, of in NAMES.items() if of in metrics}
                print(line(title, metrics), flush=True)
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
