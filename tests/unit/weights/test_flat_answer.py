"""Answers without log-prob objects: asked for by a mark, made from the engine's output, left to the server otherwise."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vime.rollout.client import parse_generation
from vime.testing.engine_app import Call, EngineApp
from vime.types import SampleStatus
from vime.weights.flat_answer import flat_request, sampled_log_probs
from vime.weights.gate import Gate

pytest.importorskip("vllm.sampling_params")

MARK = {"extra_args": {"vime_answer": "flat"}}
SAMPLING = {"max_tokens": 4, "logprobs": 0, "n": 2, **MARK}


def flat(tokens: list[int], values: list[float], beside: int = 0) -> Any:
    """vLLM's flat log-probs: each position's sampled token, then `beside` alternatives."""
    from vllm.logprobs import FlatLogprobs

    found = FlatLogprobs()
    for token, value in zip(tokens, values, strict=True):
        others = [token + 1 + i for i in range(beside)]
        found.append_fast([token, *others], [value, *[-9.0] * beside], iter(range(beside + 1)), [None] * (beside + 1))
    return found


def nested(tokens: list[int], values: list[float]) -> Any:
    from vllm.logprobs import Logprob

    return [{token + 1: Logprob(-9.0), token: Logprob(value)} for token, value in zip(tokens, values, strict=True)]


@dataclass
class Client:
    """An engine client that answers with `outputs` once `hold` is set."""

    outputs: list[Any]
    hold: asyncio.Event = field(default_factory=asyncio.Event)
    failure: Exception | None = None
    prompts: list[Any] = field(default_factory=list)
    params: list[Any] = field(default_factory=list)
    aborted: int = 0
    model_config: Any = field(default_factory=lambda: SimpleNamespace(get_vocab_size=lambda: 100))
    vllm_config: Any = field(default_factory=lambda: SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=8)))

    async def generate(self, prompt: Any, params: Any, request_id: str) -> AsyncIterator[Any]:
        self.prompts.append(prompt)
        self.params.append(params)
        try:
            await self.hold.wait()
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        if self.failure is not None:
            raise self.failure
        yield SimpleNamespace(outputs=self.outputs)


def output(index: int, tokens: list[int], values: list[float], **more: Any) -> Any:
    return SimpleNamespace(index=index, token_ids=tokens, logprobs=flat(tokens, values), finish_reason="length", **more)


class Server(EngineApp):
    """An app with an engine client, whose routes are those of a server that keeps no label of its weights."""

    def __init__(self, client: Client) -> None:
        super().__init__()
        self.app = SimpleNamespace(state=SimpleNamespace(engine_client=client), routes=[SimpleNamespace(path="/pause")])


class Served(Gate):
    """Gives every scope the server's app, as its framework does."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await super().__call__({**scope, "app": self.app.app}, receive, send)  # type: ignore[attr-defined]


def gate_of(client: Client) -> Served:
    gate = Served(Server(client), token="run-7")
    gate._open.set()
    gate._label("0.3")
    return gate


def asked(gate: Served) -> list[Any]:
    """What reached the server's own token route."""
    return [body for path, body in gate.app.calls if path == "/inference/v1/generate"]  # type: ignore[attr-defined]


def ask(gate: Gate, body: Any) -> Call:
    return Call(gate, "POST", "/inference/v1/generate", body=json.dumps(body).encode(), chunks=2)


async def test_a_marked_request_is_answered_with_lists_that_the_client_reads() -> None:
    client = Client([output(1, [7, 8], [-0.5, -1.5]), output(0, [5], [-0.25])])
    client.hold.set()
    status, answer = await ask(gate_of(client), {"token_ids": [1, 2], "sampling_params": SAMPLING, "request_id": "r"}).result()
    assert status == 200
    first, second = parse_generation(answer, n=2).choices
    assert (first.token_ids, first.log_probs, first.finish) == ((5,), (-0.25,), SampleStatus.TRUNCATED)
    assert (second.token_ids, second.log_probs) == ((7, 8), (-0.5, -1.5))
    assert second.version_labels == (("0.3", 0, 2),)
    assert client.prompts == [{"prompt_token_ids": [1, 2]}]
    assert (client.params[0].max_tokens, client.params[0].n, client.params[0].extra_args) == (4, 2, None)


async def test_experts_come_where_they_are_asked_for() -> None:
    rows = np.arange(8, dtype=np.uint16).reshape(2, 2, 2)
    client = Client([output(0, [5], [-0.25], routed_experts=rows), output(1, [6], [-0.5], routed_experts=None)])
    client.hold.set()
    for extra, expected in (({"vime_routed_experts": True}, rows), ({}, None)):
        sampling = {**SAMPLING, "extra_args": {"vime_answer": "flat", **extra}}
        _, answer = await ask(gate_of(client), {"token_ids": [1, 2], "sampling_params": sampling}).result()
        first, second = parse_generation(answer, n=2, experts=True).choices
        np.testing.assert_array_equal(first.routed_experts, expected)
        assert second.routed_experts is None
        assert client.params[-1].extra_args is None


async def test_the_engines_own_versions_win() -> None:
    span = SimpleNamespace(version="0.9", start=0, end=1)
    client = Client([output(0, [5], [-0.25], weight_versions=[span])])
    client.hold.set()
    _, answer = await ask(gate_of(client), {"token_ids": [1], "sampling_params": {**SAMPLING, "n": 1}}).result()
    assert answer["choices"][0]["weight_versions"] == [{"version": "0.9", "start": 0, "end": 1}]


