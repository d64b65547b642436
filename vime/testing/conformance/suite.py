"""The class that a plugin's test derives from. Needs no pytest to be imported."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from vime.errors import VimeError
from vime.testing.conformance.machine import Machine, plain_host, real_hardware
from vime.testing.conformance.registry import Outcome, Status, every_check, run_check
from vime.testing.conformance.subject import Subject, load_subject


class PlatformConformance:
    """Derive a class named `Test…`, name the platform and its machines; pytest makes one test per check.

    Checks that cannot run here are skipped with their reason; those that need hardware run with `--device`, which also
    adds this machine to the machines.
    """

    platform: ClassVar[str] = ""
    """The entry-point name, loaded by real discovery and allowed by name."""

    machines: ClassVar[tuple[Machine, ...]] = ()
    """The first usable one is placed in the requests that only one machine is needed for."""

    foreign: ClassVar[tuple[Machine, ...] | None] = None
    """Machines of others, on which the probe must say no; None is the plain host of the test (not with `--device`)."""

    _subject: ClassVar[Subject | VimeError | None] = None
    _folder: ClassVar[Any] = None

    @classmethod
    def make_subject(cls, *, device: bool, folder: Path) -> Subject:
        """The platform with its machines. Raises PluginError where it does not load."""
        machines = (*cls.machines, real_hardware()) if device else cls.machines
        if (foreign := cls.foreign) is None:
            foreign = () if device else (plain_host(),)
        return load_subject(cls.platform, machines=machines, foreign=foreign, device=device, folder=folder)

    @classmethod
    def setup_class(cls) -> None:
        cls._folder = tempfile.TemporaryDirectory(prefix="vime-conformance-")
        cls._subject = None

    @classmethod
    def teardown_class(cls) -> None:
        cls._subject = None
        cls._folder.cleanup()

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """One test per check, named by its id and title."""
        if "conformance_check" in metafunc.fixturenames:
            checks = every_check()
            metafunc.parametrize("conformance_check", checks, ids=[f"{c.id}-{c.title.replace(' ', '-')}" for c in checks])

    def test_contract(self, conformance_check: Any, request: Any, record_property: Any) -> None:
        import pytest

        subject = self._loaded(device=bool(request.config.getoption("--device", default=False)))
        if isinstance(subject, VimeError):
            record_property(PROPERTY, f"{self.platform}: {Status.FAILED}")
            pytest.fail(f"platform {self.platform!r} does not load: {subject}", pytrace=False)
        report(run_check(conformance_check, subject), self.platform, record_property)

    @classmethod
    def _loaded(cls, *, device: bool) -> Subject | VimeError:
        if cls._subject is None:
            try:
                cls._subject = cls.make_subject(device=device, folder=Path(cls._folder.name))
            except VimeError as error:
                cls._subject = error
        return cls._subject


PROPERTY = "vime_conformance"
"""Name of the test property that the summary counts."""


def report(outcome: Outcome, platform: str, record: Callable[[str, object], None]) -> None:
    """End a pytest test as the check has ended."""
    import pytest

    record(PROPERTY, f"{platform}: {outcome.status}")
    if outcome.status is Status.FAILED:
        pytest.fail(f"{outcome.id} {outcome.title}: {outcome.what}\n  fix: {outcome.fix}", pytrace=False)
    if outcome.status is Status.NOT_RUN:
        pytest.skip(f"{outcome.id} not run: {outcome.what}")
    if outcome.what:
        print(f"{outcome.id} {outcome.what}")  # pytest shows it with -rP
