"""`vime bench train --against transformers` with both sides real."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest

from vime.benchmarks.against import LOSS_LIMIT
from vime.cli.main import main


def is_tracker(process: psutil.Process) -> bool:
    """Python's own process beside spawned ones, which ends with this one."""
    return "resource_tracker" in " ".join(process.cmdline())


def test_both_sides_do_the_same_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = set(psutil.Process().children(recursive=True))
    sizes = ["--shapes", "2m", "--tokens", "128", "--length", "16", "--micro-batches", "2", "--pairs", "1"]
    folders = ["--out", str(tmp_path), "--models", str(tmp_path)]
    assert main(["bench", "train", "--against", "transformers", *sizes, *folders]) == 0
    part = json.loads((tmp_path / "bench-train-against-transformers.json").read_text())["parts"]["2m"]
    for found in part["batches"].values():
        losses = [step["loss"] for step in found["steps"]["vime"]]
        assert min(map(abs, losses)) > 1e-3
        assert losses[0] != losses[1]
        assert found["largest_relative_loss_difference"] <= LOSS_LIMIT
        assert found["ratio"] > 0
    assert capsys.readouterr().out.count("vime / transformers: ") == len(part["batches"]) == 2
    left = set(psutil.Process().children(recursive=True)) - before
    assert not [process for process in left if not is_tracker(process)]
