"""What a server says in an answer that is an error: vLLM, its router, or vime's gate."""

from __future__ import annotations

import json
from typing import Any


def error_text(payload: bytes, *, limit: int = 600) -> str:
    """The message in an error answer, or its text where it has none; at most `limit` characters."""
    text = payload.decode("utf-8", errors="replace")
    try:
        value: Any = json.loads(text)
    except ValueError:
        return text[:limit]
    while isinstance(value, dict):
        inner = value.get("error", value.get("message", value.get("detail")))
        if inner is None:
            break
        value = inner
    return (value if isinstance(value, str) else json.dumps(value))[:limit]
