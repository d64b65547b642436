"""Grader `math`: the last boxed answer, compared with the label as mathematics by math-verify."""

from __future__ import annotations

import functools
import logging
import re
from typing import Any

from vime.errors import RewardError
from vime.rewards.typography import plain_text
from vime.rewards.values import GradeJob

_BOX = re.compile(r"\\f?box(?:ed)?(?![a-zA-Z])\s*")
# Only digits and operators reach sympy's evaluating parser; a double underscore is refused before that all the same.
_CODE = "__"


def grade(job: GradeJob) -> float:
    """1.0 if the response's answer equals the label, else 0.0.

    With a box in the response, the last one is the answer; an empty or unterminated last box is wrong, whatever stood
    before it. Without a box, math-verify looks for the final answer in the whole text. Nothing in the response is
    executed. math-verify's own time limits use signals and are off: the worker process has the limit.

    Raises:
        RewardError: no label, or one that cannot be read.
    """
    if not job.label or not job.label.strip():
        raise RewardError("no label to compare with", where=job.name or None, fix="set data.label_key")
    gold = plain_text(job.label.strip())
    answer = _answer(plain_text(job.text))
    if answer is None or _CODE in answer:
        return 0.0
    return float(is_equal(gold=gold, answer=answer))


def is_equal(*, gold: str, answer: str) -> bool:
    """Whether `answer` says what `gold` says. Not symmetric: an interval answers an inequality, not the other way round.

    Raises:
        RewardError: `gold` cannot be read.
    """
    if _bare(gold) == _bare(answer):
        return True
    parsed_gold = _parse_gold(gold)
    if not parsed_gold:
        raise RewardError(f"math-verify cannot read the label {gold!r}")
    parsed_answer = _parse(answer)
    if not parsed_answer:
        return False
    _quiet()
    from math_verify import verify

    return verify(gold=list(parsed_gold), target=parsed_answer, timeout_seconds=None, raise_on_error=True)


def last_box(text: str) -> str | None:
    """Content of the last box; "" if it is empty or does not end; None without any box."""
    start = None
    for start in _BOX.finditer(text):  # noqa: B007  the last match is wanted
        pass
    if start is None:
        return None
    inside = _braced(text, start.end())
    return "" if inside is None else inside.strip()


def _braced(text: str, start: int) -> str | None:
    if not text.startswith("{", start):
        return None
    depth, position = 0, start
    while position < len(text):
        character = text[position]
        if character == "\\":
            position += 2
            continue
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[start + 1 : position]
        position += 1
    return None


def _answer(text: str) -> str | None:
    """What to compare: the last box's content as LaTeX, the whole text without a box, None for a broken box."""
    box = last_box(text)
    if box is None:
        return text
    return f"${box}$" if box else None


def _bare(text: str) -> str:
    return re.sub(r"\s+", "", text.strip().strip("$"))


def _parse(text: str) -> list[Any]:
    _quiet()
    from math_verify import parse

    return parse(text, parsing_timeout=None)  # type: ignore[arg-type]


@functools.lru_cache(maxsize=4096)
def _parse_gold(gold: str) -> tuple[Any, ...]:
    box = last_box(gold)
    inner = gold if box is None else box
    dressed = inner if "$" in inner else f"${inner}$"
    return tuple(_parse(dressed) or _parse(inner))


@functools.cache
def _quiet() -> None:
    """math-verify warns once per process that its signal time limits are off, which is meant."""
    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).setLevel(logging.ERROR)


def warm_up() -> None:
    """Import and compile what the first call would."""
    is_equal(gold="1", answer="$2$")
