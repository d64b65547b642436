"""The door of an engine server that other machines reach: a pure ASGI middleware around the gate, for `--middleware`.

vLLM asks for its API key under a few prefixes only. Beside them a server that takes new weights has routes that call any method
of its workers, so nothing but the health check passes here without the run's token or key.
"""

from __future__ import annotations

import hmac
import os

from vime.weights.asgi import App, Receive, Scope, Send, header, problem, reply
from vime.weights.gate import TOKEN_HEADER

OPEN = frozenset({"/health"})
"""What the router asks without a key."""


class Door:
    """Wraps the server's app. `token` and `key` are `VIME_RUN_TOKEN` and `VLLM_API_KEY` by default; empty ones open nothing."""

    def __init__(self, app: App, token: str | None = None, key: str | None = None) -> None:
        self.app = app
        self._token = (os.environ.get("VIME_RUN_TOKEN", "") if token is None else token).encode()
        self._key = (os.environ.get("VLLM_API_KEY", "") if key is None else key).encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or (scope["type"] == "http" and (scope["path"] in OPEN or self._knows(scope))):
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            await reply(send, 401, problem("the run's token or API key is missing"))
        else:
            await send({"type": "websocket.close", "code": 1008})

    def _knows(self, scope: Scope) -> bool:
        given = ((self._token, header(scope, TOKEN_HEADER)), (b"Bearer " + self._key, header(scope, b"authorization")))
        known = (self._token, self._key)
        return any(secret and hmac.compare_digest(want, got or b"") for secret, (want, got) in zip(known, given, strict=True))
