"""Updates amid running requests on a real vLLM: which weights sampled which token, and with what in the cache."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_env import ENV

from vime.errors import EngineError, ProbeError, WeightSyncError
from vime.platforms.cpu.engine import ARGS
from vime.rollout.client import Completion, GenerateClient, Generation
from vime.rollout.engine import ENGINE_NEEDS, EngineServer, EngineSpec
from vime.rollout.router import RouterServer, RouterSpec
from vime.testing.reference_trainer import ReferenceTrainer
from vime.testing.tiny_models import make_tiny_qwen3
from vime.types import PolicyVersion, VersionSpan
from vime.weights.control import EngineControl
from vime.weights.probe import probe_ids
from vime.weights.protocol import ProbeSettings, Publisher
from vime.weights.transports.host_shm import HostShmTrainer

pytestmark = pytest.mark.timeout(180)
VOCAB, TOKEN, LENGTH = 320, "in-flight-tests", 960
PROMPT = tuple(range(40, 72))
PARAMS = {"max_tokens": LENGTH, "temperature": 1.0, "logprobs": 0, "ignore_eos": True, "detokenize": False}


@dataclass(frozen=True)
class Served:
    server: EngineServer
    router: RouterServer
    model_path: Path

    def control(self) -> EngineControl:
        return EngineControl(self.server.url, api_key="key", run_token=TOKEN, timeout_s=60.0, name="engine")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One engine behind the router."""
    folder = tmp_path_factory.mktemp("engine")
    path = make_tiny_qwen3(folder / "model", vocab_size=VOCAB, layers=3)
    spec = EngineSpec(
        model_path=path,
        dtype="float32",
        log_path=folder / "engine.log",
        run_token=TOKEN,
        max_model_len=1024,
        args={**ARGS, **ENGINE_NEEDS, "worker_extension_cls": "vime.testing.reference_trainer.SpoilingWorker"},
        env=ENV,
        entry_points=("vime", "vime_cpu"),
        api_key="key",
        in_flight=True,
    )
    server = EngineServer(spec)
    try:
        server.start()
        asyncio.run(server.wait_ready(120))
        router = RouterServer(RouterSpec(folder / "router.log", worker_urls=(server.url,)))
        router.start()
        try:
            asyncio.run(router.wait_ready(30))
            yield Served(server, router, path)
        finally:
            router.stop()
    finally:
        server.stop()


class Bench:
    """A trainer that publishes in flight, and what its weights were at each version."""

    def __init__(self, served: Served, control: EngineControl, client: GenerateClient) -> None:
        self.control, self.client = control, client
        self.trainer = ReferenceTrainer(served.model_path, lambda m: HostShmTrainer(run_id="in-flight", manifest=m))
        self.publisher = Publisher(self.trainer, probe=ProbeSettings(ids=probe_ids(VOCAB)), pause="keep")
        self.publisher.set_engines([control])
        self.step = 0
        self.models: dict[int, Any] = {}

    async def publish(self, *, perturb: bool = True, **checks: Any) -> Any:
        self.step += 1
        if perturb:
            self.trainer.perturb()
        self.models[self.step] = copy.deepcopy(self.trainer.model)
        return await self.publisher.publish(PolicyVersion(0, self.step), **checks)

    def sampling(self, n: int = 1, seed: int | None = None) -> asyncio.Task[Generation]:
        return asyncio.create_task(self.client.generate(PROMPT, n=n, params=PARAMS, seed=seed))

    async def running(self, seconds: float = 0.25) -> None:
        """Some tokens have been sampled."""
        await asyncio.sleep(seconds)
        assert (await self.control.identity()).running > 0, "the request ended too early for this test"

    @torch.no_grad()
    def expected(self, step: int, choice: Completion) -> torch.Tensor:
        """[response tokens] log-probs of a prefill of prompt and response under the weights of `step`."""
        ids = torch.tensor([[*PROMPT, *choice.token_ids]])
        log_probs = self.models[step](ids).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
        return log_probs.gather(-1, ids[0, len(PROMPT) :, None])[:, 0]

    def off(self, step: int, choice: Completion, span: VersionSpan) -> float:
        """Mean difference between a span's log-probs and those of `step`."""
        return float((self.expected(step, choice) - torch.tensor(choice.log_probs))[span.start : span.end].abs().mean())


@pytest.fixture
async def bench(served: Served) -> AsyncIterator[Bench]:
    async with making(served) as made:
        yield made


@asynccontextmanager
async def making(served: Served) -> AsyncIterator[Bench]:
    async with served.control() as control, GenerateClient(served.router.url, "key", timeout_s=60) as client:
        made = Bench(served, control, client)
        try:
            yield made
        finally:
            await made.publisher.close()
            made.trainer.close()


