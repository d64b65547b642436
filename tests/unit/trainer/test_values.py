"""Ranks beside the actor: a critic that learns values, and frozen ones that score."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from vime.config.algorithms import CriticSection, GrpoSection, KlSection, PpoSection
from vime.config.optimizer import OptimizerSection
from vime.config.schema import TrainerSection
from vime.errors import CheckpointError, ConfigError, MemoryStateError, TrainerError
from vime.facts.memory import Tag
from vime.trainer.megatron.folders import drawn_source
from vime.types import TrainSample, UpdateWork

VOCAB = 50
PPO = PpoSection(critic=CriticSection(value_clip=0.0))
CRITIC: dict[str, Any] = {
    "task": "critic",
    "role": "critic",
    "algorithm": PPO,
    "trainer": TrainerSection(optimizer=OptimizerSection(lr=3e-3)),
}


def sample(prompt: tuple[int, ...], response: tuple[int, ...], reward: float = 1.0, **facts: Any) -> TrainSample:
    size = len(response)
    return TrainSample(prompt, response, (-4.0,) * size, (1,) * size, reward, (reward,), **facts)


def answers(count: int = 12, *, seed: int = 0) -> list[TrainSample]:
    """The reward says whether the prompt's first token is even: something that a critic can learn."""
    draw = random.Random(seed)
    made = []
    for _ in range(count):
        prompt = tuple(draw.randrange(VOCAB) for _ in range(draw.choice([2, 5])))
        response = tuple(draw.randrange(VOCAB) for _ in range(draw.choice([1, 3])))
        made.append(sample(prompt, response, float(prompt[0] % 2 == 0)))
    return made


def with_values(critic: Any, rows: list[TrainSample]) -> list[TrainSample]:
    (values,) = critic.score([rows])
    return [replace(row, values=found) for row, found in zip(rows, values, strict=True)]


def work(rows: list[TrainSample], *edges: int) -> UpdateWork:
    """One update of micro-batches cut at `edges`."""
    cuts = [0, *edges, len(rows)]
    parts = tuple(tuple(rows[a:b]) for a, b in itertools.pairwise(cuts))
    return UpdateWork(parts, len(rows), sum(sum(row.loss_mask) for row in rows))


def test_a_value_is_that_of_the_state_before_its_token(worker_of):
    """Of two answers that part at token 1, the values of tokens 0 and 1 agree and that of token 2 does not."""
    critic = worker_of(**CRITIC)
    ((one, other, longer),) = critic.score([[sample((3, 4), (5, 6, 7)), sample((3, 4), (5, 9, 7)), sample((3, 4, 5), (6, 7))]])
    assert one[:2] == other[:2]
    assert one[2] != other[2]
    assert one[1:] == pytest.approx(longer), "what counts is the state, not where the response begins"
    assert len({*one, *other}) == 4


def test_values_do_not_depend_on_the_sampler_s_temperature(worker_of):
    rows = answers()
    assert worker_of(**CRITIC, temperature=0.5).score([rows]) == worker_of(**CRITIC, temperature=1.0).score([rows])


def test_a_critic_learns_what_its_returns_are(worker_of):
    critic, rows = worker_of(**CRITIC), answers()
    first = critic.train_step([work(with_values(critic, rows))])
    for _ in range(40):
        last = critic.train_step([work(with_values(critic, rows))])
    assert last["train/critic-value_loss"] < 0.02 < first["train/critic-value_loss"]
    assert last["train/critic-explained_variance"] > 0.9
    sizes = [len(row.response_ids) for row in rows]
    mean = sum(row.reward * size for row, size in zip(rows, sizes, strict=True)) / sum(sizes)
    assert last["train/critic-returns"] == pytest.approx(mean, rel=1e-5)
    (values,) = critic.score([rows])
    assert all(abs(value - row.reward) < 0.5 for row, found in zip(rows, values, strict=True) for value in found)
    assert (critic.step_count, critic.update_count) == (41, 41)


