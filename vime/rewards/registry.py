"""Graders by name, or by `module:callable`."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable
from typing import Any

from vime.errors import RewardError
from vime.rewards.values import Grader

GRADERS = {
    "exact": "vime.rewards.exact:grade",
    "gsm8k": "vime.rewards.gsm8k:grade",
    "math": "vime.rewards.math:grade",
    "reasoning_gym": "vime.rewards.reasoning_gym:grade",
}


def check_grader(kind: str) -> str:
    """The `module:callable` of a grader; imports nothing.

    Raises:
        RewardError: neither a known name nor of that form; names the known graders.
    """
    if kind in GRADERS:
        return GRADERS[kind]
    module, colon, attribute = kind.partition(":")
    if colon and attribute.isidentifier() and all(piece.isidentifier() for piece in module.split(".")):
        return kind
    near = difflib.get_close_matches(kind, GRADERS, n=1)
    known = ", ".join(sorted(GRADERS))
    raise RewardError(
        f"unknown grader {kind!r}; known are {known}",
        fix=f"did you mean {near[0]}?" if near else "use one of these, or `module:callable` for your own",
    )


def load_grader(kind: str) -> Grader:
    """Import a grader, and let it warm up where it has a `warm_up()` beside it.

    Raises:
        RewardError: unknown, not importable or not callable.
    """
    module_name, _, attribute = check_grader(kind).partition(":")
    try:
        module = importlib.import_module(module_name)
        warm_up: Callable[[], None] = getattr(module, "warm_up", _nothing)
        warm_up()
    except ImportError as error:
        fix = "pip install 'vime[tasks]'" if kind in GRADERS else "install its package, or put its folder on PYTHONPATH"
        raise RewardError(f"grader {kind!r}: {error}", fix=fix) from error
    grader: Any = getattr(module, attribute, None)
    if not callable(grader):
        raise RewardError(f"grader {kind!r}: {module_name} has no callable {attribute!r}")
    return grader


def _nothing() -> None: ...
