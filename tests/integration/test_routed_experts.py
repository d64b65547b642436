"""Expert ids from a real engine on the host, beside the choices of transformers at the same positions."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import torch
from engine_env import ENV

from vime.config.schema import DataSection, RewardSection, RolloutSection, SamplingSection
from vime.data.routing import Routing, decode_ids
from vime.models.registry import read_shape
from vime.platforms.cpu.engine import ARGS
from vime.rollout.client import Completion, GenerateClient
from vime.rollout.engine import EngineServer, EngineSpec
from vime.rollout.sampling import sampling_params
from vime.rollout.worker import RolloutWorker, WorkerSetup
from vime.testing.reference_trainer import ReferenceTrainer
from vime.testing.tiny_models import make_tiny_qwen3_moe
from vime.types import PolicyVersion, PromptId
from vime.weights.control import EngineControl
from vime.weights.probe import probe_ids
from vime.weights.protocol import ProbeSettings, Publisher
from vime.weights.transports.host_shm import HostShmTrainer

from live_runs import run, steps, write_run

KEY, TOKEN = "routes-key", "routes"
LONG = [4 + (7 * i) % 250 for i in range(300)]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    folder = tmp_path_factory.mktemp("routes")
    model = make_tiny_qwen3_moe(folder / "model")
    args = {**ARGS, "enable_return_routed_experts": True}
    spec = EngineSpec(
        model, "float32", folder / "engine.log", TOKEN, 512, args=args, env=ENV, entry_points=("vime", "vime_cpu"),
        expected_platform="vllm.platforms.cpu.CpuPlatform", api_key=KEY, in_flight=True,
    )  # fmt: skip
    engine = EngineServer(spec)
    try:
        engine.start()
        asyncio.run(open_gate(engine))
        yield model, engine.url
    finally:
        engine.stop()


def control_of(url: str) -> EngineControl:
    return EngineControl(url, api_key=KEY, run_token=TOKEN, timeout_s=60.0)


async def open_gate(engine: EngineServer) -> None:
    await engine.wait_ready(120.0)
    async with control_of(engine.url) as control:
        await control._call("POST", "/update_weight_version", {"new_version": "0.0"})
        await control.open("0.0")


async def answers(url: str, prompts: list[list[int]], max_tokens: int) -> list[dict[str, Any]]:
    """In the server's own words."""
    async with aiohttp.ClientSession(trust_env=False) as session:

        async def one(ids: list[int]) -> dict[str, Any]:
            params = {"temperature": 1.0, "seed": 5, "max_tokens": max_tokens, "ignore_eos": True, "logprobs": 0}
            headers = {"authorization": f"Bearer {KEY}", "x-vime-run-token": TOKEN}
            body = {"token_ids": ids, "sampling_params": params}
            async with session.post(f"{url}/inference/v1/generate", json=body, headers=headers) as response:
                assert response.status == 200, await response.text()
                return await response.json()

        return list(await asyncio.gather(*map(one, prompts)))


