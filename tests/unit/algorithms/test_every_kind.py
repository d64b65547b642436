"""What holds for every algorithm: finite differences, masked and empty rows, names, no effect of order or split."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from vime.algorithms.batch import advantage_batch
from vime.algorithms.registry import ALGORITHMS, algorithm_of
from vime.config import algorithms as sections
from vime.config.algorithms import KlSection, PolicySection, needs_of
from vime.config.corrections import CorrectionSection, RejectSection
from vime.errors import ConfigError

KINDS = sections.kinds()
POLICIES = [kind for kind, section in KINDS.items() if issubclass(section, PolicySection)]
EVERYTHING: dict[str, Any] = {
    "entropy_coef": 0.1,
    "kl": KlSection(coef=0.3, estimator="k3", unbiased=True),
    "old_log_probs": "recompute",
    "correction": CorrectionSection(
        level="token", high=1.5, reject=(RejectSection(statistic="seq_max_k2", high=0.5),), opsm_delta=0.05
    ),
}
PLAIN: dict[str, Any] = {}


def section_of(kind: str, **settings: Any) -> Any:
    return KINDS[kind](**settings)


def test_every_section_has_an_algorithm():
    assert list(KINDS) == list(ALGORITHMS)
    for kind in KINDS:
        algorithm = algorithm_of(section_of(kind))
        needs = needs_of(section_of(kind))
        assert algorithm.needs_values == ("values" in needs)
        assert algorithm.needs_teacher == ("teacher" in needs)
        assert not algorithm.needs_reference
    assert algorithm_of(section_of("grpo", kl=KlSection(coef=0.1))).needs_reference
    with pytest.raises(ConfigError, match="unknown algorithm trpo"):
        algorithm_of(sections.GrpoSection.model_construct(kind="trpo"))


def tokens(batch_of, log_probs: torch.Tensor, **given: Any):
    """Five tokens of two samples, one masked; nothing lies on the edge of a clip."""
    old = torch.tensor([-1.0, -2.0, -0.5, -1.2, -0.7], dtype=torch.float64)
    fields = {
        "lengths": (3, 2),
        "mask": [True, True, False, True, True],
        "weights": [0.3, 0.3, 0.3, 0.2, 0.2],
        "rollout_log_probs": old + torch.tensor([0.05, -0.1, 0.0, 0.9, 0.02], dtype=torch.float64),
        "ref_log_probs": old - 0.2,
        "teacher_log_probs": old + 0.3,
        "entropy": -2.0 * log_probs,
        **given,
    }
    return batch_of(log_probs, old, [1.0, -0.5, 3.0, -2.0, 0.7], **fields)


START = [-1.15, -2.05, -0.6, -1.05, -0.72]


@pytest.mark.parametrize("settings", [PLAIN, EVERYTHING], ids=["plain", "everything"])
@pytest.mark.parametrize("kind", [kind for kind in POLICIES if kind != "cispo"])
def test_gradient_matches_finite_differences(batch_of, kind, settings):
    algorithm = algorithm_of(section_of(kind, **settings))
    x = torch.tensor(START, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda y: algorithm.loss(tokens(batch_of, y)).loss, (x,), eps=1e-6)


def test_the_gradient_of_cispo_is_the_bounded_ratio_times_the_advantage(batch_of):
    """Ratios e^0.5 under a bound of 1.3, e^-0.2 above a bound of 0.9, and one inside."""
    x = torch.tensor([-0.5, -1.2, -0.95], dtype=torch.float64, requires_grad=True)
    algorithm = algorithm_of(section_of("cispo", clip_low=0.1, clip_high=0.3))
    sums = algorithm.loss(batch_of(x, [-1.0, -1.0, -1.0], [2.0, -1.0, 1.0]))
    sums.loss.backward()
    assert x.grad.tolist() == pytest.approx([-1.3 * 2.0, 0.9, -math.exp(0.05)])
    assert sums.token_sums["pg_clipfrac"].item() == 2


def test_gspo_reduces_under_the_mask(batch_of):
    """Advantages 1 and, masked, 10 at ratio 1: loss -1; log-ratios 0.1, 0.2, 0.3: ratio e^0.2 at every token."""
    algorithm = algorithm_of(section_of("gspo", clip_high=1.0))
    given = {"mask": [True, True, False, False], "weights": [0.5] * 4}
    assert algorithm.loss(batch_of([-1.0] * 4, [-1.0] * 4, [1.0, 1.0, 10.0, 10.0], **given)).loss.item() == pytest.approx(-1.0)
    sums = algorithm.loss(batch_of([-0.9, -0.8, -0.7], [-1.0] * 3, [1.0] * 3, weights=[1 / 3] * 3))
    assert -sums.loss.item() == pytest.approx(1.2214, abs=5e-5)


def test_gspo_has_a_ratio_of_its_own_for_each_sample(batch_of):
    algorithm = algorithm_of(section_of("gspo", clip_high=1.0))
    sums = algorithm.loss(batch_of([-0.9, -0.7, -1.0], [-1.0] * 3, [1.0] * 3, lengths=(2, 1)))
    assert -sums.loss.item() == pytest.approx(2 * math.exp(0.2) + 1.0)


@pytest.mark.parametrize("settings", [PLAIN, EVERYTHING], ids=["plain", "everything"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_invalid_values_under_the_mask_reach_neither_loss_nor_gradient(batch_of, kind, settings, bad):
    algorithm = algorithm_of(section_of(kind, **(settings if kind in POLICIES else {})))
    good, spoiled = (torch.tensor(START, dtype=torch.float64) for _ in range(2))
    spoiled[2] = bad
    results = []
    for values in (good, spoiled):
        values.requires_grad_()
        made = tokens(batch_of, values)
        if values is spoiled:
            fields = ("old_log_probs", "policy_log_probs", "rollout_log_probs", "ref_log_probs", "advantages", "weights")
            made = replace(made, **{name: _with(getattr(made, name), 2, bad) for name in fields})
        sums = algorithm.loss(made)
        sums.loss.backward()
        numbers = {**sums.weighted, **sums.token_sums, **sums.sequence_sums, **sums.token_maxima}
        results.append((sums.loss.item(), values.grad.tolist(), {name: value.item() for name, value in numbers.items()}))
    assert results[0] == results[1]
    assert all(math.isfinite(value) for value in results[0][2].values())


def _with(values: torch.Tensor, index: int, value: float) -> torch.Tensor:
    changed = values.clone()
    changed[index] = value
    return changed


@pytest.mark.parametrize("kind", POLICIES)
def test_a_nan_at_a_trained_token_stays_visible(batch_of, kind):
    values = torch.tensor(START, dtype=torch.float64)
    values[0] = float("nan")
    assert math.isnan(algorithm_of(section_of(kind)).loss(tokens(batch_of, values)).loss.item())


@pytest.mark.parametrize("settings", [PLAIN, EVERYTHING], ids=["plain", "everything"])
@pytest.mark.parametrize("kind", KINDS)
def test_no_tokens_and_masked_tokens_give_zero_and_the_same_names(batch_of, kind, settings):
    algorithm = algorithm_of(section_of(kind, **(settings if kind in POLICIES else {})))
    full = algorithm.loss(tokens(batch_of, torch.tensor(START, dtype=torch.float64)))
    masked = algorithm.loss(tokens(batch_of, torch.tensor(START, dtype=torch.float64), mask=[False] * 5))
    for sums in (algorithm.empty_sums(), masked):
        assert sums.loss.item() == 0.0
        assert sums.tokens.item() == 0
        assert sums.sequences.item() == 0
        for part in ("weighted", "token_sums", "sequence_sums", "token_maxima"):
            assert getattr(sums, part).keys() == getattr(full, part).keys()
            assert all(value.item() == 0.0 for value in getattr(sums, part).values()), part


@pytest.mark.parametrize("kind", POLICIES)
def test_the_ratio_of_an_unchanged_policy_is_one(batch_of, kind):
    old = torch.tensor([-1.0, -2.0, -0.5, -1.2, -0.7], dtype=torch.float64)
    sums = algorithm_of(section_of(kind)).loss(tokens(batch_of, old))
    assert sums.token_sums["ois"].item() == 4.0
    assert sums.token_sums["ppo_kl"].item() == 0.0
    assert sums.token_sums["pg_clipfrac"].item() == 0.0


def three_samples(sample_of):
    group = (1.0, 0.0, 0.4)
    facts = [
        {"ref_log_probs": (-1.1,) * n, "teacher_log_probs": (-0.7,) * n, "values": tuple(0.1 * i for i in range(n))}
        for n in (3, 2, 4)
    ]
    masks = [(1, 0, 1), (1, 1), (0, 0, 0, 0)]
    return [
        sample_of(len(mask), reward=reward, group=group, loss_mask=mask, **given)
        for mask, reward, given in zip(masks, group, facts, strict=True)
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_advantages_are_zero_at_masked_tokens_and_follow_their_sample(sample_of, ranks, kind):
    algorithm, samples = algorithm_of(section_of(kind)), three_samples(sample_of)
    (found,) = ranks([samples], algorithm.advantages)
    mask = advantage_batch(samples).mask
    assert found.shape == mask.shape
    assert found.dtype == torch.float32
    assert not found[~mask].any()
    assert found[mask].any() or kind == "sft"
    (turned,) = ranks([samples[::-1]], algorithm.advantages)
    rows = turned.split([4, 2, 3])[::-1]
    assert torch.allclose(torch.cat(rows), found, atol=1e-7)


@pytest.mark.parametrize(
    ("kind", "whiten"),
    [(kind, whiten) for kind in POLICIES for whiten in (False, True) if whiten or not kind.startswith("reinforce")],
)
def test_advantages_do_not_depend_on_the_split_over_ranks(sample_of, ranks, kind, whiten):
    algorithm = algorithm_of(section_of(kind, whiten=whiten))
    samples = three_samples(sample_of) + [replace(s, reward=0.2) for s in three_samples(sample_of)]
    (whole,) = ranks([samples], algorithm.advantages)
    for cuts in ([2], [0, 3], [1, 1, 4]):
        shares = [samples[a:b] for a, b in zip([0, *cuts], [*cuts, len(samples)], strict=True)]
        assert torch.allclose(torch.cat(ranks(shares, algorithm.advantages)), whole, atol=1e-7)


def test_reinforce_plus_plus_by_hand(sample_of, ranks):
    """Returns 1, 1 and 0: mean 2/3, unbiased variance 1/3."""
    samples = [sample_of(2, reward=1.0), sample_of(1, reward=0.0)]
    (found,) = ranks([samples], algorithm_of(section_of("reinforce_plus_plus")).advantages)
    assert found.tolist() == pytest.approx([3**0.5 / 3, 3**0.5 / 3, -2 * 3**0.5 / 3], rel=1e-5)


def test_reinforce_plus_plus_takes_the_divergence_off_the_reward(sample_of, ranks):
    """Divergence 0.5 at every token, gamma 0.5: returns of two tokens are -0.5 + 0.5 x 0.5 and 0.5, before whitening."""
    section = section_of("reinforce_plus_plus", gamma=0.5, kl=KlSection(coef=1.0, estimator="k1", use="reward"))
    sample = sample_of(2, reward=1.0, log_probs=(-1.0, -1.0), ref_log_probs=(-1.5, -1.5))
    algorithm = algorithm_of(section)
    found = algorithm.token_advantages(advantage_batch([sample]))
    assert found.tolist() == pytest.approx([-0.5 + 0.25, 0.5])
    (white,) = ranks([[sample]], algorithm.advantages)
    assert white.tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5], rel=1e-5)


def test_the_baseline_form_centres_by_group_before_whitening(sample_of, ranks):
    samples = [sample_of(1, reward=r, group=g) for g in ((1.0, 0.0), (9.0, 7.0)) for r in g]
    (found,) = ranks([samples], algorithm_of(section_of("reinforce_plus_plus_baseline")).advantages)
    scale = (((0.25 + 1.0) * 2) / 3) ** 0.5
    assert found.tolist() == pytest.approx([0.5 / scale, -0.5 / scale, 1.0 / scale, -1.0 / scale])


def test_distillation_moves_towards_the_teacher(sample_of, ranks):
    section = section_of("distill", teacher_coef=2.0, reward_coef=0.5, normalize_std=False)
    sample = sample_of(2, reward=1.0, group=(1.0, 0.0), log_probs=(-1.0, -2.0), teacher_log_probs=(-0.5, -3.0))
    (found,) = ranks([[sample]], algorithm_of(section).advantages)
    assert found.tolist() == pytest.approx([2.0 * 0.5 + 0.25, -2.0 + 0.25])


def test_distillation_needs_no_reward_where_none_counts(sample_of, ranks):
    sample = sample_of(1, reward=float("nan"), group=(float("nan"),), teacher_log_probs=(-0.5,))
    (found,) = ranks([[sample]], algorithm_of(section_of("distill")).advantages)
    assert found.tolist() == [0.5]


def test_ppo_whitens_generalised_advantages(sample_of, ranks):
    sample = sample_of(2, reward=1.0, values=(0.5, 0.25))
    raw, white = (algorithm_of(section_of("ppo", lam=0.5, whiten=flag)) for flag in (False, True))
    assert ranks([[sample]], raw.advantages)[0].tolist() == pytest.approx([0.125, 0.75])
    assert ranks([[sample]], white.advantages)[0].tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5], rel=1e-5)


def test_the_divergence_loss_is_weighted_like_the_policys(batch_of):
    """k2 of log-ratios 0.2 and -0.4, weights 0.5: 0.5 x (0.02 + 0.08), coefficient 10."""
    algorithm = algorithm_of(section_of("grpo", kl=KlSection(coef=10.0, estimator="k2")))
    made = batch_of([-1.0, -2.0], [-1.0, -2.0], [0.0, 0.0], ref_log_probs=[-1.2, -1.6], weights=[0.5, 0.5])
    sums = algorithm.loss(made)
    assert sums.weighted["kl_loss"].item() == pytest.approx(0.05)
    assert sums.loss.item() == pytest.approx(0.5)
    assert sums.token_sums["rollout/kl"].item() == pytest.approx(0.1)


def test_a_divergence_in_the_reward_is_no_loss(batch_of):
    algorithm = algorithm_of(section_of("ppo", kl=KlSection(coef=10.0, estimator="k1", use="reward")))
    sums = algorithm.loss(batch_of([-1.0], [-1.0], [1.0], ref_log_probs=[-5.0]))
    assert sums.loss.item() == -1.0
    assert "kl_loss" not in sums.weighted
