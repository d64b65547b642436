"""Every family in several layouts: losses, gradient norms and weights are those of one process."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_trainer_layouts import check_same, launch

from vime.testing.tiny_models import FamilySizes, make_tiny

SMALL: FamilySizes = {"hidden": 32, "ffn": 32, "layers": 2, "init_std": 0.1, "max_positions": 64}
FAMILIES: dict[str, FamilySizes] = {
    "qwen2": {**SMALL, "tied": False, "head_dim": 8},
    "llama": SMALL,
    "glm4_moe": {**SMALL, "qk_norm": True},
    "deepseek_v3": {**SMALL, "kv_rank": 32, "q_rank": 32, "head_dim": 32},
}
VOCAB = 320
QUICK = {("qwen2", "tp"), ("glm4_moe", "dp-ep"), ("deepseek_v3", "tp-ep")}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp": {"parallel": {"tp": 2}},
    "pp": {"parallel": {"pp": 2}, "parts": 3},
    "dp": {"parallel": {"dp": 2}},
    "recompute": {"parallel": {"tp": 1}, "recompute": "full"},
    "dp-ep": {"parallel": {"dp": 2, "ep": 2}, "max_tokens": 16},
    "tp-ep": {"parallel": {"tp": 2, "ep": 2}},
    "tp-etp": {"parallel": {"tp": 2, "etp": 2}},
    "pp-dp-ep": {"parallel": {"pp": 2, "dp": 2, "ep": 2}},
    "cp": {"parallel": {"cp": 2}},
}
DENSE = ("tp", "pp", "dp", "recompute", "cp")


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """By family: its folder, and what one process makes of it in three steps."""

    @cache
    def of(family: str) -> tuple[Path, dict[str, Any]]:
        folder = tmp_path_factory.mktemp(family)
        make_tiny(folder / "model", family, **FAMILIES[family])
        (result,) = launch(folder / "run", folder / "model", vocab=VOCAB, parallel={"tp": 1})
        return folder / "model", result

    return of


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        pytest.param(family, layout, marks=() if (family, layout) in QUICK else pytest.mark.slow)
        for family, sizes in FAMILIES.items()
        for layout in (DENSE if family in ("qwen2", "llama") else LAYOUTS)
    ],
)
def test_a_family_trains_in_a_layout_as_in_one_process(family, layout, alone, tmp_path):
    model, reference = alone(family)
    saved = tmp_path / "saved"
    results = launch(tmp_path / "run", model, vocab=VOCAB, **LAYOUTS[layout], save_hf=str(saved))
    check_same(results, reference)
    assert load_file(saved / "model.safetensors").keys() == load_file(model / "model.safetensors").keys()


@pytest.mark.parametrize(
    ("family", "parallel"),
    [
        pytest.param("deepseek_v3", {"tp": 2, "ep": 2}, marks=pytest.mark.slow),
        pytest.param("glm4_moe", {"pp": 2, "dp": 2, "ep": 2}, marks=pytest.mark.slow),
    ],
)
def test_a_layout_hands_on_every_bit(family, parallel, alone, tmp_path):
    model, _ = alone(family)
    launch(tmp_path / "run", model, vocab=VOCAB, parallel=parallel, steps=0, save_hf=str(tmp_path / "saved"))
    before, after = (load_file(path / "model.safetensors") for path in (model, tmp_path / "saved"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.slow
def test_auxiliary_losses_are_the_same_in_a_layout(tmp_path):
    """Stages see the micro-batches of one process. Ranks of a tensor-parallel group see parts of them, and their packs have
    more padding, which counts: of these short packs a few tokens more.
    """
    model = make_tiny(tmp_path / "model", "glm4_moe", **FAMILIES["glm4_moe"])
    megatron = {"moe_aux_loss_coeff": 5.0, "moe_z_loss_coeff": 0.5, "moe_router_bias_update_rate": 0.01}
    job: dict[str, Any] = {"vocab": VOCAB, "megatron": megatron}
    (alone,) = launch(tmp_path / "alone", model, **job, parallel={"tp": 1})
    check_same(launch(tmp_path / "stages", model, **job, parallel={"pp": 2}), alone)
    split = launch(tmp_path / "split", model, **job, parallel={"tp": 2, "ep": 2})[0]
    (plain,) = launch(tmp_path / "plain", model, vocab=VOCAB, parallel={"tp": 1})
    norms = {name: r["metrics"][0]["train/grad_norm"] for name, r in (("alone", alone), ("split", split), ("plain", plain))}
    assert norms["split"] == pytest.approx(norms["alone"], rel=0.1), norms
    assert norms["plain"] < 0.5 * norms["alone"], norms


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "parallel"), [("qwen2", {"tp": 2, "pp": 2}), ("deepseek_v3", {"tp": 2, "ep": 2})], ids=["qwen2", "deepseek_v3"]
)
def test_a_checkpoint_of_several_ranks_becomes_a_folder(family, parallel, tmp_path):
    """By the command, which reads it with one rank."""
    model = make_tiny(tmp_path / "model", family, **FAMILIES[family])
    checkpoint, saved, out = (tmp_path / name for name in ("checkpoint", "saved", "out"))
    job = {"vocab": VOCAB, "parallel": parallel, "steps": 1, "save": str(checkpoint), "save_at": 1}
    launch(tmp_path / "run", model, **job, save_hf=str(saved))
    words = ["convert", str(checkpoint), "--model", str(model), "--out", str(out)]
    done = subprocess.run([sys.executable, "-m", "vime.cli.main", *words], capture_output=True, text=True, check=True)
    assert "100%" in done.stderr
    expected, found = (load_file(path / "model.safetensors") for path in (saved, out))
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
