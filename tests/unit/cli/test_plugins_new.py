from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import pytest

FILES = {
    "README.md",
    "pyproject.toml",
    "src/gizmo_vime/__init__.py",
    "src/gizmo_vime/devices.json",
    "src/gizmo_vime/doctor.py",
    "src/gizmo_vime/engine.py",
    "src/gizmo_vime/inventory.py",
    "src/gizmo_vime/plugin.py",
    "src/gizmo_vime/process.py",
    "src/gizmo_vime/testing/__init__.py",
    "src/gizmo_vime/testing/machine.json",
    "src/gizmo_vime/testing/machines.py",
    "src/gizmo_vime/trainer.py",
    "tests/test_conformance.py",
}


def files(folder: Path) -> dict[str, str]:
    return {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_it_writes_a_whole_project(vime, tmp_path) -> None:
    done = vime("plugins", "new", "gizmo", "--dir", str(tmp_path / "project"))
    assert done.returncode == 0, done.stderr
    assert "VIME_PLUGINS=gizmo vime plugins list" in done.stdout
    written = files(tmp_path / "project")
    assert set(written) == FILES
    for name, text in written.items():
        assert "$" not in text.replace("$ ", ""), name
        if name.endswith(".py"):
            ast.parse(text)
    project = tomllib.loads(written["pyproject.toml"])["project"]
    assert project["name"] == "gizmo-vime"
    assert project["entry-points"] == {"vime.plugins": {"gizmo": "gizmo_vime.plugin"}}
    assert project["dependencies"] == ["vime>=0.1,<0.2"]
    assert project["keywords"] == ["vime-hooks>=1.2,<2"]
    assert 'PluginInfo("gizmo", parent="base")' in written["src/gizmo_vime/plugin.py"]


def test_what_must_be_filled_in_is_marked_where_it_is(vime, tmp_path) -> None:
    vime("plugins", "new", "gizmo", "--dir", str(tmp_path / "project"))
    marked = {name for name, text in files(tmp_path / "project").items() if "FILL IN" in text}
    assert {
        f"src/gizmo_vime/{name}" for name in ("devices.json", "engine.py", "inventory.py", "process.py", "trainer.py")
    } <= marked


def test_names_of_distribution_and_folder_can_be_chosen(vime, tmp_path) -> None:
    folder = tmp_path / "empty"
    folder.mkdir()
    done = vime("plugins", "new", "gizmo", "--distribution", "Gizmo-Accelerator", "--dir", str(folder))
    assert done.returncode == 0, done.stderr
    assert "src/gizmo_accelerator/plugin.py" in files(folder)
    assert 'name = "Gizmo-Accelerator"' in (folder / "pyproject.toml").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["Gizmo"], "'Gizmo' cannot be the name of a platform"),
        (["2gizmo"], "'2gizmo' cannot be the name of a platform"),
        (["giz-mo"], "use small letters, digits and underscores"),
        (["auto"], "the name 'auto' is reserved"),
        (["base"], "the name 'base' is reserved"),
        (["gizmo", "--distribution", "giz mo"], "'giz mo' cannot be the name of a distribution"),
    ],
)
def test_names_that_cannot_work_are_refused_and_nothing_is_written(vime, tmp_path, words, message) -> None:
    done = vime("plugins", "new", *words, "--dir", str(tmp_path / "project"))
    assert done.returncode == 1
    assert message in done.stderr
    assert not (tmp_path / "project").exists()


def test_a_folder_that_holds_something_is_left_alone(vime, tmp_path) -> None:
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "mine").write_text("work")
    done = vime("plugins", "new", "gizmo", "--dir", str(tmp_path / "project"))
    assert done.returncode == 1
    assert "there is something already" in done.stderr
    assert files(tmp_path / "project") == {"mine": "work"}
