"""A telling tenth of `make parity`, and that a trainer which runs twice does the same bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from vime.benchmarks import parity_table
from vime.benchmarks.comparing import axes_in
from vime.benchmarks.parity_table import MODELS, Layout, trained
from vime.data.tiny_model import save_tiny

TENTH = [
    *("dense tp2-pp2-vpp2", "dense tp2-cp2 sequence_parallel", "dense dp2 updates_per_step"),
    *("experts pp2-cp2-ep2", "experts tp2-etp2", "latent cp2"),
]


def test_layouts_train_as_one_process(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every axis is in one of them. A bound that no sum in another order can keep shows that a difference would be told."""
    chosen = [one for one in parity_table.layouts() if any(f"{one.model} {one.name}".startswith(t) for t in TENTH)]
    assert set().union(*(one.axes for one in chosen)) == {"tp", "pp", "vpp", "cp", "dp", "ep", "etp"}
    assert parity_table.main(["--only", *TENTH]) == 0
    *lines, last = capsys.readouterr().out.strip().splitlines()
    assert len(lines) == len(chosen)
    assert last.startswith(f"parity: {len(chosen)} layouts, worst relative difference ")
    monkeypatch.setattr(parity_table, "BOUNDS", {"float32": 0.0})
    assert parity_table.main(["--only", "dense cp2 recompute"]) == 1
    assert "BEYOND" in capsys.readouterr().out


def test_the_same_seed_gives_the_same_bits(tmp_path: Path) -> None:
    """Three steps over two ranks that reduce while they compute: all metrics, which hang on every weight, are equal."""
    save_tiny(tmp_path / "experts", MODELS["experts"], seed=1)
    layout = Layout("experts", axes_in("pp2-dp2-ep2"), {"overlap": True})
    assert trained(layout, tmp_path) == trained(layout, tmp_path)
