"""Packs and per-target values, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from vime.algorithms.batch import advantage_batch
from vime.algorithms.registry import algorithm_of
from vime.config.algorithms import DistillSection, GrpoSection, KlSection, PpoSection, SftSection
from vime.errors import TrainerError
from vime.trainer.megatron.packing import (
    PackShape,
    check_samples,
    loss_weights,
    make_pack,
    pack_samples,
    split_by_tokens,
    target_tensors,
)
from vime.types import TrainSample, UpdateWork

SHAPE = PackShape(alignment=4, vocab=100, device=torch.device("cpu"))


def sample(prompt, response, *, reward=1.0, group=(1.0, 0.0), mask=None):
    log_probs = tuple(-float(i) for i, _ in enumerate(response, 1))
    return TrainSample(tuple(prompt), tuple(response), log_probs, tuple(mask or [1] * len(response)), reward, group)


def test_responses_are_predicted_from_the_token_before():
    pack = pack_samples([sample([1, 2], [3, 4, 5]), sample([6], [7])], SHAPE)
    assert pack.ids.tolist() == [[1, 2, 3, 4, 5, 6, 7, 0]]
    assert pack.positions.tolist() == [[0, 1, 2, 3, 4, 0, 1, 0]]
    assert pack.rows.tolist() == [1, 2, 3, 5]
    assert pack.targets.tolist() == [3, 4, 5, 7]


def test_padding_is_a_segment_of_its_own_and_only_where_needed():
    assert pack_samples([sample([1, 2], [3])], SHAPE).params.cu_seqlens_q.tolist() == [0, 3, 4]
    assert pack_samples([sample([1, 2], [3, 4])], SHAPE).params.cu_seqlens_q.tolist() == [0, 4]


def test_no_samples_are_a_pack_of_padding():
    pack = pack_samples([], SHAPE)
    assert pack.ids.tolist() == [[0, 0, 0, 0]]
    assert pack.rows.tolist() == []
    assert pack.params.cu_seqlens_q.tolist() == [0, 4]


def test_ids_outside_the_vocabulary_are_refused():
    with pytest.raises(TrainerError, match="1 to 100, but the vocabulary has 100"):
        make_pack([[1, 100, 2, 3]], [1], SHAPE)
    with pytest.raises(TrainerError, match="-1"):
        make_pack([[1, -1]], [1], SHAPE)


def test_targets_follow_their_own_sample():
    """Every token gets the advantage of its sample, whatever else is in the micro-batch."""
    samples = [
        sample([1], [2, 3], reward=1.0, group=(1.0, 0.0, 0.0, 0.0)),
        sample([1], [4], reward=0.0, group=(1.0, 0.0)),
        sample([1], [5], reward=0.0, group=(1.0, 0.0, 0.0, 0.0)),
    ]
    work = UpdateWork((tuple(samples),), num_rollouts=3, num_tokens=4)
    algorithm = algorithm_of(GrpoSection(kl=KlSection(coef=0.1)))
    samples = [replace(s, ref_log_probs=tuple(x - 0.5 for x in s.log_probs)) for s in samples]
    advantages = algorithm.advantages(advantage_batch(samples), lambda values: values)
    targets = target_tensors(samples, advantages, algorithm=algorithm, work=work, device=SHAPE.device)
    assert targets.advantages.tolist() == pytest.approx([1.5, 1.5, -(0.5**0.5), -0.5])
    assert targets.rollout_log_probs.tolist() == [-1.0, -2.0, -1.0, -1.0]
    assert targets.ref_log_probs is not None
    assert targets.ref_log_probs.tolist() == [-1.5, -2.5, -1.5, -1.5]
    assert targets.teacher_log_probs is None
    assert targets.weights.tolist() == pytest.approx([1 / 6, 1 / 6, 1 / 3, 1 / 3])
    assert targets.sequences.sample.tolist() == [0, 0, 1, 2]


def test_a_constant_length_stands_in_the_place_of_the_tokens():
    """Dr. GRPO: two rollouts, a constant of 10 tokens each."""
    samples = [sample([1], [2, 3, 4]), sample([1], [5])]
    work = UpdateWork((tuple(samples),), num_rollouts=2, num_tokens=4)
    _, weights = loss_weights(samples, loss_mean="constant", loss_tokens=10, work=work)
    assert weights.tolist() == pytest.approx([1 / 20] * 4)
    _, weights = loss_weights(samples, loss_mean="token", loss_tokens=None, work=work)
    assert weights.tolist() == pytest.approx([1 / 4] * 4)
    fanned = [replace(s, rollout_tokens=4) for s in samples]
    _, weights = loss_weights(fanned, loss_mean="rollout", loss_tokens=None, work=replace(work, num_rollouts=1))
    assert weights.tolist() == pytest.approx([1 / 4] * 4)


def test_the_mask_is_the_samples_whatever_tokens_it_holds():
    """A response that was cut off has no end token; its mask still covers exactly its tokens."""
    samples = [sample([1], [5, 6, 7]), sample([1], [5, 6, 7], mask=[1, 0, 1])]
    work = UpdateWork((tuple(samples),), num_rollouts=2, num_tokens=5)
    targets = target_tensors(samples, torch.zeros(6), algorithm=algorithm_of(SftSection()), work=work, device=SHAPE.device)
    assert targets.mask.tolist() == [True, True, True, True, False, True]


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (TrainSample((1,), (2, 3), (-1.0,), (1, 1), 1.0, (1.0,)), "log_probs has 1 entries for 2"),
        (TrainSample((1,), (2, 3), (-1.0, -1.0), (1,), 1.0, (1.0,)), "loss_mask has 1 entries for 2"),
        (TrainSample((1,), (2,), (-1.0,), (1,), None, (1.0,)), "no reward"),
        (TrainSample((), (2,), (-1.0,), (1,), 1.0, (1.0,)), "no prompt"),
    ],
)
def test_fields_that_do_not_fit_are_named(made, words):
    with pytest.raises(TrainerError, match=f"sample 1 of the micro-batch: .*{words}"):
        check_samples([sample([1], [2]), made], algorithm_of(GrpoSection()))


@pytest.mark.parametrize(
    ("section", "field"),
    [
        (GrpoSection(kl=KlSection(coef=0.1)), "ref_log_probs"),
        (PpoSection(), "values"),
        (DistillSection(), "teacher_log_probs"),
    ],
)
def test_facts_that_an_algorithm_reads_must_be_there(section, field):
    algorithm, rows = algorithm_of(section), [sample([1], [2, 3])]
    with pytest.raises(TrainerError, match=f"{field} has 0 entries for 2 response tokens"):
        check_samples(rows, algorithm)
    check_samples([replace(rows[0], **{field: (0.0, 0.0)})], algorithm)


def test_supervised_rows_need_neither_log_probs_nor_reward():
    check_samples([TrainSample((1,), (2, 3), (), (1, 1), None, ())], algorithm_of(SftSection()))


@pytest.mark.parametrize(
    ("lengths", "cap", "parts"),
    [([7] * 3, 8, [[0], [1], [2]]), ([4, 4, 1], 8, [[0, 1], [2]]), ([9, 1, 7], 8, [[0], [1, 2]]), ([], 8, [])],
)
def test_splits_respect_the_cap_in_order(lengths, cap, parts):
    assert split_by_tokens(lengths, cap) == parts
