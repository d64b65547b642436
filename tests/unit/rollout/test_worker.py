"""A rollout worker with real graders, against a server that plays the router."""

from __future__ import annotations

import asyncio
import base64
import inspect
import io
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from vime.config.schema import DataSection, RewardSection, RolloutSection
from vime.data.routing import cyclic_ids
from vime.errors import RolloutError
from vime.facts.engine import TOKEN_ROUTE, WITHDRAWN_STATUS
from vime.rollout.worker import Outcome, RolloutWorker, WorkerSetup
from vime.testing.tiny_models import make_tiny_qwen3, make_tiny_qwen3_moe
from vime.types import PolicyVersion, PromptId, VersionSpan

PROMPT = "1 + 1 ="
"""A token a byte."""

Handler = Callable[[int], web.Response | Awaitable[web.Response]]


@asynccontextmanager
async def worker(
    folder: Path, handler: Handler, *, timeout_s: float = 600.0, experts: bool = False
) -> AsyncIterator[RolloutWorker]:
    """Connected to a server whose answers `handler` makes, by the number of the request."""
    seen = 0

    async def generate(request: web.Request) -> web.Response:
        nonlocal seen
        seen += 1
        made = handler(seen)
        return await made if inspect.isawaitable(made) else made

    model = (make_tiny_qwen3_moe if experts else make_tiny_qwen3)(folder / "model", seed=1)
    (folder / "prompts.jsonl").write_text(json.dumps({"prompt": PROMPT, "label": "2"}) + "\n")
    setup = WorkerSetup(
        seed=0,
        model_path=model,
        data=DataSection(path=folder / "prompts.jsonl"),
        rollout=RolloutSection(group_size=2, request_timeout_s=timeout_s),
        reward=RewardSection(kind="exact"),
        experts=experts,
    )
    app = web.Application()
    app.router.add_post(TOKEN_ROUTE, generate)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    made = RolloutWorker(setup)
    try:
        await made.start()
        await made.connect(site.name)
        yield made
    finally:
        await made.close()
        await runner.cleanup()


def answer(*finishes: str, spans: tuple[tuple[str, int, int], ...]) -> web.Response:
    versions = [{"version": v, "start": start, "end": end} for v, start, end in spans]
    tokens = {"token_ids": [5, 6, 7], "log_probs": [-0.5, -0.25, -0.125], "weight_versions": versions}
    return web.json_response({"choices": [{"index": i, "finish_reason": f, **tokens} for i, f in enumerate(finishes)]})


async def outcome(made: RolloutWorker) -> Outcome:
    await made.submit([PromptId(0, 0, 0)])
    (found,) = await made.finished()
    return found


MIXED = (("0.3", 0, 1), ("0.4", 1, 3))


async def test_samples_keep_the_version_of_each_token(tmp_path: Path) -> None:
    async with worker(tmp_path, lambda _: answer("stop", "length", spans=MIXED)) as made:
        found = await outcome(made)
    expected = (VersionSpan(PolicyVersion(0, 3), 0, 1), VersionSpan(PolicyVersion(0, 4), 1, 3))
    assert [sample.versions for sample in found.samples] == [expected] * 2


@pytest.mark.parametrize(
    ("handler", "reason"),
    [
        (lambda _: web.json_response({"error": {"message": "withdrawn"}}, status=WITHDRAWN_STATUS), "answered 410: withdrawn"),
        (lambda _: answer("stop", "abort", spans=MIXED), "ended from outside"),
        (lambda _: answer("stop", "stop", spans=MIXED[:1]), "gives versions for"),
    ],
    ids=["withdrawn", "partial", "unknown-version"],
)
async def test_a_group_that_cannot_be_trained_whole_goes_back(tmp_path: Path, handler: Any, reason: str) -> None:
    """Neither its tokens nor a reward for them: the prompt is generated anew."""
    async with worker(tmp_path, handler) as made:
        found = await outcome(made)
    assert found.samples == ()
    assert found.dropped is None
    assert reason in (found.failure or "")


async def test_the_deadline_of_a_request_begins_when_it_is_sent(tmp_path: Path) -> None:
    """So waiting for shared devices does not count; what a request waits in an engine does, and its group goes back."""

    async def hangs_later(number: int) -> web.Response:
        await asyncio.sleep(60.0 if number > 1 else 0.0)
        return answer("stop", "stop", spans=MIXED)

    async with worker(tmp_path, hangs_later, timeout_s=0.5) as made:
        await made.pause()
        await made.submit([PromptId(0, 0, 0)])
        await asyncio.sleep(0.8)
        await made.resume()
        (found,) = await made.finished()
        assert len(found.samples) == 2
        assert "no answer within 0.5 s" in ((await outcome(made)).failure or "")


def routed(*rows: int | None, finish: str = "stop") -> web.Response:
    """Responses of three tokens, each with so many rows of experts (None: no rows)."""
    versions = [{"version": "0.3", "start": 0, "end": 3}]
    tokens = {"token_ids": [5, 6, 7], "log_probs": [-0.5, -0.25, -0.125], "weight_versions": versions}
    return web.json_response(
        {
            "choices": [
                {
                    "index": i,
                    "finish_reason": finish,
                    **tokens,
                    "routed_experts": None if n is None else encoded(ids(n, start=i)),
                }
                for i, n in enumerate(rows)
            ]
        }
    )


def ids(rows: int, *, start: int) -> Any:
    """Of the tiny mixture: two layers with two of eight experts."""
    return cyclic_ids(rows, layers=2, top_k=2, experts=8, start=start)


def encoded(array: Any) -> str:
    file = io.BytesIO()
    np.save(file, array)
    return base64.b64encode(file.getvalue()).decode()


async def test_samples_carry_the_experts_of_each_token(tmp_path: Path) -> None:
    whole = len(PROMPT) + 3
    async with worker(tmp_path, lambda _: routed(whole - 1, whole - 1), experts=True) as made:
        found = await outcome(made)
    assert len(found.samples) == 2
    for start, sample in enumerate(found.samples):
        given = sample.routed_experts
        assert given is not None
        assert (given.shape, given.dtype) == ((whole, 2, 2), np.uint8)
        np.testing.assert_array_equal(given[:-1], ids(whole - 1, start=start))


@pytest.mark.parametrize(
    ("rows", "reason"),
    [((None, None), "answered without them"), ((10, 10), "10 rows of expert ids for 10 tokens"), ((9, 8), "8 rows")],
    ids=["none", "one-too-many", "one-too-few"],
)
async def test_an_engine_whose_experts_cannot_be_replayed_ends_the_run(tmp_path: Path, rows: Any, reason: str) -> None:
    async with worker(tmp_path, lambda _: routed(*rows), experts=True) as made:
        with pytest.raises(RolloutError, match=reason):
            await outcome(made)


@pytest.mark.parametrize("finish", ["abort", "error"])
async def test_a_response_that_ended_without_experts_goes_back(tmp_path: Path, finish: str) -> None:
    async with worker(tmp_path, lambda _: routed(9, None, finish=finish), experts=True) as made:
        found = await outcome(made)
    assert found.samples == ()
    assert found.failure
