"""`vime topology`: list, show, schema, check."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from vime.cli.main import main
from vime.topology.load import shipped_names, shipped_text

Vime = Callable[..., "Done"]


class Done(NamedTuple):
    """What a command in this process did."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def vime(capsys: pytest.CaptureFixture[str]) -> Vime:
    """`vime(*words)`: run a command in this process."""

    def run(*words: str) -> Done:
        return Done(main(list(words)), *capsys.readouterr())

    return run


def test_list_and_show(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["topology", "list"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert [line.split(" ")[0] for line in listed] == list(shipped_names())
    assert main(["topology", "show", "cpu-train"]) == 0
    assert capsys.readouterr().out == shipped_text("cpu-train")
    assert main(["topology", "show", "cpu-trane"]) == 1
    assert "did you mean `cpu-train`?" in capsys.readouterr().err


def test_schema_describes_pools_and_roles(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["topology", "schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert set(schema["required"]) == {"pools", "roles"}
    assert "from" in schema["$defs"]["Sync"]["properties"]


def test_check(vime: Vime, tmp_path: Path) -> None:
    good = tmp_path / "t.yaml"
    good.write_text(shipped_text("cpu-disaggregated"))
    done = vime("topology", "check", str(good))
    assert done.returncode == 0
    assert "rollout: rollout on pool host, 2 devices (2 engines x 1)" in done.stdout
    good.write_text("pools: {p: {}}\nroles:\n  a: {kind: train, devices: 3, parallel: {tp: 2}}\n  b: {kind: trane}\n")
    done = vime("topology", "check", str(good))
    assert done.returncode == 1
    assert "t.yaml:4: E103" in done.stdout
