"""pytest options and summary of the conformance kit (entry point `pytest11: vime`). Imports nothing heavy when pytest starts.

pytest tests/test_conformance.py              what can be checked without the hardware
pytest tests/test_conformance.py --device     also what needs it, on this machine
pytest --vime-platform NAME                   an installed platform on this machine, without a test file
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from vime.testing.conformance import Check, Subject

PROPERTY = "vime_conformance"
_TITLE = "vime conformance"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("vime", "conformance of vime platform plugins")
    group.addoption("--device", action="store_true", help="the platform's hardware is here: run the checks that need it")
    group.addoption(
        "--vime-platform",
        action="append",
        default=[],
        metavar="NAME",
        help="check an installed platform on this machine; without paths nothing else is collected (repeatable)",
    )


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    """With `--vime-platform` and no path, the project's own tests are not wanted."""
    alone = config.getoption("--vime-platform") and config.args_source is not pytest.Config.ArgsSource.ARGS
    return True if alone else None


def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    for name in config.getoption("--vime-platform") or ():
        collector: PlatformCollector = PlatformCollector.from_parent(session, name=f"vime-platform-{name}", platform=name)
        items.extend(collector.collect())


class PlatformCollector(pytest.Collector):
    """The checks of one installed platform as tests."""

    def __init__(self, *, platform: str, **named: Any) -> None:
        super().__init__(**named)
        self.platform = platform
        self._subject: Subject | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def collect(self) -> list[pytest.Item]:
        from vime.testing.conformance import every_check

        return [CheckItem.from_parent(self, name=f"{check.id}-{slug(check.title)}", check=check) for check in every_check()]

    def subject(self) -> Subject:
        """Loaded once. Raises PluginError where the platform does not load."""
        from vime.testing.conformance.here import subject_here

        if self._subject is None:
            self._folder = tempfile.TemporaryDirectory(prefix="vime-conformance-")
            device = bool(self.config.getoption("--device"))
            self._subject = subject_here(self.platform, device=device, folder=Path(self._folder.name))
        return self._subject


class CheckItem(pytest.Item):
    """One check of one platform."""

    parent: PlatformCollector

    def __init__(self, *, check: Check, **named: Any) -> None:
        super().__init__(**named)
        self._check = check

    def runtest(self) -> None:
        from vime.testing.conformance import run_check
        from vime.testing.conformance.suite import report

        platform = self.parent.platform
        outcome = run_check(self._check, self.parent.subject())
        report(outcome, platform, lambda name, value: self.user_properties.append((name, value)))

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> str:
        return str(excinfo.value)

    def reportinfo(self) -> tuple[Path, int | None, str]:
        return Path(self.parent.platform), None, f"{self.parent.platform} {self.name}"


def slug(title: str) -> str:
    """A title as part of a test's name."""
    return title.replace(" ", "-")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """One line per platform: how its checks ended."""
    lines = list(summary(report for reports in terminalreporter.stats.values() for report in reports))
    if lines:
        terminalreporter.section(_TITLE)
    for line in lines:
        terminalreporter.write_line(line)


def summary(reports: Any) -> Iterator[str]:
    """`conformance NAME: 30 passed, 1 failed, 3 not run`, in the order in which platforms were first met."""
    counts: dict[str, Counter[str]] = {}
    for report in reports:
        if getattr(report, "when", None) != "call":
            continue
        for name, value in getattr(report, "user_properties", ()):
            if name == PROPERTY:
                platform, _, status = str(value).partition(": ")
                counts.setdefault(platform, Counter())[status] += 1
    for platform, ended in counts.items():
        yield f"conformance {platform}: " + ", ".join(f"{ended[s]} {s}" for s in ("passed", "failed", "not run"))
