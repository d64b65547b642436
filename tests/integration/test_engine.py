"""One real engine on the host behind the real router."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
from engine_env import ENV

from vime.errors import DeadlineError, EngineError
from vime.platforms.cpu.engine import ARGS
from vime.rollout.client import Completion, GenerateClient, RetryableError, parse_generation
from vime.rollout.engine import EngineServer, EngineSpec, check_identity
from vime.rollout.launcher import group_members
from vime.rollout.router import RouterServer, RouterSpec
from vime.rollout.sampling import seed_for
from vime.testing.tiny_models import make_tiny_qwen3
from vime.types import SampleStatus, TrainSample

import trainer_rank

RUN_TOKEN = "integration-run"
API_KEY = "integration-key"
TOKEN = {"x-vime-run-token": RUN_TOKEN}
START_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Stack:
    model: Path
    engine: EngineServer
    router: RouterServer

    def client(self, timeout_s: float = 60.0) -> GenerateClient:
        return GenerateClient(self.router.url, API_KEY, timeout_s=timeout_s)


def params(max_tokens: int, temperature: float = 1.0, **more: object) -> dict[str, object]:
    base = {"temperature": temperature, "top_p": 1.0, "top_k": -1, "max_tokens": max_tokens, "ignore_eos": True}
    return {**base, "logprobs": 0, "detokenize": False, **more}


def prompt(number: int, length: int) -> list[int]:
    return [4 + (number * 131 + 17 * i * i) % 250 for i in range(length)]


async def post(url: str, headers: dict[str, str] | None = None) -> int:
    async with aiohttp.ClientSession(trust_env=False) as session, session.post(url, headers=headers) as response:
        return response.status


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("engine")
    model = make_tiny_qwen3(folder / "model", hidden=64, layers=2, heads=4, kv_heads=2, head_dim=32, ffn=128, init_std=0.2)
    spec = EngineSpec(
        model, "float32", folder / "engine.log", RUN_TOKEN, 512, args=ARGS, env=ENV, entry_points=("vime", "vime_cpu"),
        expected_platform="vllm.platforms.cpu.CpuPlatform", api_key=API_KEY,
    )  # fmt: skip
    engine, router = EngineServer(spec), RouterServer(RouterSpec(folder / "router.log"))
    try:
        engine.start()
        router.start()
        asyncio.run(bring_up(engine, router))
        groups = engine.group, router.group
        yield Stack(model, engine, router)
        os.kill(engine.pid, signal.SIGKILL)
        assert left_after(3.0, groups[0]) == [], "the engine core outlived its API server"
    finally:
        router.stop()
        engine.stop()
    assert [group_members(group) for group in groups] == [[], []]


async def bring_up(engine: EngineServer, router: RouterServer) -> None:
    await engine.wait_ready(START_TIMEOUT_S)
    assert await post(f"{engine.url}/vime/gate/open", TOKEN) == 200
    await router.wait_ready(30)
    await router.add_worker(engine.url)


def left_after(seconds: float, group: int) -> list[int]:
    deadline = time.monotonic() + seconds
    while group_members(group) and time.monotonic() < deadline:
        time.sleep(0.05)
    return group_members(group)


def bits(completion: Completion) -> tuple[tuple[int, ...], tuple[float, ...]]:
    return completion.token_ids, completion.log_probs


async def test_log_probs_equal_transformers_after_temperature(stack: Stack) -> None:
    import torch
    from transformers import Qwen3ForCausalLM

    torch.set_num_threads(1)
    ids = prompt(1, 9)
    async with stack.client() as client:
        generation = await client.generate(ids, n=4, params=params(12, temperature=0.7), seed=3)
    model = Qwen3ForCausalLM.from_pretrained(stack.model, dtype=torch.float32).eval()
    for completion in generation.choices:
        assert len(completion.token_ids) == 12
        assert completion.finish is SampleStatus.TRUNCATED
        with torch.no_grad():
            logits = model(torch.tensor([[*ids, *completion.token_ids]])).logits[0, len(ids) - 1 : -1]
        expected = torch.log_softmax(logits / 0.7, -1).gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        assert (torch.tensor(completion.log_probs) - expected).abs().max() < 1e-4
    assert len({c.token_ids for c in generation.choices}) > 1


async def test_the_trainer_has_the_engines_log_probs_at_every_temperature(stack: Stack) -> None:
    """Both divide float32 logits that differ by rounding by the temperature T: log-probs differ by about 1 / T of that.

    Measured at 0.5, 1 and 1.5: means of 1.6e-6, 9.6e-7 and 6.5e-7, largest of 1.7e-5, 6.2e-6 and 4.8e-6. A temperature that
    is off by a thousandth makes it 1e-3.
    """
    means = []
    for temperature in (0.5, 1.0, 1.5):
        async with stack.client() as client:
            asked = (client.generate(prompt(g, 9), n=4, params=params(96, temperature), seed=g) for g in range(4))
            groups = [answer.choices for answer in await asyncio.gather(*asked)]
        rewards = (0.0, 1.0, 0.0, 1.0)
        rows = [
            TrainSample(tuple(prompt(g, 9)), choice.token_ids, choice.log_probs, (1,) * 96, reward, rewards)
            for g, choices in enumerate(groups)
            for choice, reward in zip(choices, rewards, strict=True)
        ]
        metrics = trainer_rank.train_once(stack.model, rows, temperature=temperature)
        assert metrics["train/tokens"] == 4 * 4 * 96
        assert metrics["train/train_rollout_logprob_abs_diff"] <= 2e-6 / temperature
        assert metrics["train/train_rollout_logprob_abs_diff_max"] <= 2e-4 / temperature
        means.append(metrics["rollout/rollout_log_probs"])
    assert means[0] > means[1] + 0.1 > means[2] + 0.2, "the sampler's log-probs hang on the temperature"


@pytest.mark.parametrize("length", [9, 40])
async def test_bits_are_equal_alone_and_in_a_batch_and_for_n_and_single_requests(stack: Stack, length: int) -> None:
    seeds = [seed_for(0, group, group_size=8) for group in range(32)]
    async with stack.client() as client:

        async def ask(group: int, n: int = 8, child: int = 0) -> tuple[Completion, ...]:
            answer = await client.generate(prompt(group, length), n=n, params=params(5), seed=seeds[group] + child)
            return answer.choices

        together = await asyncio.gather(*(ask(group) for group in range(32)))
        again = await asyncio.gather(*(ask(group) for group in reversed(range(32))))
        assert [[bits(c) for c in g] for g in together] == [[bits(c) for c in g] for g in reversed(again)]
        for group in (0, 13, 31):
            assert [bits(c) for c in await ask(group)] == [bits(c) for c in together[group]]
            for child in (0, 5):
                (single,) = await ask(group, 1, child)
                assert bits(single) == bits(together[group][child])
        singles = await asyncio.gather(*(ask(group, 1, child) for group in range(8) for child in range(8)))
        assert [bits(s[0]) for s in singles] == [bits(c) for group in together[:8] for c in group]
        assert len({bits(c) for group in together for c in group}) == 256


async def test_flat_answers_pass_the_router_and_say_what_the_servers_own_say(stack: Stack) -> None:
    sampling = {**params(6), "n": 3, "seed": 5}
    flat = {**sampling, "extra_args": {"vime_answer": "flat"}}
    answers = []
    headers = {"Authorization": f"Bearer {API_KEY}"}
    async with aiohttp.ClientSession(trust_env=False, headers=headers) as session:
        for chosen in (sampling, flat):
            body = {"token_ids": prompt(2, 9), "sampling_params": chosen}
            async with session.post(f"{stack.router.url}/inference/v1/generate", json=body) as response:
                assert response.status == 200, await response.text()
                answers.append(await response.json())
    assert ["log_probs" in choice for answer in answers for choice in answer["choices"]] == [False] * 3 + [True] * 3
    server, own = (parse_generation(answer, n=3).choices for answer in answers)
    assert [bits(c) for c in own] == [bits(c) for c in server]
    assert [(c.finish, c.version_labels) for c in own] == [(c.finish, c.version_labels) for c in server]
    assert all(label for c in own for label, _, _ in c.version_labels)


async def test_seeded_prompts_that_are_prefilled_in_chunks_keep_their_tokens(stack: Stack) -> None:
    """7 x 8 x 100 tokens exceed the step's budget of 4096; no two prompts share a cached block."""
    async with stack.client() as client:
        many = await asyncio.gather(*(client.generate(prompt(g, 100), params=params(3), seed=g) for g in range(56)))
        alone = await client.generate(prompt(41, 100), params=params(3), seed=41)
    assert bits(many[41].choices[0]) == bits(alone.choices[0])