def transformer(model: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()


def choices(net: Any, ids: Sequence[int]) -> np.ndarray:
    """Experts [tokens, layers, top_k] of transformers, each row sorted."""
    seen: list[Any] = []
    hooks = [layer.mlp.gate.register_forward_hook(lambda _m, _a, out: seen.append(out[2])) for layer in net.model.layers]
    with torch.no_grad():
        net(torch.tensor([ids]))
    for hook in hooks:
        hook.remove()
    return np.sort(np.stack([one.reshape(len(ids), -1).numpy() for one in seen], axis=1), axis=-1)


def test_rows_are_those_of_transformers_cold_cached_and_side_by_side(served: tuple[Path, str]) -> None:
    model, url = served
    net, routing = transformer(model), Routing.of(read_shape(model))
    short = [[4 + (i * 13 + j * 7) % 250 for j in range(5 + 20 * i)] for i in range(5)]
    rounds = [[LONG], [LONG, [*LONG, 9, 10, 11]], short]
    cached = 0
    for prompts in rounds:
        for ids, answer in zip(prompts, asyncio.run(answers(url, prompts, 8)), strict=True):
            chosen = answer["choices"][0]
            whole = [*ids, *chosen["token_ids"]]
            aligned = routing.align(decode_ids(chosen["routed_experts"]), tokens=len(whole))
            np.testing.assert_array_equal(np.sort(aligned[:-1], axis=-1), choices(net, whole)[:-1])
            cached += answer["usage"]["prompt_tokens_details"]["cached_tokens"] or 0
    assert cached >= 256, "no prompt came from the cache, so its rows were not looked at"


async def test_the_gate_answers_with_the_rows_of_the_server(served: tuple[Path, str]) -> None:
    _, url = served
    (answer,) = await answers(url, [LONG[:40]], 8)
    params = {**sampling_params(SamplingSection(max_response_tokens=8), experts=True), "ignore_eos": True}
    async with GenerateClient(url, KEY, timeout_s=60) as client:
        (flat,) = (await client.generate(LONG[:40], params=params, seed=5)).choices
    (plain,) = answer["choices"]
    assert list(flat.token_ids) == plain["token_ids"]
    assert flat.routed_experts is not None
    np.testing.assert_array_equal(flat.routed_experts, decode_ids(plain["routed_experts"]))


async def test_every_sibling_of_a_group_carries_the_experts_of_its_own_tokens(served: tuple[Path, str], tmp_path: Path) -> None:
    """From the engine through gate, client and worker: a prompt within a cache block, and one of several blocks."""
    model, url = served
    net, lines = transformer(model), [json.dumps({"prompt": text, "label": "2"}) for text in ("1 + 1 =", "1 + 1 = " * 12)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    rollout = RolloutSection(group_size=3, sampling=SamplingSection(max_response_tokens=24))
    data, reward = DataSection(path=tmp_path / "prompts.jsonl"), RewardSection(kind="exact")
    worker = RolloutWorker(WorkerSetup(0, model, data, rollout, reward, api_key=KEY, experts=True))
    try:
        await worker.start()
        await worker.connect(url)
        await worker.submit([PromptId(0, 0, 0), PromptId(1, 0, 1)])
        outcomes = list(await worker.finished())
        while len(outcomes) < 2:
            outcomes += await worker.finished()
    finally:
        await worker.close()
    samples = [sample for outcome in outcomes for sample in outcome.samples]
    assert len({sample.response_ids for sample in samples}) == 6, [outcome.failure for outcome in outcomes]
    for sample in samples:
        whole = [*sample.prompt_ids, *sample.response_ids]
        assert sample.routed_experts is not None
        assert (sample.routed_experts.shape, sample.routed_experts.dtype) == ((len(whole), 2, 2), np.uint8)
        np.testing.assert_array_equal(np.sort(sample.routed_experts[:-1], axis=-1), choices(net, whole)[:-1])


async def test_a_kept_request_has_the_rows_of_the_weights_that_sampled(served: tuple[Path, str]) -> None:
    """Row p is of the pass that gave the token behind it: what the update computes anew of earlier ones is not told.

    Leaves other weights in the engine, so it is the last that uses it.
    """
    model, url = served
    trainer = ReferenceTrainer(model, lambda manifest: HostShmTrainer(run_id="routes", manifest=manifest))
    publisher = Publisher(trainer, probe=ProbeSettings(ids=probe_ids(read_shape(model).vocab)), pause="keep")
    params = {**sampling_params(SamplingSection(max_response_tokens=400), experts=True), "ignore_eos": True}
    prompt, nets = LONG[:40], {}
    try:
        async with control_of(url) as control, GenerateClient(url, KEY, timeout_s=60) as client:
            publisher.set_engines([control])
            await publisher.publish(PolicyVersion(0, 1))
            nets[1] = copy.deepcopy(trainer.model)
            request = asyncio.create_task(client.generate(prompt, n=2, params=params, seed=7))
            await asyncio.sleep(0.5)
            assert (await control.identity()).running > 0, "the request ended too early for this test"
            trainer.perturb()
            nets[2] = trainer.model
            await publisher.publish(PolicyVersion(0, 2))
            generation = await request
    finally:
        await publisher.close()
        trainer.close()
    for choice in generation.choices:
        check_spans(choice, prompt, nets)


def check_spans(choice: Completion, prompt: list[int], nets: dict[int, Any]) -> None:
    first, second = choice.spans
    assert (first.version.step, second.version.step) == (1, 2)
    assert min(first.end, len(choice.token_ids) - second.start) >= 5
    assert choice.routed_experts is not None
    rows = np.sort(choice.routed_experts, axis=-1)
    old, new = (choices(nets[step], [*prompt, *choice.token_ids])[:-1] for step in (1, 2))
    border = len(prompt) + second.start - 1
    np.testing.assert_array_equal(rows, np.concatenate([old[:border], new[border:]]))
    assert all((old[part] != new[part]).any() for part in (slice(border), slice(border, None))), "the weights are told apart"


def test_a_run_trains_with_the_experts_of_its_engine(tmp_path: Path) -> None:
    make_tiny_qwen3_moe(tmp_path / "model", seed=1)
    (tmp_path / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{n} =", "label": str(n)}) + "\n" for n in range(40))
    )
    run(write_run(tmp_path, schedule={"num_steps": 2}, trainer={"routing_replay": "rollout"}))
    seen = steps(tmp_path / "run")
    assert sorted(seen) == [1, 2]
    for row in seen.values():
        difference, differing = (
            row.metrics[f"train/{name}"] for name in ("train_rollout_logprob_abs_diff", "routing_replay_differing")
        )
        assert difference is not None
        assert differing is not None
        assert difference <= 2e-6
        assert differing <= 1e-3
