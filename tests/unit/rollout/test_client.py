from __future__ import annotations

import asyncio
import base64
import io
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from vime.config.schema import SamplingSection
from vime.errors import DeadlineError, EngineError, RolloutError
from vime.rollout.client import WHOLE_ANSWER, Completion, GenerateClient, RetryableError, parse_generation
from vime.rollout.sampling import sampling_params
from vime.types import PolicyVersion, SampleStatus, VersionSpan

PARAMS = {"temperature": 1.0, "max_tokens": 4, "logprobs": 0, "detokenize": False}


def choice(index: int, tokens: list[int], log_probs: list[float | None], finish: str = "stop", **extra: Any) -> dict[str, Any]:
    content = [{"token_id": t, "logprob": p, "rank": 1} for t, p in zip(tokens, log_probs, strict=False)]
    return {"index": index, "token_ids": tokens, "finish_reason": finish, "logprobs": {"content": content}, **extra}


def answer(*choices: dict[str, Any]) -> dict[str, Any]:
    return {"request_id": "generate-tokens-r1", "choices": list(choices)}


@asynccontextmanager
async def serving(handler: Callable[[web.Request], Any]) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_post("/inference/v1/generate", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield site.name
    finally:
        await runner.cleanup()


def replying(payload: Any, status: int = 200) -> Callable[[web.Request], Any]:
    async def handler(request: web.Request) -> web.Response:
        return web.json_response(payload, status=status)

    return handler


async def test_a_request_carries_tokens_parameters_seed_and_ids() -> None:
    seen: dict[str, Any] = {}

    async def handler(request: web.Request) -> web.Response:
        seen["body"], seen["headers"] = await request.json(), request.headers
        return web.json_response(answer(choice(1, [7], [-0.5]), choice(0, [8, 2], [-0.25, -1.0], "length")))

    async with serving(handler) as url, GenerateClient(url, "key", timeout_s=5) as client:
        generation = await client.generate((5, 6), n=2, params=PARAMS, seed=40, request_id="r1", session_id="s1")
    asked = {**WHOLE_ANSWER, **PARAMS, "n": 2, "seed": 40, "extra_args": {"vime_answer": "flat"}}
    assert seen["body"] == {"token_ids": [5, 6], "sampling_params": asked, "request_id": "r1"}
    assert seen["headers"]["Authorization"] == "Bearer key"
    assert seen["headers"]["x-session-id"] == "s1"
    assert [c.index for c in generation.choices] == [0, 1]
    assert generation.choices[0] == Completion(0, (8, 2), (-0.25, -1.0), SampleStatus.TRUNCATED)
    assert generation.choices[1].finish is SampleStatus.COMPLETED


async def test_proxy_variables_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    async with serving(replying(answer(choice(0, [1], [-1.0])))) as url, GenerateClient(url, timeout_s=5) as client:
        assert (await client.generate([1], params=PARAMS)).choices[0].token_ids == (1,)


async def test_more_requests_than_a_default_pool_holds_run_at_once() -> None:
    waiting, everyone = 0, asyncio.Event()

    async def handler(request: web.Request) -> web.Response:
        nonlocal waiting
        waiting += 1
        if waiting == 150:
            everyone.set()
        await everyone.wait()
        return web.json_response(answer(choice(0, [1], [-1.0])))

    async with serving(handler) as url, GenerateClient(url, timeout_s=20) as client:
        generations = await asyncio.gather(*(client.generate([1], params=PARAMS) for _ in range(150)))
    assert len(generations) == 150


@pytest.mark.parametrize(
    ("finish", "status"),
    [
        ("stop", SampleStatus.COMPLETED),
        ("length", SampleStatus.TRUNCATED),
        ("abort", SampleStatus.ABORTED),
        ("error", SampleStatus.FAILED),
        ("repetition", SampleStatus.FAILED),
    ],
)
def test_finish_reasons_become_statuses(finish: str, status: SampleStatus) -> None:
    assert parse_generation(answer(choice(0, [3, 4], [-1.0, -2.0], finish)), n=1).choices[0].finish is status


def test_an_abort_before_the_first_token_is_an_empty_response() -> None:
    empty = {"index": 0, "token_ids": [], "finish_reason": "abort", "logprobs": None, "weight_versions": None}
    completion = parse_generation(answer(empty), n=1).choices[0]
    assert completion.finish is SampleStatus.ABORTED
    assert (completion.token_ids, completion.log_probs, completion.spans) == ((), (), ())


@pytest.mark.parametrize(
    "bad",
    [
        choice(0, [3, 4], [-1.0]),
        choice(0, [3, 4], [-1.0, None]),
        choice(0, [3], [-9999.0]),
        {"index": 0, "token_ids": [3], "finish_reason": "stop", "logprobs": None},
    ],
)
def test_a_token_without_a_log_prob_is_an_error(bad: dict[str, Any]) -> None:
    with pytest.raises(EngineError, match="tokens came with"):
        parse_generation(answer(bad), n=1)


async def test_experts_are_read_where_they_were_asked_for() -> None:
    rows, seen = np.arange(12, dtype=np.uint8).reshape(3, 2, 2), list[Any]()
    file = io.BytesIO()
    np.save(file, rows)
    text = base64.b64encode(file.getvalue()).decode()

    async def handler(request: web.Request) -> web.Response:
        seen.append((await request.json())["sampling_params"]["extra_args"])
        return web.json_response(answer(choice(0, [7], [-0.5], routed_experts=text)))

    async with serving(handler) as url, GenerateClient(url, timeout_s=5) as client:
        asked, unasked = [
            await client.generate((5, 6), params=sampling_params(SamplingSection(), experts=experts))
            for experts in (True, False)
        ]
    assert seen == [{"vime_answer": "flat", "vime_routed_experts": True}, {"vime_answer": "flat"}]
    np.testing.assert_array_equal(asked.choices[0].routed_experts, rows)
    assert unasked.choices[0].routed_experts is None


def test_an_abort_before_the_first_token_has_no_experts() -> None:
    empty = {"index": 0, "token_ids": [], "finish_reason": "abort", "logprobs": None, "routed_experts": None}
    completion = parse_generation(answer(empty), n=1, experts=True).choices[0]
    assert (completion.finish, completion.routed_experts) == (SampleStatus.ABORTED, None)


def test_experts_that_cannot_be_read_are_an_error() -> None:
    with pytest.raises(RolloutError, match="not an array of expert ids"):
        parse_generation(answer(choice(0, [7], [-0.5], routed_experts="AAAA")), n=1, experts=True)


def test_a_missing_response_is_an_error() -> None:
    with pytest.raises(EngineError, match=r"2 responses were asked for, \[0\] came"):
        parse_generation(answer(choice(0, [3], [-1.0])), n=2)


def test_versions_are_stamped_per_token_span() -> None:
    spans = [{"version": "0.3", "start": 0, "end": 2}, {"version": "1.4", "start": 2, "end": 3}]
    completion = parse_generation(answer(choice(0, [1, 2, 3], [-1.0, -1.0, -1.0], weight_versions=spans)), n=1).choices[0]
    assert completion.spans == (VersionSpan(PolicyVersion(0, 3), 0, 2), VersionSpan(PolicyVersion(1, 4), 2, 3))
    assert min(span.version for span in completion.spans) == PolicyVersion(0, 3)


def test_weights_that_were_never_published_are_an_error_only_where_a_version_is_needed() -> None:
    spans = [{"version": "default", "start": 0, "end": 1}]
    completion = parse_generation(answer(choice(0, [1], [-1.0], weight_versions=spans)), n=1).choices[0]
    assert completion.token_ids == (1,)
    with pytest.raises(EngineError, match="'default', which names no policy version"):
        _ = completion.spans


def test_an_engine_that_does_not_tell_versions_is_an_error_where_one_is_needed() -> None:
    completion = parse_generation(answer(choice(0, [1], [-1.0])), n=1).choices[0]
    with pytest.raises(EngineError, match=r"versions for \(\) of 1 tokens"):
        _ = completion.spans


async def test_a_refused_request_carries_the_engines_message_and_is_not_retryable() -> None:
    body = {"error": {"message": "Token id 5000 is out of vocabulary", "type": "BadRequestError", "code": 400}}
    async with serving(replying(body, 400)) as url, GenerateClient(url, timeout_s=5) as client:
        with pytest.raises(EngineError, match="answered 400: Token id 5000 is out of vocabulary") as caught:
            await client.generate([5000], params=PARAMS)
    assert not isinstance(caught.value, RetryableError)


@pytest.mark.parametrize("status", [500, 503])
async def test_a_router_without_engines_is_retryable(status: int) -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.Response(status=status, text="No available workers")

    async with serving(handler) as url, GenerateClient(url, timeout_s=5) as client:
        with pytest.raises(RetryableError, match=f"answered {status}: No available workers"):
            await client.generate([1], params=PARAMS)


async def test_a_refused_connection_is_retryable() -> None:
    async with serving(replying({})) as url:
        pass
    async with GenerateClient(url, timeout_s=5) as client:
        with pytest.raises(RetryableError, match="the connection failed"):
            await client.generate([1], params=PARAMS)


async def test_a_silent_server_is_a_deadline_that_names_it() -> None:
    async def handler(request: web.Request) -> web.Response:
        await asyncio.sleep(30)
        return web.Response()

    async with serving(handler) as url, GenerateClient(url, timeout_s=0.2) as client:
        with pytest.raises(DeadlineError, match=r"no answer within 0\.2 s") as caught:
            await client.generate([1], params=PARAMS)
    assert caught.value.where == url


async def test_text_that_is_not_json_is_an_error() -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.Response(text="<html>")

    async with serving(handler) as url, GenerateClient(url, timeout_s=5) as client:
        with pytest.raises(EngineError, match="not JSON"):
            await client.generate([1], params=PARAMS)


def test_tokens_pass_unchanged_through_json() -> None:
    tokens = [151_935, 0, 7]
    assert parse_generation(json.loads(json.dumps(answer(choice(0, tokens, [-1.0] * 3)))), n=1).choices[0].token_ids == (
        151_935,
        0,
        7,
    )
