"""Which platform vLLM resolved, and what it swallowed on the way. Runs in the engine's own processes.

vLLM asks platform plugins and takes one that raises for one that says no, so a broken plugin shows only as the wrong
platform. `check_platform` compares with what vime expects (`VIME_EXPECTED_PLATFORM`) before a model is loaded.
`python -m vime.weights.vllm_platform` prints the same as JSON, for diagnosis.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from vime.errors import EngineError

GROUP = "vllm.platform_plugins"
EXPECTED_ENV = "VIME_EXPECTED_PLATFORM"
PLUGINS_ENV = "VLLM_PLUGINS"


@dataclass(frozen=True, slots=True)
class PluginAnswer:
    """What one of vLLM's platform plugins says: a class, None for no, or the exception that vLLM swallows.

    `admitted` is false where `VLLM_PLUGINS` keeps it from being asked at all.
    """

    name: str
    distribution: str
    admitted: bool
    platform: str | None = None
    error: str | None = None

    def __str__(self) -> str:
        said = f"raised {self.error}" if self.error else (f"gives {self.platform}" if self.platform else "says no")
        return f"platform plugin {self.name} ({self.distribution}) {said if self.admitted else 'is not admitted'}"


def ask_plugins() -> tuple[PluginAnswer, ...]:
    """Ask vLLM's platform plugins again, each on its own."""
    return tuple(_ask(point) for point in importlib.metadata.entry_points(group=GROUP))


def _ask(point: importlib.metadata.EntryPoint) -> PluginAnswer:
    owner = f"{point.dist.name} {point.dist.version}" if point.dist else "unknown distribution"
    admitted = os.environ.get(PLUGINS_ENV)
    if admitted is not None and point.name not in [name.strip() for name in admitted.split(",")]:
        return PluginAnswer(point.name, owner, admitted=False)
    try:
        answer = point.load()()
    except (Exception, SystemExit) as error:  # noqa: BLE001  the reason that vLLM swallowed is what is asked for
        return PluginAnswer(point.name, owner, admitted=True, error=f"{type(error).__name__}: {error}")
    return PluginAnswer(point.name, owner, admitted=True, platform=None if answer is None else str(answer))


def class_names(resolved: type) -> tuple[str, ...]:
    """Qualified names of a class and its bases: a special platform counts as the general one."""
    return tuple(f"{c.__module__}.{c.__qualname__}" for c in resolved.__mro__)


def resolved_platform() -> type:
    """The class that vLLM resolved in this process. Whatever vLLM raises travels."""
    from vllm.platforms import current_platform

    return type(current_platform)


def check_platform(resolved: type | None = None) -> None:
    """Refuse to go on where vLLM resolved another platform than the expected one.

    Raises EngineError with both classes, `VLLM_PLUGINS` and what every platform plugin says when it is asked again.
    """
    expected = os.environ.get(EXPECTED_ENV)
    if not expected:
        return
    found = resolved if resolved is not None else resolved_platform()
    if not is_expected(expected, found):
        raise EngineError(mismatch(expected, class_names(found)[0], ask_plugins()), fix=FIX)


def is_expected(expected: str, resolved: type) -> bool:
    """Whether a class is the expected one or derives from it. The expected name may be another name for a class."""
    if expected in class_names(resolved):
        return True
    module, _, name = expected.rpartition(".")
    try:
        named = getattr(importlib.import_module(module), name, None)
    except ImportError:
        return False
    return isinstance(named, type) and issubclass(resolved, named)


FIX = "mend or install what vLLM's platform needs; `vime doctor --engine` shows the same without a run"


def mismatch(expected: str, resolved: str, answers: tuple[PluginAnswer, ...]) -> str:
    """The mismatch in words, one indented line a plugin."""
    allowed = os.environ.get(PLUGINS_ENV)
    listed = "unset: every plugin" if allowed is None else repr(allowed)
    lines = [f"vime expects vLLM's platform {expected}, vLLM resolved {resolved} ({PLUGINS_ENV} {listed})"]
    return "\n".join([*lines, *_answer_lines(answers)])


def _answer_lines(answers: tuple[PluginAnswer, ...]) -> Iterator[str]:
    yield from (f"  {' '.join(str(answer).split())}" for answer in answers)
    if not answers:
        yield "  no distribution has a platform plugin for vLLM: it looked at its built-in platforms only"


def main() -> int:
    """Print one JSON line: expected, resolved, its bases, what plugins say, and the error where vLLM itself failed."""
    expected = os.environ.get(EXPECTED_ENV)
    names: tuple[str, ...] = ()
    error = None
    as_expected = not expected
    try:
        resolved = resolved_platform()
        names, as_expected = class_names(resolved), not expected or is_expected(expected, resolved)
    except Exception as failure:  # noqa: BLE001  reported as a value
        error = f"{type(failure).__name__}: {failure}"
    answers = ask_plugins()
    told = {
        "expected": expected,
        "resolved": names[0] if names else None,
        "classes": names,
        "as_expected": as_expected,
        "plugins": [asdict(answer) for answer in answers],
        "error": error,
    }
    sys.stdout.flush()
    print("\n" + json.dumps(told))
    return 0


if __name__ == "__main__":
    sys.exit(main())
