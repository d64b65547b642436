"""Functions of the user's own with slime's signatures."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch

from vime.algorithms.batch import advantage_batch
from vime.algorithms.grpo import Grpo
from vime.config.algorithms import GrpoSection
from vime.config.corrections import CorrectionSection
from vime.errors import ConfigError, TrainerError

seen: dict[str, object] = {}


def halve_and_drop(*, args, pg_loss, train_log_probs, rollout_log_probs, loss_masks, total_lengths, response_lengths):
    """Half of each loss; the first token of every response is left out."""
    seen.update(args=args, total_lengths=total_lengths, response_lengths=response_lengths)
    masks = [torch.cat([torch.zeros(1), mask[1:]]) for mask in loss_masks]
    difference = [t - r for t, r in zip(train_log_probs, rollout_log_probs, strict=True)]
    return 0.5 * pg_loss, masks, {"mine": difference, "constant": 3.0}


def squared_loss(args, batch, logits, reducer):
    seen.update(logits=logits, keys=set(batch))
    log_probs = torch.cat(batch["log_probs"]) if batch["log_probs"] else torch.zeros(0)
    return reducer(log_probs**2), {"squares": log_probs**2}


def fill(args, rollout_data):
    rollout_data["advantages"] = [
        torch.full_like(m, r) for r, m in zip(rollout_data["rewards"], rollout_data["loss_masks"], strict=True)
    ]
    rollout_data["returns"] = rollout_data["advantages"]


def forget(args, rollout_data):
    pass


def short(args, rollout_data):
    rollout_data["advantages"] = torch.zeros(1)


not_a_function = 3


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    """These functions as a module that a path can name."""
    module = ModuleType("my_functions")
    vars(module).update({name: value for name, value in globals().items() if not name.startswith("_")})
    monkeypatch.setitem(sys.modules, "my_functions", module)


def test_a_correction_gets_lists_and_changes_loss_and_mask(batch_of):
    section = GrpoSection(correction=CorrectionSection(function="my_functions.halve_and_drop"))
    batch = batch_of(
        [-1.0, -2.0, -1.0], [-1.0, -2.0, -1.0], [1.0, 2.0, 4.0], lengths=(2, 1), policy_log_probs=[-1.0, -1.5, -1.0]
    )
    sums = Grpo(section).loss(batch)
    assert sums.loss.item() == pytest.approx(-1.0)
    assert seen["args"] is section
    assert seen["response_lengths"] == [2, 1]
    assert seen["total_lengths"] == [4, 3]
    assert sums.token_sums["mine"].item() == pytest.approx(0.5)
    assert sums.token_sums["constant"].item() == 9.0


def test_a_loss_replaces_the_policys_and_has_its_denominators(batch_of):
    section = GrpoSection(loss_function="my_functions:squared_loss", entropy_coef=1.0)
    x = torch.tensor([-1.0, -2.0, -9.0], dtype=torch.float64, requires_grad=True)
    sums = Grpo(section).loss(
        batch_of(x, [-1.0] * 3, [1.0] * 3, mask=[True, True, False], weights=[0.5] * 3, entropy=[0.1, 0.1, 9.0])
    )
    sums.loss.backward()
    assert sums.loss.item() == pytest.approx(0.5 * 5.0 - 0.5 * 0.2)
    assert x.grad.tolist() == [-1.0, -2.0, 0.0]
    assert sums.token_sums["squares"].item() == 5.0
    assert seen["logits"] is None
    assert Grpo(section).empty_sums().token_sums.keys() == sums.token_sums.keys()


def test_advantages_are_what_the_function_fills_in(sample_of, ranks):
    samples = [sample_of(2, reward=3.0, loss_mask=(1, 0)), sample_of(1, reward=5.0)]
    (found,) = ranks([samples], Grpo(GrpoSection(advantage_function="my_functions.fill")).advantages)
    assert found.tolist() == [3.0, 0.0, 5.0]
    recomputed = Grpo(GrpoSection(advantage_function="my_functions.fill", old_log_probs="recompute"))
    assert recomputed.needs_old_for_advantages


@pytest.mark.parametrize(("name", "words"), [("forget", "set no `advantages`"), ("short", r"\(1,\) values for \(2,\)")])
def test_a_function_that_gives_the_wrong_thing_is_named(sample_of, name, words):
    algorithm = Grpo(GrpoSection(advantage_function=f"my_functions.{name}"))
    with pytest.raises(TrainerError, match=words):
        algorithm.advantages(advantage_batch([sample_of(2)]), lambda values: values)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("no_such_module.f", "No module named"),
        ("my_functions.g", "no function 'g'"),
        ("my_functions.not_a_function", "no function"),
    ],
)
def test_what_cannot_be_loaded_is_refused_when_the_algorithm_is_built(path, words):
    with pytest.raises(ConfigError, match=words) as caught:
        Grpo(GrpoSection(loss_function=path))
    assert caught.value.where == "algorithm.loss_function"
