"""Grader `reasoning_gym`: the task's own verifier, thresholded."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Mapping
from typing import Any

from vime.errors import RewardError
from vime.rewards.values import GradeJob, Score

SOLVED = 1.0
LITERAL_KEY = "python_literal"
"""Metadata entry with the Python form of a task's metadata, where JSON lost what the verifier needs."""


def grade(job: GradeJob) -> Score:
    """1.0 for a solved task, else 0.0; `raw` is the verifier's score.

    Verifiers give partial credit, and some a little even for junk, so only a full score counts. The score decides and
    never the label, which some tasks do not have. A response cut at the length limit has not answered.

    Raises:
        RewardError: the row names no task, or one that is not installed. The verifier's own exceptions pass through.
    """
    if not job.finished:
        return Score(0.0, 0.0)
    task = job.task or job.metadata.get("source_dataset")
    if not isinstance(task, str):
        raise RewardError("the row names no task", where=job.name or None, fix="add a `task` column; `vime data make` does")
    entry = {"question": "", "answer": job.label, "metadata": _metadata(job.metadata)}
    score = float(_verifier(task.removeprefix("reasoning_gym:"))(job.text.strip(), entry))
    return Score(float(score >= SOLVED), score)


def _metadata(metadata: Mapping[str, Any]) -> Mapping[str, Any]:
    literal = metadata.get(LITERAL_KEY)
    return ast.literal_eval(literal) if isinstance(literal, str) else metadata


@functools.cache
def _verifier(task: str) -> Callable[[str, Mapping[str, Any]], float]:
    try:
        from reasoning_gym import get_score_answer_fn
    except ImportError as error:
        raise RewardError("the task verifiers are not installed", fix="pip install 'vime[tasks]'") from error
    try:
        verifier: Any = get_score_answer_fn(task)
    except ValueError as error:
        raise RewardError(f"reasoning-gym has no task {task!r}") from error
    return verifier


def warm_up() -> None:
    """Import the verifiers, which takes about a second, before the first response comes."""
    import reasoning_gym  # noqa: F401
