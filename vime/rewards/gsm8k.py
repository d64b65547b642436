"""Grader `gsm8k`: the number after the last `####`, wherever it stands (Cobbe et al. 2021, arXiv:2110.14168)."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation

from vime.errors import RewardError
from vime.rewards.typography import plain_text
from vime.rewards.values import GradeJob

_MARKED = re.compile(r"####[ \t]*([^\n]*)")
_NUMBER = re.compile(r"[-+]?\$?(\d[\d,]*(?:\.\d+)?|\.\d+)")


def grade(job: GradeJob) -> float:
    """1.0 if the marked number equals the label's, thousands commas, currency and a final full stop aside; else 0.0.

    Raises:
        RewardError: the label holds no number.
    """
    gold = _number(_marked(job.label or "") or job.label or "")
    if gold is None:
        raise RewardError(f"the label {job.label!r} holds no number", where=job.name or None)
    answer = _marked(plain_text(job.text))
    return float(answer is not None and _number(answer) == gold)


def _marked(text: str) -> str | None:
    found = _MARKED.findall(text)
    return found[-1] if found else None


def _number(text: str) -> Decimal | None:
    match = _NUMBER.match(text.strip())
    if match is None:
        return None
    try:
        value = Decimal(match.group(1).replace(",", ""))
    except InvalidOperation:
        return None
    return -value if text.strip().startswith("-") else value
