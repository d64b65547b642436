"""`vime bench`: its words, and that a name's module alone is imported."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from vime.cli import bench
from vime.cli.main import main

Vime = Callable[..., Any]


def test_the_overview_lists_every_benchmark(vime: Vime) -> None:
    done = vime("bench", "--help")
    assert done.returncode == 0
    assert all(f"  {name} " in done.stdout and about in done.stdout for name, about in bench.BENCHES.items())


@pytest.mark.parametrize("name", bench.BENCHES)
def test_each_lists_its_words_without_heavy_imports(vime: Vime, name: str) -> None:
    done = vime("bench", name, "--help")
    assert done.returncode == 0, done.stderr
    for word in ("--platform", "--shape", "--model", "--out", "--limit", "--again"):
        assert word in done.stdout


@pytest.mark.parametrize("words", [["nothing"], [], ["sleep", "--shape", "huge"], ["sleep", "--shape", "0.6b", "--model", "x"]])
def test_words_that_mean_nothing_are_refused(words: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", *words])
    assert ended.value.code == 2


@pytest.mark.parametrize("name", ["sync", "sleep", "rollout"])
def test_a_platform_that_is_not_there_is_said(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", name, "--platform", "nowhere", "--out", str(tmp_path)]) == 1
    assert "nowhere" in capsys.readouterr().err


@pytest.mark.parametrize("code", [0, 1])
def test_its_exit_code_is_the_benchmarks(code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[Any] = []

    def run(args: Any) -> int:
        seen.append(args)
        return code

    module = ModuleType("planted")
    module.__dict__.update(add_arguments=lambda parser: parser.add_argument("--own", type=int), run=run)
    monkeypatch.setattr(bench, "_module", lambda name: module)
    assert main(["bench", "train", "--own", "3", "--out", str(tmp_path), "--limit", "9"]) == code
    assert (seen[0].own, seen[0].out, seen[0].limit, seen[0].shape, seen[0].model) == (3, tmp_path, 9.0, "tiny", None)