def test_the_value_loss_is_half_the_squared_error_over_rollouts(worker_of):
    """At lambda 1 and gamma 1 without a penalty the return of every token is the reward."""
    critic, rows = worker_of(**CRITIC), answers()
    rows = with_values(critic, rows)
    metrics = critic.train_step([work(rows)])
    each = [sum(0.5 * (v - row.reward) ** 2 for v in row.values) / len(row.values) for row in rows]
    assert metrics["train/critic-value_loss"] == pytest.approx(sum(each) / len(each), rel=1e-5)
    assert metrics["train/critic-grad_norm"] > 0
    assert metrics["train/critic-lr-pg_0"] == pytest.approx(3e-3)


def test_any_split_trains_the_critic_alike(worker_of):
    critic = worker_of(**CRITIC)
    rows = with_values(critic, answers())
    whole = critic.train_step([work(rows)])
    for edges in ((4,), (0, 5, 5, 7), tuple(range(1, 12))):
        split = worker_of(**CRITIC).train_step([work(rows, *edges)])
        assert split == pytest.approx(whole, rel=1e-5, abs=1e-7), edges


def test_values_are_clipped_to_those_from_before_the_step(worker_of):
    """With old values at the returns and no room to move, every later update counts as clipped."""
    section = PpoSection(critic=CriticSection(value_clip=1e-6))
    critic = worker_of(**{**CRITIC, "algorithm": section})
    rows = [replace(row, values=(5.0,) * len(row.response_ids)) for row in answers()]
    clipped = critic.train_step([work(rows)])
    assert clipped["train/critic-value_clipfrac"] > 0.9
    assert clipped["train/critic-grad_norm"] == pytest.approx(0.0, abs=1e-6)


def test_a_penalty_in_the_reward_lowers_returns(worker_of):
    section = PpoSection(kl=KlSection(coef=0.5, estimator="k1", use="reward"), critic=CriticSection(value_clip=0.0))
    critic = worker_of(**{**CRITIC, "algorithm": section})
    rows = with_values(critic, [sample((3, 4), (5, 6)), sample((7, 8), (9, 1))])
    with pytest.raises(TrainerError, match="ref_log_probs has 0 entries for 2 response tokens"):
        critic.train_step([work(rows)])
    rows = [replace(row, ref_log_probs=(-5.0, -4.5)) for row in rows]
    found = critic.train_step([work(rows)])["train/critic-returns"]
    assert found == pytest.approx(((1 - 0.5 * 1.5) + (1 - 0.5 * 0.5)) / 2)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"values": ()}, "values has 0 entries"),
        ({"reward": None}, "it has no reward"),
        ({"loss_mask": (1,)}, "loss_mask has 1"),
    ],
)
def test_what_a_critic_cannot_learn_from_is_refused(change, problem, worker_of):
    critic = worker_of(**CRITIC)
    rows = with_values(critic, [sample((3, 4), (5, 6)), sample((7, 8), (9, 1))])
    with pytest.raises(TrainerError, match=problem):
        critic.train_step([work([rows[0], replace(rows[1], **change)])])
    with pytest.raises(TrainerError, match="no prompt token"):
        critic.score([[sample((), (5, 6))]])
    assert critic.update_count == 0


def test_a_value_that_is_not_finite_stops_before_any_weight_changes(worker_of):
    critic = worker_of(**CRITIC)
    rows = with_values(critic, answers())
    before = critic.score([rows])
    with pytest.raises(TrainerError, match="the loss is"):
        critic.train_step([work([replace(rows[0], values=(float("nan"),) * len(rows[0].values)), *rows[1:]])])
    assert critic.score([rows]) == before


def test_a_critic_goes_on_bit_for_bit(worker_of, tmp_path):
    critic, rows = worker_of(**CRITIC), answers()
    critic.train_step([work(with_values(critic, rows))])
    critic.save(tmp_path / "checkpoint")
    expected = [critic.train_step([work(with_values(critic, rows))]) for _ in range(2)]
    values = critic.score([rows])
    fresh = worker_of(**CRITIC)
    fresh.load(tmp_path / "checkpoint")
    assert fresh.step_count == 1
    assert [fresh.train_step([work(with_values(fresh, rows))]) for _ in range(2)] == expected
    assert fresh.score([rows]) == values
    actor = worker_of()
    with pytest.raises(CheckpointError, match="of another model: parameters"):
        actor.load(tmp_path / "checkpoint")


