"""Versions in answers: what the gate adds where the server reports none, and when it keeps its hands off."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from vime.errors import EngineError
from vime.facts.engine import TOKEN_ROUTE, VERSION_ROUTE
from vime.rollout.client import parse_generation
from vime.testing.engine_app import Call
from vime.types import PolicyVersion, VersionSpan
from vime.weights.asgi import Message, Receive, Scope, Send
from vime.weights.gate import Gate
from vime.weights.stamp import stamped

pytest.importorskip("msgspec")

TOKEN = {"x-vime-run-token": "run-7"}
OLD = ("/pause", "/collective_rpc", TOKEN_ROUTE)
NEW = (*OLD, VERSION_ROUTE)


def choice(index: int, tokens: list[int], **more: Any) -> dict[str, Any]:
    content = [{"token": f"token_id:{t}", "logprob": -0.5, "bytes": None, "top_logprobs": []} for t in tokens]
    return {
        "index": index,
        "logprobs": {"content": content},
        "finish_reason": "stop",
        "token_ids": tokens,
        "routed_experts": None,
        **more,
    }


def answer(*choices: dict[str, Any]) -> dict[str, Any]:
    return {
        "request_id": "g1",
        "model": "policy",
        "choices": list(choices),
        "usage": {"total_tokens": 5},
        "prompt_logprobs": None,
    }


@dataclass
class Server:
    """Answers token requests with `answer` in two chunks, anything else as `/collective_rpc` does after an update.

    Requests go through its gate, with an app in the scope that lists `routes`, as the server's framework does it.
    """

    routes: tuple[str, ...]
    answer: Any = field(default_factory=lambda: answer(choice(0, [5, 6, 7]), choice(1, [8])))
    content_type: bytes = b"application/json"
    status: int = 200
    hold: asyncio.Event | None = None
    paths: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.gate = Gate(self.respond, token="run-7")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = SimpleNamespace(routes=[SimpleNamespace(path=path) for path in self.routes])
        await self.gate({**scope, "app": app}, receive, send)

    async def respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.paths.append(scope["path"])
        if scope["path"] != TOKEN_ROUTE:
            await self._send(send, json.dumps({"results": [{"seconds": {"update": 0.1}}]}).encode(), 200, b"application/json")
            return
        if self.hold is not None:
            await self.hold.wait()
        body = self.answer if isinstance(self.answer, bytes) else json.dumps(self.answer).encode()
        await self._send(send, body, self.status, self.content_type)

    async def _send(self, send: Send, body: bytes, status: int, content_type: bytes) -> None:
        headers = [(b"content-type", content_type), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body[:9], "more_body": True})
        await send({"type": "http.response.body", "body": body[9:]})

    async def open(self, version: str) -> None:
        await self.post("/vime/gate/open", {"version": version})

    async def post(self, path: str, body: Mapping[str, Any]) -> tuple[int, Any]:
        return await Call(self, "POST", path, body=json.dumps(body).encode(), headers=TOKEN).result()

    def generate(self) -> Call:
        return Call(self, "POST", TOKEN_ROUTE, body=b'{"token_ids": [1, 2]}', headers=TOKEN)


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_server_without_versions_gets_them_from_its_gate() -> None:
    server = Server(OLD)
    await server.open("1.4")
    status, given = await server.generate().result()
    assert status == 200
    assert [c["weight_versions"] for c in given["choices"]] == [
        [{"version": "1.4", "start": 0, "end": 3}],
        [{"version": "1.4", "start": 0, "end": 1}],
    ]
    for c in given["choices"]:
        del c["weight_versions"]
    assert given == server.answer
    assert parse_generation((await server.generate().result())[1], n=2).choices[0].spans == (
        VersionSpan(PolicyVersion(1, 4), 0, 3),
    )


async def test_the_length_of_a_stamped_answer_is_told() -> None:
    server, sent = Server(OLD), list[Message]()
    await server.open("0.1")

    async def nothing() -> Message:
        return {"type": "http.request", "body": b"{}"}

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": TOKEN_ROUTE, "query_string": b"", "headers": []}
    await server(scope, nothing, send)
    start, body = sent
    assert dict(start["headers"])[b"content-length"] == str(len(body["body"])).encode()
    assert not body.get("more_body")


async def test_a_server_with_versions_is_left_alone_and_its_chunks_pass_as_they_come() -> None:
    spans = [{"version": "0.3", "start": 0, "end": 1}]
    server = Server(NEW, answer(choice(0, [5], weight_versions=spans)))
    await server.open("0.4")
    call = server.generate()
    assert (await call.result())[1] == server.answer
    assert len(call.chunks) == 2


async def test_the_version_route_is_called_only_where_there_is_one() -> None:
    update = {"update_info": {}, "version": "0.2"}
    old, new = Server(OLD), Server(NEW)
    assert (await old.post("/vime/update", update))[0] == 200
    assert (await new.post("/vime/update", update))[0] == 200
    assert (old.paths, new.paths) == (["/collective_rpc"], ["/collective_rpc", VERSION_ROUTE])


async def test_an_update_names_the_weights_before_the_gate_opens() -> None:
    server = Server(OLD)
    await server.open("0.1")
    await server.post("/vime/update", {"update_info": {}, "version": "0.2"})
    given = (await server.generate().result())[1]
    assert given["choices"][0]["weight_versions"][0]["version"] == "0.2"


async def test_a_failed_update_leaves_weights_without_a_version() -> None:
    server = Server(OLD)
    await server.open("0.1")
    server.gate.app = broken_rpc(server)
    assert (await server.post("/vime/update", {"update_info": {}, "version": "0.2"}))[0] == 500
    assert (await server.generate().result())[1] == server.answer


def broken_rpc(server: Server) -> Any:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/collective_rpc":
            raise RuntimeError("worker is gone")
        await server.respond(scope, receive, send)

    return app


@pytest.mark.parametrize("change", ["open", "start_weight_update"])
async def test_weights_that_change_while_a_request_runs_leave_its_answer_without_a_version(change: str) -> None:
    server = Server(OLD, hold=asyncio.Event())
    await server.open("0.1")
    running = server.generate()
    await settle()
    if change == "open":
        await server.open("0.2")
    else:
        await server.post("/start_weight_update", {})
    assert server.hold is not None
    server.hold.set()
    given = (await running.result())[1]
    assert given == server.answer
    with pytest.raises(EngineError, match=r"versions for \(\) of 3 tokens"):
        _ = parse_generation(given, n=2).choices[0].spans


async def test_opening_again_with_the_same_version_changes_nothing() -> None:
    server = Server(OLD, hold=asyncio.Event())
    await server.open("0.1")
    running = server.generate()
    await settle()
    await server.open("0.1")
    assert server.hold is not None
    server.hold.set()
    assert (await running.result())[1]["choices"][1]["weight_versions"] == [{"version": "0.1", "start": 0, "end": 1}]


@pytest.mark.parametrize(
    ("status", "content_type", "body"),
    [(400, b"application/json", {"error": {"message": "too long"}}), (200, b"text/event-stream", b"data: {}\n\n")],
)
async def test_errors_and_streams_pass_in_their_own_chunks(status: int, content_type: bytes, body: Any) -> None:
    server = Server(OLD, body, content_type, status)
    await server.open("0.1")
    call = server.generate()
    assert await call.result() == (status, body)
    assert len(call.chunks) == 2


async def test_the_gate_lists_the_routes_of_its_server() -> None:
    server = Server(OLD)
    assert (await Call(server, "GET", "/vime/identity").result())[1]["routes"] == sorted(OLD)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[1]",
        b'{"object": "list"}',
        b'{"choices": [{"index": 0}]}',
        b'{"choices": [{"token_ids": "abc"}]}',
        b'{"choices": 1',
    ],
)
def test_a_text_of_another_shape_stays_as_it_is(body: bytes) -> None:
    assert stamped(body, "0.1") == body


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"token_ids": [], "weight_versions": None}, None),
        ({"token_ids": None}, None),
        ({"token_ids": [3], "weight_versions": None}, [{"version": "0.1", "start": 0, "end": 1}]),
        ({"token_ids": [3, 4], "weight_versions": [{"version": "9.9"}]}, [{"version": "9.9"}]),
    ],
)
def test_only_tokens_without_versions_are_stamped(given: dict[str, Any], expected: Any) -> None:
    (told,) = json.loads(stamped(json.dumps({"choices": [given]}).encode(), "0.1"))["choices"]
    assert told.get("weight_versions") == expected
