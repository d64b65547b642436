"""A small ASGI app that answers like an engine server, and a client that calls an ASGI app without a socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from vime.weights.asgi import App, Message, Receive, Scope, Send


@dataclass
class EngineApp:
    """Answers 200 to everything, with `answers[path]` where it has one, and records the calls.

    `fail[path]` makes a route answer 500 with that message. `hold` keeps generations running until it is set; a client
    that leaves ends its own.
    """

    calls: list[tuple[str, Any]] = field(default_factory=list)
    fail: dict[str, str] = field(default_factory=dict)
    answers: dict[str, Any] = field(default_factory=dict)
    hold: asyncio.Event | None = None
    generating: int = 0
    cancelled: int = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await _whole_body(receive)
        path = scope["path"]
        self.calls.append((path, json.loads(body) if body else scope["query_string"].decode()))
        if path in self.fail:
            await _reply(send, 500, {"error": {"message": self.fail[path]}})
        elif path.startswith(("/inference", "/v1")) and path != "/v1/models":
            await self._generate(receive, send)
        else:
            if path == "/abort_requests" and self.hold is not None:
                self.hold.set()
            await _reply(send, 200, self.answers.get(path, {}))

    async def _generate(self, receive: Receive, send: Send) -> None:
        self.generating += 1
        try:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"one ", "more_body": True})
            if self.hold is not None and await self._client_left(receive, self.hold):
                self.cancelled += 1
                return
            await send({"type": "http.response.body", "body": b"two"})
        finally:
            self.generating -= 1

    async def _client_left(self, receive: Receive, hold: asyncio.Event) -> bool:
        gone, opened = asyncio.ensure_future(receive()), asyncio.ensure_future(hold.wait())
        done, pending = await asyncio.wait({gone, opened}, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        return gone in done

    @property
    def paths(self) -> list[str]:
        return [path for path, _ in self.calls]


class Call:
    """One request to an ASGI app, running as a task. `chunks` cuts the body into so many messages."""

    def __init__(
        self, app: App, method: str, path: str, *, body: bytes = b"", headers: Mapping[str, str] | None = None, chunks: int = 1
    ) -> None:
        path, _, query = path.partition("?")
        self._messages = list(_body_messages(body, chunks))
        self._gone = asyncio.Event()
        self.status = 0
        self.chunks: list[bytes] = []
        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "query_string": query.encode(),
            "headers": [(k.encode(), v.encode()) for k, v in (headers or {}).items()],
        }
        self.task: asyncio.Future[None] = asyncio.ensure_future(app(scope, self._receive, self._send))

    def disconnect(self) -> None:
        """The client leaves."""
        self._gone.set()

    async def result(self, timeout_s: float = 2.0) -> tuple[int, Any]:
        """(status, body); a JSON object is parsed. Status 0: no response."""
        await asyncio.wait_for(self.task, timeout_s)
        text = b"".join(self.chunks)
        return self.status, json.loads(text) if text.startswith(b"{") else text

    async def _receive(self) -> Message:
        if self._messages:
            return self._messages.pop(0)
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self.chunks.append(message.get("body", b""))


def _body_messages(body: bytes, chunks: int) -> Iterable[Message]:
    size = max(1, -(-len(body) // chunks))
    parts = [body[i : i + size] for i in range(0, len(body), size)] or [b""]
    for number, part in enumerate(parts, start=1):
        yield {"type": "http.request", "body": part, "more_body": number < len(parts)}


async def _whole_body(receive: Receive) -> bytes:
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            return body


async def _reply(send: Send, status: int, content: Mapping[str, Any]) -> None:
    await send({"type": "http.response.start", "status": status, "headers": []})
    await send({"type": "http.response.body", "body": json.dumps(content).encode()})
