"""The gate of an engine server: a pure ASGI middleware for vLLM's `--middleware vime.weights.gate.Gate`.

It is shut at start and during updates. Generation requests that arrive while it is shut wait in it, without an error and
as long as their client does; only the probe, which carries the run token, passes. So nothing new reaches the engine after
the gate has shut, and an engine that has drained stays idle until the gate opens.

It also runs the steps of an update inside the server, which saves a round trip each, and reads each worker's outcome: see
`vime.weights.vllm_ext.vime_weights`. It needs one API process per engine.

An update begins when nothing runs (`?pause=drain`, `?pause=abort`), or with the engine paused amid its requests
(`?pause=keep`). Requests that were kept lose what the engine cached for them: they go on with the new weights as if their
tokens so far were a prompt. While a probe judges the new weights, their answers wait (`vime.weights.verdict`).

Where the server keeps no label of its weights, the gate does: no update begins while a request runs, so all tokens of an
answer were sampled by the weights that were there when its request came in, and the gate says so in each choice. Such a
server keeps no request through an update: nobody could tell which weights sampled which token.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs

from vime.facts.engine import RESET_ROUTE, TOKEN_ROUTE, VERSION_ROUTE
from vime.weights.answers import error_text
from vime.weights.asgi import (
    App,
    InnerError,
    Receive,
    Scope,
    Send,
    Waiting,
    call_app,
    header,
    problem,
    read_body,
    replayed,
    reply,
    send_json,
)
from vime.weights.flat_answer import answer_flat, flat_request
from vime.weights.hosts import host_identity
from vime.weights.report import most_of
from vime.weights.stamp import StampedAnswer
from vime.weights.verdict import JudgedAnswer, Verdicts

GENERATION = frozenset({TOKEN_ROUTE, "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/generate"})
UPDATE_PATHS = frozenset({"/start_weight_update", "/start_draft_weight_update"})
GUARDED = "/v1/models"
"""A cheap route that the server's API key guards."""
TOKEN_HEADER = b"x-vime-run-token"
DRAIN_POLL_S = 0.05


@dataclass(frozen=True, eq=False, slots=True)
class _Weights:
    """What the engine samples from: equal versions loaded twice are two of these."""

    version: str