async def test_each_token_has_the_log_prob_of_the_weights_that_its_span_names(bench: Bench) -> None:
    """Also: the caches of the old weights are gone, or the later spans would match no model."""
    await bench.publish()
    request = bench.sampling(n=3)
    for checks in ({}, {"probe": True, "fingerprint": True}):
        await bench.running()
        report = await bench.publish(**checks)
    assert report.probe_mean < 1e-5, "the probe passed beside the kept requests"
    assert "stage" in report.seconds
    for choice in (await request).choices:
        spans = choice.spans
        assert [span.version.step for span in spans] == [1, 2, 3]
        assert [span.start for span in spans] == [0, spans[0].end, spans[1].end]
        assert spans[-1].end == LENGTH
        for span in spans:
            assert span.end - span.start >= 5
            others = [bench.off(step, choice, span) for step in (1, 2, 3) if step != span.version.step]
            assert bench.off(span.version.step, choice, span) < 1e-5
            assert min(others) > 1e-3, "the test tells the versions apart"


async def test_without_fresh_caches_the_tokens_after_an_update_match_no_weights(bench: Bench) -> None:
    """What the gate spares us: vLLM's own pause `keep` without the reset."""
    await bench.publish()
    request = bench.sampling()
    await bench.running()
    bench.trainer.perturb()
    bench.models[2] = copy.deepcopy(bench.trainer.model)
    control = bench.control
    await control._call("POST", "/pause?mode=keep&clear_cache=false")
    staged = await bench.trainer.stage("0.2", False)
    step = {"method": "vime_weights", "kwargs": {"step": "update", "payload": {"staged": staged}}}
    await control._call("POST", "/collective_rpc", step)
    await control._call("POST", "/update_weight_version", {"new_version": "0.2"})
    await control._call("POST", "/resume")
    (choice,) = (await request).choices
    first, second = choice.spans
    assert bench.off(1, choice, first) < 1e-5
    assert min(bench.off(1, choice, second), bench.off(2, choice, second)) > 1e-3


async def test_an_update_by_equal_weights_changes_no_token_of_a_seeded_request(bench: Bench) -> None:
    """A kept request goes on with its random numbers where it was, and neither loses nor repeats a token."""
    await bench.publish()
    (alone,) = (await bench.sampling(seed=5)).choices
    request = bench.sampling(seed=5)
    await bench.running()
    await bench.publish(perturb=False, probe=True)
    (kept,) = (await request).choices
    assert [span.version.step for span in kept.spans] == [1, 2]
    assert kept.token_ids == alone.token_ids
    assert torch.tensor(kept.log_probs).sub(torch.tensor(alone.log_probs)).abs().max() < 1e-4


class SpoilingControl(EngineControl):
    """Spoils a parameter of the engine right after its update."""

    spoils = True

    async def update(self, update_info: Any, *, version: str) -> Any:
        seconds = await super().update(update_info, version=version)
        if self.spoils:
            await self._call("POST", "/collective_rpc", {"method": "spoil", "args": ["model.norm.weight"]})
        return seconds


async def test_what_a_refused_update_sampled_never_leaves_the_gate(bench: Bench, served: Served) -> None:
    """Kept requests run on while the probe judges; it fails, and they are refused instead of answered, whole or in part."""
    await bench.publish()
    spoiling = SpoilingControl(served.server.url, api_key="key", run_token=TOKEN, timeout_s=60.0, name="engine")
    bench.publisher.set_engines([spoiling])
    requests = [bench.sampling(), bench.sampling(n=2)]
    await bench.running()
    with pytest.raises(ProbeError, match="engine: log-probs after the update differ"):
        await bench.publish(probe=True)
    for request in requests:
        with pytest.raises(EngineError, match="answered 410: withdrawn"):
            await request
    late = bench.sampling()
    await asyncio.sleep(0.2)
    assert not late.done(), "the gate is shut until weights are proved"
    spoiling.spoils = False
    assert (await bench.publish(probe=True)).probe_mean < 1e-5
    (choice,) = (await late).choices
    assert [span.version.step for span in choice.spans] == [3]
    assert bench.off(3, choice, choice.spans[0]) < 1e-5


async def test_requests_outlive_an_update_that_fails_before_its_weights_are_there(bench: Bench) -> None:
    """The engine stays paused with its requests; they go on with the next version that arrives whole."""
    await bench.publish()
    request = bench.sampling()
    await bench.running()
    offset = bench.trainer.manifest.tensors[3].offset

    def tamper() -> None:
        bench.trainer.half._image.buffer[offset + 5] ^= 1

    bench.trainer.after_stage = tamper
    with pytest.raises(WeightSyncError, match="was altered"):
        await bench.publish(fingerprint=True)
    assert await bench.control.is_paused()
    assert not request.done()
    bench.trainer.after_stage = None
    await bench.publish(fingerprint=True, probe=True)
    (choice,) = (await request).choices
    assert [span.version.step for span in choice.spans] == [1, 3]
    assert bench.off(1, choice, choice.spans[0]) < 1e-5
    assert bench.off(3, choice, choice.spans[1]) < 1e-5
