"""Expert ids from a real engine on the host, beside the choices of transformers at the same positions."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from engine_env import ENV

from vime.data.routing import align_ids, decode_ids
from vime.platforms.cpu.engine import ARGS
from vime.rollout.engine import EngineServer, EngineSpec
from vime.testing.tiny_models import make_tiny_qwen3_moe

KEY = "routes-key"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    folder = tmp_path_factory.mktemp("routes")
    model = make_tiny_qwen3_moe(folder / "model")
    args = {**ARGS, "enable_return_routed_experts": True, "enable_prefix_caching": True}
    spec = EngineSpec(
        model, "float32", folder / "engine.log", "routes", 512, args=args, env=ENV, entry_points=("vime", "vime_cpu"),
        expected_platform="vllm.platforms.cpu.CpuPlatform", api_key=KEY,
    )  # fmt: skip
    engine = EngineServer(spec)
    try:
        engine.start()
        asyncio.run(open_gate(engine))
        yield model, engine.url
    finally:
        engine.stop()


async def open_gate(engine: EngineServer) -> None:
    await engine.wait_ready(120.0)
    url, headers = f"{engine.url}/vime/gate/open", {"x-vime-run-token": "routes"}
    async with aiohttp.ClientSession(trust_env=False) as session, session.post(url, headers=headers) as response:
        assert response.status == 200


async def answers(url: str, prompts: list[list[int]], max_tokens: int) -> list[dict[str, Any]]:
    async with aiohttp.ClientSession(trust_env=False) as session:

        async def one(ids: list[int]) -> dict[str, Any]:
            params = {"temperature": 1.0, "seed": 5, "max_tokens": max_tokens, "ignore_eos": True, "logprobs": 0}
            headers = {"authorization": f"Bearer {KEY}", "x-vime-run-token": "routes"}
            body = {"token_ids": ids, "sampling_params": params}
            async with session.post(f"{url}/inference/v1/generate", json=body, headers=headers) as response:
                assert response.status == 200, await response.text()
                return await response.json()

        return list(await asyncio.gather(*map(one, prompts)))


def choices(model: Path, ids: list[int]) -> np.ndarray:
    """Experts [tokens, layers, top_k] of transformers, each row sorted."""
    import torch
    from transformers import AutoModelForCausalLM

    net: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    seen: list[Any] = []
    for layer in net.model.layers:
        layer.mlp.gate.register_forward_hook(lambda _m, _a, out: seen.append(out[2]))
    with torch.no_grad():
        net(torch.tensor([ids]))
    return np.sort(np.stack([one.reshape(len(ids), -1).numpy() for one in seen], axis=1), axis=-1)


def test_rows_are_those_of_transformers_cold_cached_and_side_by_side(served: tuple[Path, str]) -> None:
    model, url = served
    long = [4 + (7 * i) % 250 for i in range(300)]
    short = [[4 + (i * 13 + j * 7) % 250 for j in range(5 + 20 * i)] for i in range(5)]
    rounds = [[long], [long, [*long, 9, 10, 11]], short]
    cached = 0
    for prompts in rounds:
        for ids, answer in zip(prompts, asyncio.run(answers(url, prompts, 8)), strict=True):
            chosen = answer["choices"][0]
            whole = [*ids, *chosen["token_ids"]]
            expected = choices(model, whole)
            rows = decode_ids(chosen["routed_experts"])
            layers = range(expected.shape[1])
            aligned = align_ids(rows, tokens=len(whole), moe_layers=layers, experts=int(expected.max()) + 1)
            np.testing.assert_array_equal(np.sort(aligned[:-1], axis=-1), expected[:-1])
            cached += answer["usage"]["prompt_tokens_details"]["cached_tokens"] or 0
    assert cached >= 256, "no prompt came from the cache, so its rows were not looked at"
