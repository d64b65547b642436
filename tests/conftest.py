"""Installs projects as a user would, but into folders of their own: the environment of the tests stays as it is."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ACME = Path(__file__).parent / "contract" / "acme_accelerator"

InstallProject = Callable[[Path], Path]


@pytest.fixture(scope="session")
def install_project(tmp_path_factory: pytest.TempPathFactory) -> InstallProject:
    """`install_project(folder)`: build its wheel and install that -> a folder for PYTHONPATH."""

    def install(project: Path) -> Path:
        work = tmp_path_factory.mktemp("project")
        shutil.copytree(project, work / "source", ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__"))
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
        build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(work), str(work / "source")]
        subprocess.run(build, check=True, capture_output=True)
        (wheel,) = work.glob("*.whl")
        place = [*pip, "install", "--no-deps", "--no-index", "--target", str(work / "site"), str(wheel)]
        subprocess.run(place, check=True, capture_output=True)
        return work / "site"

    return install


@pytest.fixture(scope="session")
def acme_site(install_project: InstallProject) -> Path:
    """The folder in which the third-party plugin `acme` is installed."""
    return install_project(ACME)
