"""Models written on the way: whole or not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from vime.data.disk import Retention
from vime.data.exports import begin_export, commit_export
from vime.errors import CheckpointError


def export(root: Path, step: int, *, text: str = "weights", keep: int | None = None) -> Path:
    partial = begin_export(root, step)
    (partial / "model.safetensors").write_text(text)
    return commit_export(partial, keep=Retention(keep))


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_an_export_appears_whole_under_its_step(tmp_path: Path) -> None:
    partial = begin_export(tmp_path, 4)
    assert names(tmp_path) == [partial.name]
    assert partial.name.startswith(".")
    (partial / "config.json").write_text("{}")
    path = commit_export(partial, keep=Retention(None))
    assert path == tmp_path / "step-00000004"
    assert names(tmp_path) == ["step-00000004"]
    assert names(path) == ["config.json"]


@pytest.mark.parametrize(("keep", "expected"), [(None, [2, 4, 6, 8]), (1, [8]), (3, [4, 6, 8])])
def test_the_newest_stay(tmp_path: Path, keep: int | None, expected: list[int]) -> None:
    for step in (2, 4, 6, 8):
        export(tmp_path, step, keep=keep)
    assert [int(name[-2:]) for name in names(tmp_path)] == expected


def test_a_step_done_again_replaces_its_export_and_those_after_it(tmp_path: Path) -> None:
    """The name stays: somebody may have written it down."""
    for step in (2, 4, 6):
        export(tmp_path, step)
    begin_export(tmp_path, 8)
    (tmp_path / "mine").mkdir()
    export(tmp_path, 4, text="again")
    assert names(tmp_path) == ["mine", "step-00000002", "step-00000004"]
    assert (tmp_path / "step-00000004" / "model.safetensors").read_text() == "again"


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot write") as caught:
        begin_export(tmp_path / "file", 1)
    assert caught.value.where == str(tmp_path / "file")
