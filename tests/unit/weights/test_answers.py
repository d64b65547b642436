"""The message that a person gets of a server's error answer."""

from __future__ import annotations

import pytest

from vime.weights.answers import error_text


@pytest.mark.parametrize(
    ("payload", "text"),
    [
        (b'{"error": {"message": "out of pages", "code": 500}}', "out of pages"),
        (b'{"error": "no worker"}', "no worker"),
        (b'{"detail": "Not Found"}', "Not Found"),
        (b'{"detail": [{"loc": ["body"], "msg": "missing"}]}', '[{"loc": ["body"], "msg": "missing"}]'),
        (b'{"message": "asleep"}', "asleep"),
        (b'{"status": 7}', '{"status": 7}'),
        (b"Internal Server Error", "Internal Server Error"),
        (b"\xff", "\ufffd"),
        (b"", ""),
    ],
)
def test_the_message_is_found_in_every_form_that_a_server_answers(payload: bytes, text: str) -> None:
    assert error_text(payload) == text


def test_a_long_message_is_cut() -> None:
    assert error_text(b'{"error": "' + b"x" * 50 + b'"}', limit=7) == "x" * 7
