"""Samples by reference arrive on the rank that trains them, with the rewards of their own siblings."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from vime.cluster.payload import GroupPayload, group_info, oldest_version, rank_work, resolve
from vime.cluster.trainer_role import data_parallel_rank
from vime.facts.process import Parallel
from vime.types import PolicyVersion, PromptId, Sample, SampleRef, SampleStatus, UpdatePlan, VersionSpan


def sample(index: int, reward: float, *, spans: tuple[VersionSpan, ...] = (), mask: tuple[int, ...] = (1, 1)) -> Sample:
    response = tuple(range(len(mask)))
    return Sample(index, (7, index), response, (0.0,) * len(mask), mask, SampleStatus.COMPLETED, spans, reward)


def test_each_rank_fetches_only_its_bundles_and_gets_its_own_rewards() -> None:
    bundles = {"ref-a": ((sample(0, 1.0), sample(1, 0.0)), (sample(0, 0.5), sample(1, 0.25))), "ref-b": ((sample(0, 3.0),),)}
    groups = [
        group_info(bundles["ref-a"][1], prompt=PromptId(0, 0, 0), payload=GroupPayload("ref-a", 1)),
        group_info(bundles["ref-b"][0], prompt=PromptId(1, 0, 1), payload=GroupPayload("ref-b", 0)),
    ]
    plan = UpdatePlan((((SampleRef(0, 1),), ()), ((SampleRef(1, 0),), (SampleRef(0, 0),))), 3, 6)
    first, second = rank_work(groups, [plan], rank=0), rank_work(groups, [plan], rank=1)
    assert first.refs == ("ref-a",)
    assert second.refs == ("ref-b", "ref-a")
    (work,) = resolve(second, [bundles[ref] for ref in second.refs])
    assert (work.num_rollouts, work.num_tokens) == (3, 6)
    assert [[(s.prompt_ids, s.reward, s.group_rewards) for s in mb] for mb in work.micro_batches] == [
        [((7, 0), 3.0, (3.0,))],
        [((7, 0), 0.5, (0.5, 0.25))],
    ]


def test_the_experts_of_a_sample_s_tokens_arrive_with_it() -> None:
    ids = np.arange(12, dtype=np.uint8).reshape(4, 3, 1)
    samples = (replace(sample(0, 1.0), routed_experts=ids), sample(1, 0.0))
    group = group_info(samples, prompt=PromptId(0, 0, 0), payload=GroupPayload("ref", 0))
    plan = UpdatePlan((((SampleRef(0, 1), SampleRef(0, 0)),),), 2, 4)
    (work,) = resolve(rank_work([group], [plan], rank=0), [(samples,)])
    plain, routed = work.micro_batches[0]
    assert plain.routed_experts is None
    assert routed.routed_experts is ids


def test_the_oldest_version_is_that_of_a_trained_token() -> None:
    old, new = PolicyVersion(0, 3), PolicyVersion(0, 4)
    spans = (VersionSpan(old, 0, 1), VersionSpan(new, 1, 2))
    assert oldest_version([sample(0, 0.0, spans=spans)]) == old
    assert oldest_version([sample(0, 0.0, spans=spans, mask=(0, 1))]) == new
    assert oldest_version([sample(0, 0.0)]) is None


def test_a_group_tells_which_share_of_its_samples_an_update_met() -> None:
    old, new = PolicyVersion(0, 3), PolicyVersion(0, 4)
    mixed, whole = (VersionSpan(old, 0, 1), VersionSpan(new, 1, 2)), (VersionSpan(new, 0, 2),)
    samples = [sample(0, 0.0, spans=mixed), *(sample(i, 0.0, spans=whole) for i in (1, 2, 3))]
    group = group_info(samples, prompt=PromptId(0, 0, 0), payload=GroupPayload("ref", 0))
    assert group.metrics == {"mixed_versions": 0.25}
    assert group.oldest == old
    assert group_info([sample(0, 0.0)], prompt=PromptId(0, 0, 0), payload=GroupPayload("ref", 0)).metrics == {}


def test_data_parallel_rank_of_a_global_rank() -> None:
    layout = Parallel(tp=2, pp=2, dp=2)
    assert [data_parallel_rank(rank, layout) for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]


def test_a_group_s_rewards_and_lengths_are_those_of_its_scored_samples() -> None:
    """A sample that no grader could score is no sibling: a baseline with it would not be a number."""
    samples = (sample(0, 1.0), replace(sample(1, 0.0), reward=None), sample(2, 0.5, mask=(1, 1, 1)))
    group = group_info(samples, prompt=PromptId(0, 0, 0), payload=GroupPayload("ref", 0))
    plan = UpdatePlan((((SampleRef(0, 0), SampleRef(0, 2)),),), 2, 5)
    (work,) = resolve(rank_work([group], [plan], rank=0), [(samples,)])
    found = [(s.reward, s.group_rewards, s.group_lengths) for batch in work.micro_batches for s in batch]
    assert found == [(1.0, (1.0, 0.5), (2, 3)), (0.5, (1.0, 0.5), (2, 3))]


def test_samples_of_one_rollout_count_once_and_share_its_tokens() -> None:
    """A rollout in two samples beside one of a single sample; an unscored part of it counts nowhere."""
    samples = (
        replace(sample(0, 1.0), rollout=7),
        replace(sample(1, 1.0, mask=(1, 0, 1, 1)), rollout=7),
        replace(sample(2, 0.0), reward=None, rollout=7),
        sample(3, 0.0),
    )
    group = group_info(samples, prompt=PromptId(0, 0, 0), payload=GroupPayload("ref", 0))
    plan = UpdatePlan((((SampleRef(0, 1), SampleRef(0, 3)),),), 2, 7)
    (work,) = resolve(rank_work([group], [plan], rank=0), [(samples,)])
    found = [(s.group_rewards, s.group_weights, s.rollout_tokens) for s in work.micro_batches[0]]
    assert found == [((1.0, 1.0, 0.0), (0.5, 0.5, 1.0), 5), ((1.0, 1.0, 0.0), (0.5, 0.5, 1.0), 0)]
