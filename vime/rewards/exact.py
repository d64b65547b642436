"""Grader `exact`: the response is the label, white space at both ends aside."""

from __future__ import annotations

from vime.errors import RewardError
from vime.rewards.values import GradeJob


def grade(job: GradeJob) -> float:
    """1.0 or 0.0. Raises RewardError without a label."""
    if job.label is None:
        raise RewardError("no label to compare with", where=job.name or None, fix="set data.label_key")
    return float(job.text.strip() == job.label.strip())