async def test_an_end_of_sequence_token_completes_and_stop_ids_are_kept(stack: Stack) -> None:
    async with stack.client() as client:
        free = (await client.generate(prompt(2, 9), params=params(6), seed=1)).choices[0]
        stop = free.token_ids[2]
        cut = (await client.generate(prompt(2, 9), params=params(6, stop_token_ids=[stop]), seed=1)).choices[0]
    assert cut.finish is SampleStatus.COMPLETED
    end = free.token_ids.index(stop) + 1
    assert bits(cut) == (free.token_ids[:end], free.log_probs[:end])


async def test_weights_without_a_version_are_an_error_where_one_is_needed(stack: Stack) -> None:
    async with stack.client() as client:
        completion = (await client.generate(prompt(3, 5), params=params(2), seed=1)).choices[0]
    with pytest.raises(EngineError, match="'default', which names no policy version"):
        _ = completion.spans


async def test_refusals_carry_the_engines_words(stack: Stack) -> None:
    async with stack.client() as client:
        with pytest.raises(EngineError, match=r"answered 400: .*longer than the maximum model length of 512"):
            await client.generate([5] * 600, params=params(2))
        with pytest.raises(EngineError, match=r"answered 400: .*out of vocabulary"):
            await client.generate([50_000], params=params(2))
    async with GenerateClient(stack.router.url, "another key", timeout_s=10) as stranger:
        with pytest.raises(EngineError, match="answered 401"):
            await stranger.generate([5], params=params(2))


