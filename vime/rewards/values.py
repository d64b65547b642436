"""What goes into a grader and what may come out of it."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from vime.errors import RewardError


@dataclass(frozen=True, slots=True)
class GradeJob:
    """One response to score. `finished`: it ended by itself, not at the length limit. `name` is for messages."""

    text: str
    label: str | None = None
    task: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    finished: bool = True
    name: str = ""


@dataclass(frozen=True, slots=True)
class Score:
    """A grader's answer with its raw score kept apart, where the reward is a threshold of it."""

    reward: float | None
    raw: float | None = None


@dataclass(frozen=True, slots=True)
class GradeOutcome:
    """`reward` None: the sample is not trained on. `error` says why, unless the grader itself declined to score."""

    reward: float | None
    error: str | None = None
    timed_out: bool = False
    raw: float | None = None


Grader = Callable[[GradeJob], Any]
"""Returns a number, a bool, None (do not train on it), a mapping that `reward.key` picks from, or a Score."""


def read_score(value: object, *, key: str | None, name: str) -> Score:
    """Check what a grader returned.

    Args:
        value: see `Grader`; NumPy scalars count as numbers.
        key: `reward.key`, the entry to use of a mapping.
        name: the sample, for messages.

    Raises:
        RewardError: no such key, or not a finite number; names key and sample.
    """
    if isinstance(value, Score):
        raw = None if value.raw is None else _number(value.raw, "the raw score", name)
        return Score(None if value.reward is None else _number(value.reward, "the reward", name), raw)
    what = "the reward"
    if isinstance(value, Mapping):
        value, what = _pick(value, key, name), f"reward {key!r}"
    if value is None:
        return Score(None)
    number = _number(value, what, name)
    return Score(number, number)


def _pick(value: Mapping[Any, Any], key: str | None, name: str) -> Any:
    held = ", ".join(repr(k) for k in value) or "nothing"
    if key is None:
        raise RewardError(f"the grader returned a mapping that holds {held}", where=name, fix="name the entry with reward.key")
    if key not in value:
        raise RewardError(f"the grader returned no {key!r}; it holds {held}", where=name, fix="correct reward.key")
    return value[key]


def _number(value: object, what: str, name: str) -> float:
    if inspect.isawaitable(value):
        raise RewardError("the grader is a coroutine function", where=name, fix="make it a plain function")
    plain = _plain(value)
    if not isinstance(plain, Real):
        raise RewardError(f"{what} is not a number but {type(value).__name__} {str(value)[:80]!r}", where=name)
    number = float(plain)
    if not math.isfinite(number):
        raise RewardError(f"{what} is {number}", where=name)
    return number


def _plain(value: object) -> object:
    """A NumPy or torch scalar as a Python number; everything else as it is."""
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        return value.item()  # type: ignore[attr-defined]
    return value
