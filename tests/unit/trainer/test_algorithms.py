"""Every algorithm on one real trainer rank: any split, an unchanged policy, what others scored."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from types import ModuleType

import pytest

from vime.config.algorithms import (
    DistillSection,
    GrpoSection,
    GspoSection,
    KlSection,
    OverlongSection,
    PpoSection,
    ReinforcePlusPlusSection,
)
from vime.config.corrections import CorrectionSection, RejectSection
from vime.config.schema import OptimizerSection, TrainerSection
from vime.observe.metrics import find
from vime.types import TrainSample, UpdateWork

VOCAB = 50


def samples(count=12, *, group=4) -> list[TrainSample]:
    """Groups of `group`; every fourth sample has a masked token."""
    draw = random.Random(0)
    made = []
    for index in range(count):
        size = draw.choice([2, 3, 5])
        near = tuple(-4.0 + draw.random() * 0.1 for _ in range(size))
        made.append(
            TrainSample(
                prompt_ids=tuple(draw.randrange(VOCAB) for _ in range(3)),
                response_ids=tuple(draw.randrange(VOCAB) for _ in range(size)),
                log_probs=near,
                loss_mask=(1,) * size if index % 4 else (*(1,) * (size - 1), 0),
                reward=float(index % 2),
                group_rewards=tuple(float(i % 2) for i in range(group)),
                ref_log_probs=tuple(x + draw.random() * 0.2 for x in near),
                teacher_log_probs=tuple(x + draw.random() for x in near),
                values=tuple(draw.random() for _ in range(size)),
                group_lengths=(2, 3, 5, size),
            )
        )
    return made


def work(rows: Sequence[TrainSample], parts: Sequence[int] = ()) -> UpdateWork:
    edges = [0, *parts, len(rows)]
    cut = tuple(tuple(rows[a:b]) for a, b in pairwise(edges))
    return UpdateWork(cut, num_rollouts=len(rows), num_tokens=sum(sum(r.loss_mask) for r in rows))


STILL = TrainerSection(optimizer=OptimizerSection(lr=0.0))
SECTIONS = {
    "grpo": GrpoSection(
        old_log_probs="recompute",
        kl=KlSection(coef=0.1, unbiased=True),
        entropy_coef=0.01,
        overlong=OverlongSection(max_tokens=5, buffer_tokens=3),
        correction=CorrectionSection(
            level="sequence", high=1.02, reject=(RejectSection(statistic="token_k2", high=0.5),), opsm_delta=0.01
        ),
    ),
    "dr_grpo": GrpoSection(normalize_std=False, loss_mean="constant", loss_tokens=5),
    "gspo": GspoSection(clip_low=0.2, clip_high=0.2),
    "ppo": PpoSection(gamma=0.9, lam=0.9, loss_mean="token", kl=KlSection(coef=0.1, estimator="k1", use="reward")),
    "reinforce_plus_plus": ReinforcePlusPlusSection(),
    "distill": DistillSection(reward_coef=0.5),
}


@pytest.mark.parametrize("name", SECTIONS)
def test_any_split_gives_the_same_loss_gradient_and_metrics(worker_of, name):
    rows = samples()
    worker = worker_of(algorithm=SECTIONS[name], trainer=STILL)
    whole = worker.train_step([work(rows)])
    assert whole["train/grad_norm"] > 0
    for order in (rows, rows[::-1]):
        split = worker.train_step([work(order, [0, 1, 5, 5, 9])])
        for metric, value in whole.items():
            assert split[metric] == pytest.approx(value, rel=2e-4, abs=2e-6), metric


def test_the_ratio_between_two_passes_of_an_unchanged_policy_is_one(worker_of):
    """The second update's old log-probs come from a pass of their own, before the first update, which changes nothing."""
    rows = samples()
    recompute = GrpoSection(old_log_probs="recompute")
    metrics = worker_of(algorithm=recompute, trainer=STILL).train_step([work(rows), work(rows, [3, 7])])
    assert metrics["train/ois"] == pytest.approx(1.0, abs=1e-6)
    assert metrics["train/ppo_kl"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["train/pg_clipfrac"] == 0.0
    assert metrics["train/train_rollout_logprob_abs_diff"] > 0.01
    assert metrics["train/rollout_corr/k3_kl"] > 1e-5


def test_a_single_update_needs_no_pass_for_its_old_log_probs(worker_of, monkeypatch):
    rows, calls = samples(), []
    worker = worker_of(algorithm=GrpoSection(old_log_probs="recompute"), trainer=STILL)
    score = worker._passes.score
    monkeypatch.setattr(worker._passes, "score", lambda *a, **k: calls.append(a) or score(*a, **k))
    metrics = worker.train_step([work(rows, [6])])
    assert calls == []
    assert metrics["train/ois"] == 1.0
    worker.train_step([work(rows, [6]), work(rows, [6])])
    assert len(calls) == 1


def test_the_divergence_from_itself_is_zero_and_from_another_is_not(worker_of):
    worker = worker_of(algorithm=GrpoSection(kl=KlSection(coef=0.5)), trainer=STILL)
    rows = samples()
    own = worker.log_probs([(*r.prompt_ids, *r.response_ids) for r in rows])
    same = [replace(row, ref_log_probs=tuple(scores[len(row.prompt_ids) - 1 :])) for row, scores in zip(rows, own, strict=True)]
    metrics = worker.train_step([work(same)])
    assert metrics["train/kl_loss"] == pytest.approx(0.0, abs=1e-9)
    assert metrics["rollout/kl"] == pytest.approx(0.0, abs=1e-9)
    assert metrics["rollout/ref_log_probs"] == pytest.approx(metrics["rollout/log_probs"], abs=1e-6)
    assert worker.train_step([work(rows)])["train/kl_loss"] > 1e-4


def test_custom_advantages_see_the_trainers_own_log_probs(worker_of, monkeypatch):
    """With recomputed old log-probs they come from a pass before the first update."""
    module, seen = ModuleType("my_advantages"), []

    def fill(args, rollout_data):
        seen.append(rollout_data["log_probs"])
        rollout_data["advantages"] = [mask * 0.5 for mask in rollout_data["loss_masks"]]

    vars(module)["fill"] = fill
    monkeypatch.setitem(sys.modules, "my_advantages", module)
    section = GrpoSection(old_log_probs="recompute", advantage_function="my_advantages.fill")
    worker, rows = worker_of(algorithm=section, trainer=STILL), samples()
    metrics = worker.train_step([work(rows, [5])])
    expected = worker.log_probs([(*r.prompt_ids, *r.response_ids) for r in rows])
    by_length = {(tuple(round(x, 4) for x in row.tolist())) for row in seen[0]}
    assert by_length == {tuple(round(x, 4) for x in scores[2:]) for scores in expected}
    assert metrics["rollout/advantages"] == pytest.approx(0.5)


@pytest.mark.parametrize("name", SECTIONS)
def test_every_metric_is_documented(worker_of, name):
    metrics = worker_of(algorithm=SECTIONS[name], trainer=STILL).train_step([work(samples())])
    assert [metric for metric in metrics if find(metric) is None] == []
