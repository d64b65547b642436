"""The registry of checks and their runner. A check is a function of a subject that raises `ConformanceFailure`."""

from __future__ import annotations

import importlib
import pkgutil
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, NoReturn

from vime.errors import VimeError

if TYPE_CHECKING:
    from vime.testing.conformance.subject import Subject

Run = Callable[["Subject"], str | None]
"""A check; a text that it returns says what it left out."""


class ConformanceFailure(AssertionError):
    """A plugin does not keep what a check asks: what is wrong, and the next step. `id` is the check's."""

    def __init__(self, what: str, fix: str, id: str = "") -> None:
        super().__init__(what, fix, id)
        self.what, self.fix, self.id = what, fix, id

    def __str__(self) -> str:
        return f"{self.id + ': ' if self.id else ''}{self.what}\n  fix: {self.fix}"


class NotRun(Exception):
    """A check cannot run here, or has nothing to look at; the text says why."""


class Status(StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    NOT_RUN = "not run"


@dataclass(frozen=True, slots=True)
class Check:
    """One registered check. `hooks` are those whose answers it looks at, `asks` is what it demands, for people."""

    id: str
    title: str
    asks: str
    hooks: tuple[str, ...]
    run: Run


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a check ended. `what` says why it failed, was not run, or what it left out."""

    id: str
    title: str
    status: Status
    what: str = ""
    fix: str = ""
    seconds: float = 0.0


_checks: dict[str, Check] = {}
CHECKS: Mapping[str, Check] = MappingProxyType(_checks)
"""The checks imported so far, by id; `every_check` imports all."""


def check(id: str, *, hooks: Iterable[str] = (), title: str) -> Callable[[Run], Run]:
    """Register a function as a check; its docstring is what it demands. Raises ValueError for an id given twice."""

    def register(run: Run) -> Run:
        if id in _checks and _checks[id].run.__module__ != run.__module__:
            raise ValueError(f"check {id} is registered twice: {_checks[id].title!r} and {title!r}")
        asks = " ".join((run.__doc__ or "").split())
        _checks[id] = Check(id, title, asks, tuple(hooks), run)
        return run

    return register


def every_check() -> tuple[Check, ...]:
    """All checks of the kit, sorted by id."""
    package = importlib.import_module("vime.testing.conformance.checks")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")
    return tuple(_checks[id] for id in sorted(_checks))


def fail(what: str, fix: str) -> NoReturn:
    """Fail the check that runs."""
    raise ConformanceFailure(what, fix)


def require(condition: object, what: str, fix: str) -> None:
    """Fail the check that runs unless the condition holds."""
    if not condition:
        fail(what, fix)


def run_check(check: Check, subject: Subject) -> Outcome:
    """Run one check. Whatever it raises becomes its outcome."""
    start = time.perf_counter()

    def ended(status: Status, what: str = "", fix: str = "") -> Outcome:
        return Outcome(check.id, check.title, status, what, fix, time.perf_counter() - start)

    try:
        left_out = check.run(subject)
    except NotRun as reason:
        return ended(Status.NOT_RUN, str(reason))
    except ConformanceFailure as failure:
        return ended(Status.FAILED, failure.what, failure.fix)
    except VimeError as error:
        place = f"{error.where}: " if error.where else ""
        return ended(Status.FAILED, f"{place}{type(error).__name__}: {error.what}", error.fix or "mend the plugin")
    except (Exception, SystemExit) as error:  # noqa: BLE001  a plugin may raise anything; that is an outcome
        return ended(Status.FAILED, f"{type(error).__name__}: {error}", "let the hook answer, or raise PluginError with a fix")
    return ended(Status.PASSED, left_out or "")


def run_checks(subject: Subject, only: Iterable[str] | None = None) -> list[Outcome]:
    """Run all checks, or those with the ids of `only`, in order of their ids. Raises ValueError for an unknown id."""
    checks = every_check()
    if only is not None:
        wanted = set(only)
        if unknown := wanted - {check.id for check in checks}:
            raise ValueError(f"there are no checks {', '.join(sorted(unknown))}")
        checks = tuple(check for check in checks if check.id in wanted)
    return [run_check(check, subject) for check in checks]
