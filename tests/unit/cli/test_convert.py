"""`vime convert`: what it says of its words before it imports anything heavy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest


def test_help_needs_nothing_heavy(vime):
    done = vime("convert", "--help")
    assert done.returncode == 0
    assert "torch_dist" in done.stdout


@pytest.mark.parametrize(
    ("source", "words", "told"),
    [
        ("nothing", (), "neither a Hugging Face folder nor a torch_dist checkpoint"),
        ("checkpoint", (), "a checkpoint needs --model"),
        ("folder", ("--model", "folder"), "needs no --model"),
    ],
)
def test_words_that_do_not_fit_are_refused(vime, tmp_path: Path, source: str, words: tuple[str, ...], told: str):
    for name, file in (("checkpoint", "metadata.json"), ("folder", "config.json")):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text(json.dumps({}))
    paths = [str(tmp_path / word) if word == "folder" else word for word in words]
    done = vime("convert", str(tmp_path / source), "--out", str(tmp_path / "out"), *paths)
    assert done.returncode == 1
    assert told in done.stderr
    assert not (tmp_path / "out").exists()