async def test_an_abort_keeps_what_was_sampled_and_a_pause_queues_requests(stack: Stack) -> None:
    async with stack.client() as client:
        long = asyncio.create_task(client.generate(prompt(4, 9), params=params(480), seed=1))
        await asyncio.sleep(0.4)
        assert await post(f"{stack.engine.url}/pause?mode=abort") == 200
        aborted = (await long).choices[0]
        queued = asyncio.create_task(client.generate(prompt(5, 9), params=params(2), seed=1))
        await asyncio.sleep(0.3)
        assert not queued.done()
        assert await post(f"{stack.engine.url}/resume") == 200
        assert len((await queued).choices[0].token_ids) == 2
        whole = (await client.generate(prompt(4, 9), params=params(480), seed=1)).choices[0]
    assert aborted.finish is SampleStatus.ABORTED
    count = len(aborted.token_ids)
    assert 0 < count < 480
    assert bits(aborted) == (whole.token_ids[:count], whole.log_probs[:count])


async def test_a_stopped_engine_is_a_deadline_that_names_the_address(stack: Stack) -> None:
    async with stack.client(timeout_s=0.7) as client:
        os.kill(stack.engine.pid, signal.SIGSTOP)
        try:
            with pytest.raises(DeadlineError, match=f"{stack.router.url}: no answer within 0.7 s"):
                await client.generate(prompt(6, 9), params=params(2), seed=1)
            assert not await stack.engine.healthy(timeout_s=0.3)
        finally:
            os.kill(stack.engine.pid, signal.SIGCONT)
    async with stack.client() as client:
        assert (await client.generate(prompt(6, 9), params=params(2), seed=1)).choices[0].token_ids


async def test_the_router_follows_its_engines_and_keeps_its_address(stack: Stack) -> None:
    router, engine = stack.router, stack.engine
    async with stack.client() as client:
        await router.remove_worker(engine.url)
        await router.remove_worker(engine.url)
        with pytest.raises(RetryableError, match="503"):
            await client.generate([5], params=params(1))
        await router.add_worker(engine.url)
        await router.add_worker(engine.url)
        assert await router.workers() == {engine.url: True}
        assert (await client.generate([5], params=params(1))).choices
        os.kill(router.pid, signal.SIGKILL)
        with pytest.raises(RetryableError):
            await client.generate([5], params=params(1))
        address = router.url
        await router.restart(30)
        assert router.url == address
        assert (await client.generate([5], params=params(1))).choices


async def test_another_runs_engine_is_recognised(stack: Stack) -> None:
    async with aiohttp.ClientSession(trust_env=False) as session:
        await check_identity(session, stack.engine.url, RUN_TOKEN)
        with pytest.raises(EngineError, match="is not an engine of this run"):
            await check_identity(session, stack.engine.url, "another run")
