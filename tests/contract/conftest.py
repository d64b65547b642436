"""Runs vime and pytest in processes of their own, with the packages of given folders installed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

# The third-party project beside these tests has tests of its own; they run where it is installed.
collect_ignore = ["acme_accelerator"]

Python = Callable[..., subprocess.CompletedProcess[str]]


WATCHER = """
import sys

def saw(event, arguments):
    if event == "import":
        with open({path!r}, "a") as file:
            file.write(arguments[0] + "\\n")

sys.addaudithook(saw)
"""


class Watch:
    """A folder for `site=`: every process that has it on its path, children included, writes down what it imports."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.site = folder
        self._path = folder / "imports.txt"
        (folder / "sitecustomize.py").write_text(WATCHER.format(path=str(self._path)))

    def imported(self) -> set[str]:
        return set(self._path.read_text().split())


@pytest.fixture
def watch(tmp_path: Path) -> Watch:
    return Watch(tmp_path / "watch")


@pytest.fixture
def python(tmp_path: Path) -> Python:
    """`python(*words, site=, env=)`: run Python in an empty folder, as a user without any choice of plugins."""

    def run(
        *words: str, site: Path | tuple[Path, ...] = (), env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        folder = tmp_path / "empty"
        folder.mkdir(exist_ok=True)
        sites = (site,) if isinstance(site, Path) else site
        chosen = {name: value for name, value in os.environ.items() if not name.startswith(("VIME_", "PYTEST_"))}
        own = {"PYTHONPATH": os.pathsep.join(map(str, sites)), "OMP_NUM_THREADS": "1"}
        return subprocess.run(
            [sys.executable, *words],
            cwd=folder,
            env={**chosen, **own, **(env or {})},
            capture_output=True,
            text=True,
            timeout=120,
        )

    return run
