"""Plain ASGI: a request's body, answers, calls of a wrapped app, and waiting while a client may leave. Nothing of vLLM."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class InnerError(Exception):
    """A route of the wrapped app answered with an error."""

    def __init__(self, path: str, status: int, message: str) -> None:
        super().__init__(f"{path} {status} {message}")
        self.path, self.status, self.message = path, status, message


class Waiting:
    """Watches a request's channel while it waits: keeps what arrives, notices when the client goes."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._kept: list[Message] = []
        self._pending: asyncio.Future[Message] | None = None

    async def until(self, opened: asyncio.Event) -> bool:
        """True once open, False when the client has gone."""
        gate = asyncio.ensure_future(opened.wait())
        try:
            while not gate.done():
                if self._pending is None:
                    self._pending = asyncio.ensure_future(self._receive())
                await asyncio.wait({gate, self._pending}, return_when=asyncio.FIRST_COMPLETED)
                if self._pending.done():
                    message = self._pending.result()
                    self._pending = None
                    if message["type"] == "http.disconnect":
                        return False
                    self._kept.append(message)
            return True
        except BaseException:
            if self._pending is not None:
                self._pending.cancel()
            raise
        finally:
            gate.cancel()

    async def receive(self) -> Message:
        """What the app reads instead of the original channel."""
        if self._kept:
            return self._kept.pop(0)
        if self._pending is not None:
            message = await asyncio.shield(self._pending)
            self._pending = None
            return message
        return await self._receive()


def replayed(body: bytes, receive: Receive) -> Receive:
    """A request's channel whose body was read already."""
    given = False

    async def replay() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


async def call_app(app: App, scope: Scope, path: str, body: bytes, query: bytes, method: str = "POST") -> tuple[int, bytes]:
    headers = [(k, v) for k, v in scope["headers"] if k not in (b"content-length", b"content-type", b"transfer-encoding")]
    headers += [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    inner = {**scope, "method": method, "path": path, "raw_path": path.encode(), "query_string": query, "headers": headers}
    for key in ("route", "endpoint", "path_params", "router"):
        inner.pop(key, None)
    status, chunks = 500, []
    given = False

    async def receive() -> Message:
        nonlocal given
        if given:
            await asyncio.Event().wait()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        elif message["type"] == "http.response.body":
            chunks.append(message.get("body", b""))

    await app(inner, receive, send)
    return status, b"".join(chunks)


def problem(message: str) -> dict[str, Any]:
    return {"error": {"message": message}}


def header(scope: Scope, name: bytes) -> bytes | None:
    for key, value in scope["headers"]:
        if key == name:
            return value
    return None


async def read_body(receive: Receive) -> bytes:
    chunks = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return b"".join(chunks)
        chunks.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(chunks)


async def reply(send: Send, status: int, content: dict[str, Any]) -> None:
    await send_json(send, status, json.dumps(content).encode())


async def send_json(send: Send, status: int, body: bytes) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