@pytest.mark.parametrize("tied", [True, False])
def test_the_backbone_is_the_policy_s_and_the_head_is_drawn_or_read(tied, worker_of, model_of, tmp_path):
    model = model_of(tmp_path / "policy", tied=tied)
    actor = worker_of(model)
    policy = {name: tensor.clone() for name, tensor in actor.weights()}
    actor.save_hf(tmp_path / "written")
    critic = worker_of(tmp_path / "written", **CRITIC, from_scratch_seed=None)
    weights = {name: tensor.clone() for name, tensor in critic.weights()}
    assert weights.keys() - policy.keys() == {"score.weight", "score.bias"}
    assert policy.keys() - weights.keys() == (set() if tied else {"lm_head.weight"})
    assert all(torch.equal(weights[name], policy[name]) for name in weights.keys() & policy.keys())
    head = drawn_source(1, std=0.1)("score.weight", (1, 32))
    assert torch.equal(weights["score.weight"], head)
    assert weights["score.bias"].tolist() == [0.0]
    rows = answers()
    critic.train_step([work(with_values(critic, rows))])
    values = critic.score([rows])
    critic.save_hf(tmp_path / "critic")
    again = worker_of(tmp_path / "critic", **CRITIC, from_scratch_seed=None)
    assert again.score([rows]) == values, "a critic's folder is read whole"


def test_a_head_of_another_width_is_refused(worker_of, model_of, tmp_path):
    from safetensors.torch import load_file, save_file

    worker_of(model_of(tmp_path / "policy")).save_hf(tmp_path / "written")
    file = tmp_path / "written" / "model.safetensors"
    save_file({**load_file(file), "score.weight": torch.zeros(2, 32)}, file)
    with pytest.raises(ConfigError, match=r"score.weight has shape \(2, 32\)"):
        worker_of(tmp_path / "written", **CRITIC, from_scratch_seed=None)


def test_only_an_algorithm_with_values_has_a_critic(worker_of):
    with pytest.raises(ConfigError, match="kind grpo has no critic"):
        worker_of(**{**CRITIC, "algorithm": GrpoSection()})


def test_a_frozen_rank_scores_what_the_actor_does(worker_of):
    rows = answers()
    actor = worker_of()
    expected = actor.log_probs([(*row.prompt_ids, *row.response_ids) for row in rows])
    frozen = worker_of(task="reference", role="ref")
    (found,) = frozen.score([rows])
    for row, ours, theirs in zip(rows, found, expected, strict=True):
        assert ours == pytest.approx(theirs[len(row.prompt_ids) - 1 :], abs=1e-5)


def test_siblings_with_one_prompt_score_as_they_do_alone(worker_of):
    """Packs that share a prompt put samples into another order; scores come back in the order asked."""
    prompt = tuple(range(1, 20))
    rows = [sample(prompt, tuple(range(20 + i, 23 + i - i % 3))) for i in range(6)]
    frozen = worker_of(task="reference", role="ref")
    (together,) = frozen.score([rows])
    for row, found in zip(rows, together, strict=True):
        ((alone,),) = frozen.score([[row]])
        assert found == pytest.approx(alone, abs=1e-5)
    assert frozen.score([[], rows, []]) == [[], together, []]
    assert frozen.score([]) == []


def test_a_frozen_rank_scores_at_the_sampler_s_temperature(worker_of):
    rows = answers()
    (warm,) = worker_of(task="teacher", role="teacher", temperature=0.5).score([rows])
    (plain,) = worker_of(task="teacher", role="teacher").score([rows])
    assert warm != plain
    assert min(min(found) for found in warm) < min(min(found) for found in plain)


def test_a_frozen_rank_has_parameters_alone_and_leaves_with_them(worker_of):
    frozen, rows = worker_of(task="reference", role="ref"), answers()
    before = frozen.score([rows])
    assert set(frozen.memory_bytes()) == {Tag.PARAMS}
    frozen.park([Tag.PARAMS])
    assert frozen.memory_bytes() == {Tag.PARAMS: 0}
    with pytest.raises(MemoryStateError, match="cannot score: ref's params is parked on the host"):
        frozen.score([rows])
    frozen.wake([Tag.PARAMS])
    assert frozen.score([rows]) == before
    with pytest.raises(MemoryStateError, match="ref's optimizer is not registered"):
        frozen.park([Tag.OPTIMIZER])