async def test_weights_that_changed_meanwhile_are_no_version() -> None:
    client = Client([output(0, [5], [-0.25])])
    gate = gate_of(client)
    call = ask(gate, {"token_ids": [1], "sampling_params": SAMPLING})
    await asyncio.sleep(0.02)
    gate._label("0.4")
    client.hold.set()
    _, answer = await call.result()
    assert "weight_versions" not in answer["choices"][0]


async def test_a_client_that_leaves_ends_its_generation_and_the_gate_is_idle() -> None:
    client = Client([])
    gate = gate_of(client)
    call = ask(gate, {"token_ids": [1], "sampling_params": SAMPLING})
    await asyncio.sleep(0.02)
    assert gate._running == 1
    call.disconnect()
    await call.result()
    assert client.aborted == 1
    assert gate._running == 0


@pytest.mark.parametrize(
    ("prompt", "sampling", "failure"),
    [
        ([1], {**SAMPLING, "n": 9}, None),
        ([1], {**SAMPLING, "temperature": -1.0}, None),
        ([1], {**SAMPLING, "no_such_thing": 1}, None),
        ([1], SAMPLING, ValueError("the prompt is too long")),
        ([], SAMPLING, None),
        ([1, 100], SAMPLING, None),
        ([-1], SAMPLING, None),
    ],
)
async def test_what_the_engine_refuses_is_left_to_the_servers_words(
    prompt: list[int], sampling: Any, failure: Exception | None
) -> None:
    client = Client([output(0, [5], [-0.25])], failure=failure)
    client.hold.set()
    gate, body = gate_of(client), {"token_ids": prompt, "sampling_params": sampling}
    assert await ask(gate, body).result() == (200, b"one two")
    assert asked(gate) == [body]


async def test_a_key_that_the_server_does_not_know_never_reaches_the_engine() -> None:
    client = Client([output(0, [5], [-0.25])])
    client.hold.set()
    gate, body = gate_of(client), {"token_ids": [1], "sampling_params": SAMPLING}
    gate.app.fail = {"/v1/models": "who are you"}  # type: ignore[attr-defined]
    assert await ask(gate, body).result() == (200, b"one two")
    assert client.params == []
    gate.app.fail = {}  # type: ignore[attr-defined]
    await ask(gate, body).result()
    await ask(gate, body).result()
    assert len(client.params) == 2
    assert [path for path, _ in gate.app.calls].count("/v1/models") == 2  # type: ignore[attr-defined]


async def test_an_engine_that_fails_is_an_error_with_its_words() -> None:
    client = Client([], failure=RuntimeError("the engine is dead"))
    client.hold.set()
    status, body = await ask(gate_of(client), {"token_ids": [1], "sampling_params": SAMPLING}).result()
    assert status == 500
    assert "the engine is dead" in body["error"]["message"]


@pytest.mark.parametrize(
    "body",
    [
        {"token_ids": [1], "sampling_params": {"max_tokens": 4, "logprobs": 0}},
        {"token_ids": [1], "sampling_params": {**SAMPLING, "extra_args": {"vime_answer": "rich"}}},
        {"token_ids": [1], "sampling_params": SAMPLING, "stream": True},
        {"token_ids": [1], "sampling_params": SAMPLING, "features": {"mm_hashes": {}}},
        {"token_ids": [1], "sampling_params": {"logprobs": 0, **MARK}},
        {"token_ids": [1], "sampling_params": {"max_tokens": 4, **MARK}},
        {"token_ids": [1], "sampling_params": {**SAMPLING, "prompt_logprobs": 0}},
        {"token_ids": [1], "vime_answer": "flat"},
    ],
)
async def test_what_only_the_server_knows_reaches_it_whole(body: dict[str, Any]) -> None:
    client = Client([])
    gate = gate_of(client)
    await ask(gate, body).result()
    assert asked(gate) == [body]
    assert client.params == []


def test_what_a_router_adds_without_meaning_changes_nothing() -> None:
    body = {"token_ids": [1], "sampling_params": SAMPLING, "stream": False, "features": None}
    assert flat_request(json.dumps(body).encode()) is not None


def test_other_extra_arguments_stay() -> None:
    sampling = {**SAMPLING, "extra_args": {"vime_answer": "flat", "mine": 1}}
    request = flat_request(json.dumps({"token_ids": [1], "sampling_params": sampling}).encode())
    assert request is not None
    assert request["sampling_params"]["extra_args"] == {"mine": 1}


@pytest.mark.parametrize("form", [flat, lambda t, v: flat(t, v, beside=2), nested])
def test_the_sampled_tokens_log_probs_are_found_in_every_form(form: Any) -> None:
    assert sampled_log_probs(form([5, 6, 5], [-1.0, -2.0, -3.0]), [5, 6, 5]) == [-1.0, -2.0, -3.0]


@pytest.mark.parametrize("form", [flat, nested])
def test_a_missing_log_prob_is_an_error(form: Any) -> None:
    with pytest.raises(RuntimeError, match="1 of 2 tokens"):
        sampled_log_probs(form([5], [-1.0]), [5, 6])
    with pytest.raises(RuntimeError, match="0 of 1 tokens"):
        sampled_log_probs(form([5], [-1.0]), [9])
    with pytest.raises(RuntimeError, match="0 of 1 tokens"):
        sampled_log_probs(None, [9])