class Gate:
    """Wraps the server's app. `token` is the run token; by default `VIME_RUN_TOKEN`."""

    def __init__(self, app: App, token: str | None = None) -> None:
        self.app = app
        self.token = token if token is not None else os.environ.get("VIME_RUN_TOKEN", "")
        self.version: str | None = None
        self._weights: _Weights | None = None
        self._keys: set[bytes | None] = set()
        self._server_routes: frozenset[str] | None = None
        self._open = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._running = 0
        self._kept = False
        self._verdicts = Verdicts()
        self._updating = asyncio.Lock()
        self._routes: dict[tuple[str, str], Callable[[Scope, bytes], Awaitable[tuple[int, dict[str, Any]]]]] = {
            ("POST", "/vime/gate/shut"): self._shut,
            ("POST", "/vime/gate/open"): self._open_gate,
            ("POST", "/vime/resume"): self._resume,
            ("POST", "/vime/init"): self._init,
            ("POST", "/vime/update"): self._update,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        path = scope["path"]
        if path in GENERATION:
            await self._generation(scope, receive, send)
        elif path.startswith("/vime/"):
            await self._control(scope, receive, send)
        else:
            if path in UPDATE_PATHS:
                self._open.clear()
                self._weights = None
            await self.app(scope, receive, send)

    # ---- generation

    async def _generation(self, scope: Scope, receive: Receive, send: Send) -> None:
        probe = self._has_token(scope)
        if not self._open.is_set() and not probe:
            waiting = Waiting(receive)
            while not self._open.is_set():
                if not await waiting.until(self._open):
                    return
            receive = waiting.receive
        if not probe:
            send = JudgedAnswer(send, self._verdicts).send
        self._running += 1
        self._idle.clear()
        try:
            if scope["path"] == TOKEN_ROUTE:
                await self._tokens(scope, receive, send)
            else:
                await self.app(scope, receive, send)
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()

    async def _tokens(self, scope: Scope, receive: Receive, send: Send) -> None:
        """By the gate itself where the request wants that, by the server where not."""
        labels = not self._has_route(scope, VERSION_ROUTE)
        client = _engine_client(scope)
        if client is None:
            await self.app(scope, receive, self._stamped(send) if labels else send)
            return
        body, weights, answer = await read_body(receive), self._weights if labels else None, None
        request = flat_request(body)
        if request is not None and await self._knows_key(scope):
            answer = await answer_flat(
                client, request, receive, version=lambda: weights.version if weights and weights is self._weights else None
            )
        if answer is None:
            await self.app(scope, replayed(body, receive), self._stamped(send) if labels else send)
        else:
            await send_json(send, *answer)

    async def _knows_key(self, scope: Scope) -> bool:
        """Whether the server lets this client in, which it is asked once for every key: it checks keys behind the gate."""
        key = header(scope, b"authorization")
        if key not in self._keys:
            status, _ = await call_app(self.app, scope, GUARDED, b"", b"", method="GET")
            if status != 200:
                return False
            self._keys.add(key)
        return True

    def _stamped(self, send: Send) -> Send:
        """Answers get the version of the weights that are there now, unless others came before the answer was whole."""
        weights = self._weights
        if weights is None:
            return send
        return StampedAnswer(send, lambda: weights.version if weights is self._weights else None).send

    def _has_route(self, scope: Scope, path: str) -> bool:
        """Whether the server has this route; an app that lists none is taken to have all."""
        routes = self._routes_of(scope)
        return not routes or path in routes

    def _routes_of(self, scope: Scope) -> frozenset[str]:
        if self._server_routes is None:
            listed = getattr(scope.get("app"), "routes", ())
            self._server_routes = frozenset(path for route in listed if isinstance(path := getattr(route, "path", None), str))
        return self._server_routes

    def _has_token(self, scope: Scope) -> bool:
        return bool(self.token) and header(scope, TOKEN_HEADER) == self.token.encode()

    # ---- control

    async def _control(self, scope: Scope, receive: Receive, send: Send) -> None:
        method, path = scope["method"], scope["path"]
        if (method, path) == ("GET", "/vime/identity"):
            await reply(send, 200, {**self._identity(), "routes": sorted(self._routes_of(scope))})
        elif (handler := self._routes.get((method, path))) is None:
            await reply(send, 404, problem(f"no route {method} {path}"))
        elif self.token and not self._has_token(scope):
            await reply(send, 403, problem("the run token is missing or belongs to another run"))
        else:
            body = await read_body(receive)
            try:
                status, content = await handler(scope, body)
            except InnerError as error:
                status, content = 500, problem(f"{error.path}: {error.message}")
            await reply(send, status, content)

    def _identity(self) -> dict[str, Any]:
        return {
            "run_token": self.token,
            "pid": os.getpid(),
            "host": host_identity(),
            "gate": "open" if self._open.is_set() else "shut",
            "version": self.version,
            "running": self._running,
        }

    async def _shut(self, scope: Scope, body: bytes) -> tuple[int, dict[str, Any]]:
        """Shut; then pause: `?pause=drain` when running requests have finished, `abort` when they were ended, `keep` amid them.

        Weights that are on trial are refused.
        """
        self._open.clear()
        self._verdicts.refuse()
        mode = parse_qs(scope.get("query_string", b"").decode()).get("pause", [""])[0]
        if mode == "keep":
            return await self._keep(scope)
        self._kept = False
        if mode == "abort" and self._running:
            await self._inner(scope, "/pause", query=b"mode=abort")
            while self._running:
                await self._inner(scope, "/abort_requests", {})
                await self._idle_within(DRAIN_POLL_S)
        elif mode:
            await self._idle.wait()
            if not await _pause_core(scope, "abort", clear_cache=True):
                await self._inner(scope, "/pause", query=b"mode=abort")
        return 200, self._identity()

    async def _keep(self, scope: Scope) -> tuple[int, dict[str, Any]]:
        """Pause the engine with its requests in it. The caches go after the update (`_recompute`)."""
        if not self._has_route(scope, VERSION_ROUTE):
            return 409, problem("this engine's server does not tell which weights sampled which token; pause by drain")
        if not await _pause_core(scope, "keep", clear_cache=False):
            await self._inner(scope, "/pause", query=b"mode=keep&clear_cache=false")
        self._kept = True
        return 200, self._identity()

    async def _idle_within(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        except TimeoutError:
            return

    async def _resume(self, scope: Scope, body: bytes) -> tuple[int, dict[str, Any]]:
        """Let the engine run again; the gate stays as it is."""
        if not self._open.is_set():
            self._verdicts.begin()
        self._kept = False
        await self._inner(scope, "/resume")
        return 200, self._identity()

    async def _open_gate(self, scope: Scope, body: bytes) -> tuple[int, dict[str, Any]]:
        """Body `{"version": str, "resume": bool}`: resume if asked, then let everyone in."""
        request = json.loads(body or b"{}")
        self._kept = False
        if request.get("resume"):
            await self._inner(scope, "/resume")
        self.version = request.get("version", self.version)
        self._label(self.version)
        self._verdicts.accept()
        self._open.set()
        return 200, self._identity()

    async def _init(self, scope: Scope, body: bytes) -> tuple[int, dict[str, Any]]:
        """Body: the init info. Every worker checks the manifest against its model and connects its half."""
        await self._on_workers(scope, "init", json.loads(body))
        return 200, self._identity()

    async def _update(self, scope: Scope, body: bytes) -> tuple[int, dict[str, Any]]:
        """Body `{"update_info": {}, "version": str}`: start, receive and finish in every worker, then the new version."""
        request = json.loads(body)
        self._open.clear()
        if self._running and not self._kept:
            return 409, problem(f"{self._running} requests are running; shut the gate with ?pause= first")
        async with self._updating:
            self._weights = None
            done = await self._on_workers(scope, "update", request["update_info"])
            if self._kept:
                await self._recompute(scope)
            if self._has_route(scope, VERSION_ROUTE):
                await self._inner(scope, VERSION_ROUTE, {"new_version": request["version"]})
            self._label(request["version"])
        return 200, done

    async def _recompute(self, scope: Scope) -> None:
        """Take from running requests what old weights computed: the engine preempts them and prefills their tokens anew.

        Also the cached prefixes of requests that have ended, which a pause that drains clears by itself.
        """
        answer = await self._inner(scope, RESET_ROUTE, query=b"reset_running_requests=true&reset_external=true")
        if not (answer or {}).get("success"):
            raise InnerError(RESET_ROUTE, 500, "the engine holds on to caches of the old weights")

    def _label(self, version: str | None) -> None:
        if version is not None and (self._weights is None or self._weights.version != version):
            self._weights = _Weights(version)

    async def _on_workers(self, scope: Scope, step: str, payload: dict[str, Any]) -> dict[str, Any]:
        """Run a step of `vime.weights.vllm_ext` in all workers -> `seconds` by phase of the slowest one, `bytes` by tag of the
        fullest one.
        """
        call = {"method": "vime_weights", "kwargs": {"step": step, "payload": payload}}
        results = (await self._inner(scope, "/collective_rpc", call))["results"]
        failed = [(rank, result["error"]) for rank, result in enumerate(results) if "error" in result]
        if failed:
            rank, message = failed[0]
            raise InnerError(step, 500, f"worker {rank}: {message}" if len(results) > 1 else message)
        return {kind: most_of(result.get(kind, {}) for result in results) for kind in ("seconds", "bytes")}

    async def _inner(self, scope: Scope, path: str, body: Any = None, query: bytes = b"") -> Any:
        """Call a route of the wrapped app. Raises InnerError unless it answers 2xx."""
        try:
            status, content = await call_app(self.app, scope, path, b"" if body is None else json.dumps(body).encode(), query)
        except Exception as error:
            raise InnerError(path, 500, f"{type(error).__name__}: {error}"[:2000]) from error
        if not 200 <= status < 300:
            raise InnerError(path, status, error_text(content, limit=2000))
        return json.loads(content) if content else None


def _engine_client(scope: Scope) -> Any:
    """vLLM's client of the engine in this server; None in an app that has none."""
    client = getattr(getattr(scope.get("app"), "state", None), "engine_client", None)
    return client if hasattr(client, "generate") else None


async def _pause_core(scope: Scope, mode: str, *, clear_cache: bool) -> bool:
    """Pause through the engine's core client: the public route sleeps 20 ms for outputs, which nobody needs here.

    An idle engine has none, and those of kept requests carry their version already. False where this server's vLLM has no
    such call.
    """
    client = _engine_client(scope)
    pause = getattr(getattr(client, "engine_core", None), "pause_scheduler_async", None)
    clear_encoder_cache = getattr(getattr(client, "renderer", None), "clear_mm_cache_async", None)
    if pause is None or clear_encoder_cache is None:
        return False
    await clear_encoder_cache()
    await pause(mode=mode, clear_cache=clear_cache)
    return True
