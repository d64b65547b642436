"""Versions in answers of an engine that does not report them itself."""

from __future__ import annotations

import json
from collections.abc import Callable

from vime.weights.asgi import Message, Send


class StampedAnswer:
    """Takes an app's messages in place of `send` and puts a version into each choice of its answer.

    A JSON answer of status 200 is held back until it is whole; everything else (errors, event streams) passes as it comes.
    `version` is asked when the answer is whole; None leaves the answer as it is.
    """

    def __init__(self, send: Send, version: Callable[[], str | None]) -> None:
        self._send, self._version = send, version
        self._start: Message | None = None
        self._chunks: list[bytes] = []

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start" and _is_plain_json(message):
            self._start = message
        elif message["type"] == "http.response.body" and self._start is not None:
            self._chunks.append(message.get("body", b""))
            if not message.get("more_body"):
                await self._finish(self._start)
        else:
            await self._send(message)

    async def _finish(self, start: Message) -> None:
        self._start, body = None, b"".join(self._chunks)
        version = self._version()
        if version is not None:
            body = stamped(body, version)
        headers = [(name, value) for name, value in start["headers"] if name.lower() != b"content-length"]
        headers.append((b"content-length", str(len(body)).encode()))
        await self._send({**start, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})


def stamped(body: bytes, version: str) -> bytes:
    """The answer with `weight_versions` in every choice that has tokens and none of its own; any other text unchanged.

    msgspec, which vLLM's server has loaded, reads the outer objects only and copies what is inside as it stands: log-probs
    make an answer of several MB, which a whole parse would hold the server up for.
    """
    import msgspec
    from msgspec import Raw

    decode = msgspec.json.decode
    try:
        answer = decode(body, type=dict[str, Raw])
        choices = decode(answer["choices"], type=list[dict[str, Raw]])
        for choice in choices:
            count = len(decode(choice["token_ids"], type=list[int] | None) or ())
            if count and bytes(choice.get("weight_versions", b"null")) == b"null":
                span = {"version": version, "start": 0, "end": count}
                choice["weight_versions"] = Raw(json.dumps([span]).encode())
    except (msgspec.DecodeError, KeyError):
        return body
    answer["choices"] = Raw(msgspec.json.encode(choices))
    return msgspec.json.encode(answer)


def _is_plain_json(start: Message) -> bool:
    headers = {name.lower(): value for name, value in start.get("headers", ())}
    return (
        start["status"] == 200
        and headers.get(b"content-type", b"").startswith(b"application/json")
        and b"content-encoding" not in headers
    )
