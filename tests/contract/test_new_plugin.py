"""The project that `vime plugins new` writes installs, loads and passes the conformance kit before a line of it is changed."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from vime.cli.plugins_new import write_project

VIME = ("-m", "vime.cli.main")

Python = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("new") / "project"
    write_project(folder, name="gizmo", distribution="gizmo-vime", module="gizmo_vime")
    return folder


@pytest.fixture(scope="module")
def gizmo_site(project: Path, install_project: Callable[[Path], Path]) -> Path:
    return install_project(project)


def test_it_is_available_once_it_is_named(python: Python, gizmo_site: Path) -> None:
    done = python(*VIME, "plugins", "list", "--json", site=gizmo_site, env={"VIME_PLUGINS": "gizmo"})
    row = {row["name"]: row for row in json.loads(done.stdout)["plugins"]}["gizmo"]
    assert (row["status"], row["distribution"], row["version"]) == ("available", "gizmo-vime", "0.1.0")


def test_it_passes_the_kit(python: Python, gizmo_site: Path, project: Path) -> None:
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(project), str(project / "tests")]
    done = python(*words, site=gizmo_site)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


def test_it_finds_the_devices_of_a_file_and_no_others(python: Python, gizmo_site: Path) -> None:
    machine = gizmo_site / "gizmo_vime" / "testing" / "machine.json"
    words = [*VIME, "doctor", "--platform", "gizmo"]
    found = python(*words, site=gizmo_site, env={"GIZMO_DEVICES": str(machine)})
    assert "2 devices, all in order" in found.stdout
    absent = python(*words, site=gizmo_site)
    assert absent.returncode == 1
    assert "this machine has no gizmo driver" in absent.stdout
