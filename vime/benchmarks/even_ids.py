"""A grader for models of `models.py`, whose words are token ids."""

from __future__ import annotations

from typing import Any


def even(job: Any) -> float:
    """Share of even token ids in the response; 0 for an empty one."""
    ids = [int(word) for word in str(job.text).split() if word.isdecimal()]
    return sum(number % 2 == 0 for number in ids) / len(ids) if ids else 0.0
