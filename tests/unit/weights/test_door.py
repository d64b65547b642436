"""The door of an engine server that other machines reach: nobody enters without the run's token or key."""

from __future__ import annotations

from typing import Any

import pytest

from vime.weights.door import Door

TOKEN, KEY = (b"x-vime-run-token", b"t0"), (b"authorization", b"Bearer k0")


async def status_of(door: Door, path: str, *headers: tuple[bytes, bytes], kind: str = "http") -> Any:
    """The status of the answer, or the type of the message that a socket gets."""
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request"}

    async def send(message: Any) -> None:
        sent.append(message)

    await door({"type": kind, "method": "POST", "path": path, "headers": list(headers)}, receive, send)
    return sent[0].get("status", sent[0]["type"])


async def inner(scope: Any, _receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})


@pytest.mark.parametrize("path", ["/collective_rpc", "/sleep", "/update_weights", "/v1/models", "/metrics", "/vime/identity"])
async def test_every_route_but_the_health_check_asks_for_a_secret(path: str) -> None:
    door = Door(inner, "t0", "k0")
    for headers, status in [
        ((), 401),
        ((TOKEN,), 200),
        ((KEY,), 200),
        (((b"x-vime-run-token", b"k0"),), 401),
        (((b"authorization", b"Bearer "),), 401),
        (((b"authorization", b"k0"),), 401),
        (((b"x-vime-run-token", b""),), 401),
    ]:
        assert await status_of(door, path, *headers) == status
    assert await status_of(door, "/health") == 200
    assert await status_of(door, "/health/") == 401
    assert await status_of(door, path, TOKEN, kind="websocket") == "websocket.close"


async def test_a_secret_that_is_not_set_opens_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VIME_RUN_TOKEN", "VLLM_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    for headers in ((), ((b"x-vime-run-token", b""),), ((b"authorization", b"Bearer "),)):
        assert await status_of(Door(inner), "/sleep", *headers) == 401
    monkeypatch.setenv("VIME_RUN_TOKEN", "t0")
    assert await status_of(Door(inner), "/sleep", TOKEN) == 200


async def test_the_servers_own_start_passes() -> None:
    assert await status_of(Door(inner, "t0", "k0"), "", kind="lifespan") == 200
