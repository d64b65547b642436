"""Samples by reference arrive on the rank that trains them, with the rewards of their own siblings."""

from __future__ import annotations

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


def test_the_oldest_version_is_that_of_a_trained_token() -> None:
    old, new = PolicyVersion(0, 3), PolicyVersion(0, 4)
    spans = (VersionSpan(old, 0, 1), VersionSpan(new, 1, 2))
    assert oldest_version([sample(0, 0.0, spans=spans)]) == old
    assert oldest_version([sample(0, 0.0, spans=spans, mask=(0, 1))]) == new
    assert oldest_version([sample(0, 0.0)]) is None


def test_data_parallel_rank_of_a_global_rank() -> None:
    layout = Parallel(tp=2, pp=2, dp=2)
    assert [data_parallel_rank(rank, layout) for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
