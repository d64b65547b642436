"""Routing replay over real ranks: with prescribed experts every layout trains as one process does, and experts matter."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from test_trainer_layouts import check_same, launch

from vime.data.tiny_model import TinyShape, save_tiny

DIFFERING = "train/routing_replay_differing"
SIZES: dict[str, Any] = {"vocab_size": 264, "hidden": 32, "head_dim": 16, "ffn": 48, "layers": 4, "tied": False}
MODELS = {
    "qwen3_moe": TinyShape(**SIZES, init_std=0.1, experts=8),
    "glm4_moe": TinyShape(**SIZES, family="glm4_moe", init_std=0.1, experts=8),
}
EXPERT_LAYERS = {"qwen3_moe": 4, "glm4_moe": 3}
"""The first layer of glm4_moe has no experts, so neither has the first piece of a virtual pipeline."""
TWICE = {"updates": 2, "old_log_probs": "recompute"}
"""Two updates a step, the second after a pass for old log-probs."""
QUICK = {("glm4_moe", "tp-ep"), ("glm4_moe", "pp-vpp-full")}
LAYOUTS: dict[str, dict[str, Any]] = {
    "ep": {"parallel": {"dp": 2, "ep": 2}},
    "ep-idle": {"parallel": {"dp": 2, "ep": 2}, "idle_rank": True, "recompute": "full"},
    "tp-ep": {"parallel": {"tp": 2, "ep": 2}},
    "tp-etp": {"parallel": {"tp": 2, "etp": 2}, "recompute": "full"},
    "cp": {"parallel": {"cp": 2}},
    "tp-cp-ep": {"parallel": {"tp": 2, "cp": 2, "ep": 4}},
    "selective": {"parallel": {"tp": 1}, "recompute": "selective", "megatron": {"recompute_modules": ["moe"]}},
    "pp-full": {"parallel": {"pp": 2}, "parts": 5, "recompute": "full"},
    "pp-vpp": {"parallel": {"pp": 2, "vpp": 2}, "parts": 4},
    "pp-vpp-full": {"parallel": {"pp": 2, "vpp": 2}, "parts": 4, "recompute": "full"},
    "pp-cp-ep-full": {"parallel": {"pp": 2, "cp": 2, "ep": 2}, "parts": 3, "recompute": "full"},
}


def replaying(family: str, **job: Any) -> dict[str, Any]:
    """Experts by chance."""
    return {"routed": {"layers": EXPERT_LAYERS[family], "experts": 8}, "routing_replay": "rollout", **TWICE, **job}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """By family: its folder, and what one process makes of it in three steps."""

    @cache
    def of(family: str) -> tuple[Path, dict[str, Any]]:
        folder = tmp_path_factory.mktemp(family)
        save_tiny(folder / "model", MODELS[family], seed=1)
        (result,) = launch(folder / "run", folder / "model", **replaying(family, parallel={"tp": 1}))
        return folder / "model", result

    return of


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        pytest.param(family, layout, marks=() if (family, layout) in QUICK else pytest.mark.slow)
        for family in MODELS
        for layout in LAYOUTS
    ],
)
def test_every_layout_takes_the_given_experts(family: str, layout: str, alone, tmp_path: Path) -> None:
    """All metrics of three steps in float32, to five digits; nearly all of the given experts are not the routers' own."""
    model, expected = alone(family)
    results = launch(tmp_path / "run", model, **replaying(family, **LAYOUTS[layout]))
    check_same(results, expected)
    assert all(row[DIFFERING] > 0.8 for row in results[0]["metrics"])


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["ep", "tp-ep", "cp", "pp-full", "pp-vpp-full"])
def test_every_layout_takes_the_routers_own_record(layout: str, alone, tmp_path: Path) -> None:
    """Siblings that share a prompt are counted once, so the counted share depends on who packs them."""
    model, _ = alone("qwen3_moe")
    results = []
    for name, job in {"one": {"parallel": {"tp": 1}}, "run": LAYOUTS[layout]}.items():
        results.append(launch(tmp_path / name, model, routing_replay="trainer", **TWICE, **job))
    (one,), ranks = results
    for ours, theirs in zip(ranks[0]["metrics"], one["metrics"], strict=True):
        assert 0.0 < ours[DIFFERING] < 0.2
        for name in ("train/loss", "train/grad_norm", "train/ppo_kl"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-5, abs=2e-6), name


@pytest.mark.slow
def test_without_replay_or_with_other_experts_the_numbers_are_others(alone, tmp_path: Path) -> None:
    """What the comparisons of layouts would see if some rank took none, or wrong ones."""
    model, expected = alone("qwen3_moe")
    (none,) = launch(tmp_path / "none", model, **TWICE, parallel={"tp": 1})
    other = replaying("qwen3_moe", parallel={"tp": 1}) | {"routed": {"layers": 4, "experts": 7}}
    (others,) = launch(tmp_path / "other", model, **other)
    for found in (none, others):
        for ours, theirs in zip(found["metrics"], expected["metrics"], strict=True):
            assert ours["train/grad_norm"] != pytest.approx(theirs["train/grad_norm"], rel=1e-3)
