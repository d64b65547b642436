"""Sections of algorithms: what is refused with its line and what to write instead, and what each needs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vime.config import algorithms as sections
from vime.config.algorithms import (
    DistillSection,
    GrpoSection,
    KlSection,
    OverlongSection,
    PolicySection,
    PpoSection,
    RlooSection,
    SftSection,
    log_prob_passes,
    needs_of,
    skips_flat_groups,
)
from vime.config.corrections import CorrectionSection
from vime.config.load import LoadedConfig, dump_resolved, load_config
from vime.errors import ConfigError

BASE = "run: {dir: out}\nmodel: {path: model}\ndata: {path: d}\nschedule: {num_steps: 2}\n"


@pytest.fixture
def load(tmp_path: Path) -> Callable[[str], LoadedConfig]:
    """`load(text of the algorithm section)`."""

    def run(text: str) -> LoadedConfig:
        path = tmp_path / "run.yaml"
        path.write_text(BASE + text)
        return load_config(path, overrides=["model.teacher=other"] if "distill" in text else [])

    return run


@pytest.mark.parametrize("kind", sections.kinds())
def test_every_kind_is_there_by_name_and_resolves_to_itself(load: Any, tmp_path: Path, kind: str) -> None:
    config = load(f"algorithm: {{kind: {kind}}}\n").config
    assert type(config.algorithm) is sections.kinds()[kind]
    (tmp_path / "again.yaml").write_text(dump_resolved(config))
    assert load_config(tmp_path / "again.yaml").config == config


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("  kl:\n    coef: 0.1\n    estimator: k1\n", 8, "expected gradient of 0: use k2 or k3"),
        ("  kl:\n    coef: 0.1\n    use: reward\n    unbiased: true\n", 9, "leave it out with use: reward"),
        ("  kl:\n    coef: 0.1\n    use: reward\n", 8, "write use: loss, or kind: reinforce_plus_plus_baseline"),
        ("  loss_mean: constant\n", 5, "algorithm.loss_tokens belongs to loss_mean: constant"),
        ("  loss_tokens: 100\n", 6, "algorithm.loss_tokens belongs to loss_mean: constant"),
        ("  correction:\n    level: token\n", 7, "write old_log_probs: recompute"),
        ("  correction:\n    low: 3\n    high: 2\n", 7, "must be below algorithm.correction.high 2.0"),
        ("  correction:\n    reject: [{statistic: token_k3, high: 1, low: 0.5}]\n", 7, "leave low out"),
        ("  correction:\n    reject: [{statistic: token_k1, high: 2, low: 3}]\n", 7, "below high 2.0"),
        ("  correction:\n    reject: [{statistic: seq_mean_k1, high: 0.9}]\n", 7, "write more than 1, or give low"),
        ("  correction:\n    reject: [{statistic: token_k1}]\n", 7, "missing key `algorithm.correction.reject.0.high`"),
        ("  correction:\n    function: nothing\n", 7, "a function as package.module.function"),
        ("  loss_function: 'a b.c'\n", 6, "a function as package.module.function"),
        ("  overlong:\n    max_tokens: 10\n    buffer_tokens: 20\n", 8, "must be at most max_tokens 10"),
        ("  dual_clip: 1\n", 6, "a ratio above 1, usually 3"),
        ("  clip_low: 1.5\n", 6, "less than or equal to 1"),
    ],
)
def test_what_cannot_be_meant_is_refused_at_its_line(load: Any, text: str, line: int, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(f"algorithm:\n{text}")
    assert words in str(caught.value)
    assert (caught.value.where or "").endswith(f"run.yaml:{line}")


@pytest.mark.parametrize("kind", ["gspo", "cispo", "rloo", "distill"])
def test_baselines_over_siblings_refuse_a_divergence_in_the_reward(load: Any, kind: str) -> None:
    with pytest.raises(ConfigError, match="is not there for"):
        load(f"algorithm: {{kind: {kind}, kl: {{coef: 0.1, use: reward}}}}\n")


@pytest.mark.parametrize("kind", ["ppo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_others_take_it(load: Any, kind: str) -> None:
    text = f"algorithm: {{kind: {kind}, kl: {{coef: 0.1, use: reward, estimator: k1}}}}\n"
    assert needs_of(load(text).config.algorithm) >= {"reference"}


@pytest.mark.parametrize("kind", ["reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_reinforce_plus_plus_is_whitened(load: Any, kind: str) -> None:
    with pytest.raises(ConfigError, match="leave it out, or use kind: rloo"):
        load(f"algorithm: {{kind: {kind}, whiten: false}}\n")


def test_what_each_needs() -> None:
    assert needs_of(GrpoSection()) == needs_of(SftSection()) == frozenset()
    assert needs_of(GrpoSection(kl=KlSection(coef=0.1))) == {"reference"}
    assert needs_of(PpoSection()) == {"values"}
    assert needs_of(DistillSection(kl=KlSection(coef=0.1))) == {"teacher", "reference"}


@pytest.mark.parametrize(
    ("section", "skips"),
    [
        (GrpoSection(), True),
        (RlooSection(), True),
        (GrpoSection(flat_groups="train"), False),
        (GrpoSection(entropy_coef=0.1), False),
        (GrpoSection(kl=KlSection(coef=0.1)), False),
        (GrpoSection(whiten=True), False),
        (GrpoSection(overlong=OverlongSection(max_tokens=2, buffer_tokens=1)), False),
        (GrpoSection(loss_function="a.b"), False),
        (GrpoSection(correction=CorrectionSection(function="a.b")), False),
        (PpoSection(), False),
        (DistillSection(), False),
        (SftSection(), False),
    ],
)
def test_flat_groups_are_left_out_only_where_they_have_no_gradient(section: PolicySection | SftSection, skips: bool) -> None:
    assert skips_flat_groups(section) is skips


def test_passes_beside_the_updates_own() -> None:
    recompute = GrpoSection(old_log_probs="recompute")
    assert log_prob_passes(GrpoSection(), updates_per_step=4) == 0
    assert log_prob_passes(recompute, updates_per_step=1) == 0
    assert log_prob_passes(recompute, updates_per_step=2) == 1
    assert log_prob_passes(recompute.model_copy(update={"advantage_function": "a.b"}), updates_per_step=1) == 1
    assert log_prob_passes(SftSection(), updates_per_step=2) == 0


def test_a_penalty_that_no_response_reaches_is_named(load: Any) -> None:
    (warning,) = load("algorithm: {overlong: {max_tokens: 512, buffer_tokens: 256}}\n").warnings
    assert "it punishes from 256 tokens on" in warning.what
    assert load("algorithm: {overlong: {max_tokens: 256, buffer_tokens: 64}}\n").warnings == ()


@pytest.mark.parametrize(
    ("text", "unused", "used"),
    [
        (
            "correction: {high: 3, bounds: mask}",
            "`algorithm.correction.bounds`, `algorithm.correction.high` have no effect",
            "level: token",
        ),
        ("kl: {estimator: k2}", "`algorithm.kl.estimator` has no effect: algorithm.kl.coef is 0", "coef: 0.1"),
    ],
)
def test_half_of_a_setting_is_named(load: Any, text: str, unused: str, used: str) -> None:
    (warning,) = load(f"algorithm: {{old_log_probs: recompute, {text}}}\n").warnings
    assert unused in warning.what
    whole = text.replace("}", f", {used}}}")
    assert load(f"algorithm: {{old_log_probs: recompute, {whole}}}\n").warnings == ()


@pytest.mark.parametrize("kind", sorted(sections.GROUP_BASELINES))
def test_an_answer_without_siblings_learns_nothing(load: Any, kind: str) -> None:
    warnings = load(f"algorithm: {{kind: {kind}}}\nrollout: {{group_size: 1}}\n").warnings
    assert any("advantage 0" in warning.what for warning in warnings)
