"""Which steps a run makes, and how a batch is packed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vime.config.schema import StopWhen
from vime.data.schedule import Split, StepSchedule, check_updates, plan_updates, rank_samples, steps_that_data_allows
from vime.errors import ConfigError, TrainerError
from vime.types import Group, PromptId, SampleInfo, SampleRef, SampleStatus, UpdatePlan


def group(
    lengths: Sequence[int],
    *,
    rewards: Sequence[float | None] | None = None,
    trainable: Sequence[int] | None = None,
    number: int = 0,
) -> Group:
    """Samples of `lengths` tokens, one of them the prompt; rewards differ unless given."""
    rewards = list(range(len(lengths))) if rewards is None else rewards
    trainable = [n - 1 for n in lengths] if trainable is None else trainable
    rows = zip(lengths, rewards, trainable, strict=True)
    samples = tuple(SampleInfo(i, 1, n - 1, t, r, SampleStatus.COMPLETED) for i, (n, r, t) in enumerate(rows))
    return Group(PromptId(number, 0, number), samples, payload=None)


def plan(groups: Sequence[Group], **changes: Any) -> tuple[UpdatePlan, ...]:
    cuts = {name: changes.pop(name) for name in ("dp", "max_tokens", "multiple", "square") if name in changes}
    defaults = {"updates_per_step": 1, "skip_flat": True, "supervised": False}
    return plan_updates(groups, split=Split(**{"dp": 1, "max_tokens": 100, **cuts}), **{**defaults, **changes})


def sizes(update: UpdatePlan, groups: Sequence[Group]) -> list[list[list[int]]]:
    """Token counts by rank, micro-batch and sample."""
    return [
        [[groups[ref.group].samples[ref.sample].total_tokens for ref in micro] for micro in rank]
        for rank in update.micro_batches
    ]


def refs(update: UpdatePlan) -> list[SampleRef]:
    return [ref for rank in update.micro_batches for micro in rank for ref in micro]


# ---- steps


def test_steps_count_from_the_beginning_of_the_run() -> None:
    assert list(StepSchedule(4)) == [1, 2, 3, 4]
    assert list(StepSchedule(4, start=2)) == [3, 4]
    assert list(StepSchedule(4, start=4)) == []


def test_a_run_restored_at_an_epoch_border_makes_the_rest_of_its_steps() -> None:
    steps = steps_that_data_allows(120, num_groups=2 * 60 * 8, batch_size=8, partial_last=False)
    assert list(StepSchedule(steps, start=60)) == list(range(61, 121))


def test_a_metric_ends_the_run_after_the_step_that_reached_it() -> None:
    schedule = StepSchedule(10, stop_when=StopWhen(metric="eval/a", at_least=0.5))
    seen = []
    for step in schedule:
        seen.append(step)
        schedule.observe({"eval/b": 1.0} if step == 1 else {"eval/a": {2: 0.4, 3: float("nan"), 4: 0.5}[step]})
        assert schedule.stopped == (step == 4)
    assert seen == [1, 2, 3, 4]


def test_a_metric_without_a_rule_changes_nothing() -> None:
    schedule = StepSchedule(2)
    schedule.observe({"eval/a": 1.0})
    assert list(schedule) == [1, 2]
    assert [schedule.is_last(step) for step in (1, 2)] == [False, True]


@pytest.mark.parametrize(
    ("groups", "partial", "expected"), [(None, False, 9), (10, False, 2), (10, True, 3), (8, True, 2), (99, False, 9)]
)
def test_steps_end_with_the_data(groups: int | None, partial: bool, expected: int) -> None:
    assert steps_that_data_allows(9, num_groups=groups, batch_size=4, partial_last=partial) == expected


# ---- the cap


@pytest.mark.parametrize(("dp", "micro_batches"), [(1, 8), (2, 4), (3, 3), (8, 1), (16, 1)])
def test_the_cap_is_strict_on_real_tokens(dp: int, micro_batches: int) -> None:
    (update,) = plan([group([7] * 8)], max_tokens=8, dp=dp)
    assert [len(rank) for rank in update.micro_batches] == [micro_batches] * dp
    assert max(sum(micro) for rank in sizes(update, [group([7] * 8)]) for micro in rank) == 7
    assert sorted(refs(update), key=lambda ref: ref.sample) == [SampleRef(0, i) for i in range(8)]


def test_a_sample_as_long_as_the_cap_fits_and_a_longer_one_is_refused_before_any_work() -> None:
    (update,) = plan([group([8, 8])], max_tokens=8)
    assert len(update.micro_batches[0]) == 2
    with pytest.raises(
        TrainerError, match=r"sample 1 of group 4 has 9 tokens, .*micro_batch is 8 \(data-parallel size 2\)"
    ) as e:
        plan([group([8, 2]), group([1, 9], number=4)], max_tokens=8, dp=2)
    assert "raise the cap" in str(e.value)


def test_packs_into_the_fewest_micro_batches_and_evens_them_out() -> None:
    groups = [group([6, 5, 4, 3, 2])]
    (update,) = plan(groups, max_tokens=10)
    assert sizes(update, groups) == [[[6, 4], [5, 3, 2]]]
    (wide,) = plan(groups, max_tokens=100, dp=2)
    assert sorted(sum(micro) for rank in sizes(wide, groups) for micro in rank) == [10, 10]


def test_equal_lengths_are_neighbours() -> None:
    groups = [group([3, 5, 3, 5]), group([5, 3, 5, 3], number=1)]
    (update,) = plan(groups)
    assert sizes(update, groups) == [[[5, 5, 5, 5, 3, 3, 3, 3]]]
    (split,) = plan(groups, max_tokens=16)
    assert sizes(split, groups) == [[[3, 3, 3, 3], [5, 5], [5, 5]]]


def test_same_batch_same_plan() -> None:
    groups = [group([3, 9, 4, 4], number=i) for i in range(6)]
    assert plan(groups, dp=3, max_tokens=13) == plan(list(groups), dp=3, max_tokens=13)


def test_ranks_get_like_micro_batches_and_totals() -> None:
    groups = [group([90, 10, 80, 20, 70, 30, 60, 40, 50, 50])]
    (update,) = plan(groups, dp=2, max_tokens=100)
    loads = [[sum(micro) for micro in rank] for rank in sizes(update, groups)]
    assert [sum(rank) for rank in loads] == [250, 250]
    assert [len(rank) for rank in loads] == [3, 3]
    assert all(abs(a - b) <= 10 for a, b in zip(*loads, strict=True))


def test_even_ranks_do_not_cost_another_micro_batch() -> None:
    groups = [group([6, 4, 4, 4, 2])]
    (update,) = plan(groups, dp=2, max_tokens=10)
    assert sizes(update, groups) == [[[6, 4]], [[4, 4, 2]]]
    odd = [group([7, 6, 4, 3])]
    (uneven,) = plan(odd, dp=2, max_tokens=10)
    assert sizes(uneven, odd) == [[[7, 3]], [[6, 4]]]
    forced = [group([5, 5, 4, 4, 2])]
    (dealt,) = plan(forced, dp=2, max_tokens=10)
    assert [len(rank) for rank in dealt.micro_batches] == [1, 1]


# ---- what counts


def test_flat_groups_leave_the_work_but_not_the_denominators() -> None:
    groups = [group([3, 3], rewards=[1, 1]), group([4, 5], rewards=[0, 1], number=1), group([6], rewards=[2], number=2)]
    (skipped,) = plan(groups)
    (kept,) = plan(groups, skip_flat=False)
    assert refs(skipped) == [SampleRef(1, 1), SampleRef(1, 0)]
    assert len(refs(kept)) == 5
    assert (skipped.num_rollouts, skipped.num_tokens) == (kept.num_rollouts, kept.num_tokens) == (5, 2 + 2 + 3 + 4 + 5)


def test_masked_samples_leave_the_work_but_count_as_rollouts() -> None:
    (update,) = plan([group([5, 6, 7], trainable=[4, 0, 2])])
    assert refs(update) == [SampleRef(0, 2), SampleRef(0, 0)]
    assert (update.num_rollouts, update.num_tokens) == (3, 6)


def test_samples_without_a_reward_count_nowhere() -> None:
    groups = [group([5, 6, 7], rewards=[0, None, 1]), group([5, 6], rewards=[1, None], number=1)]
    (update,) = plan(groups)
    assert refs(update) == [SampleRef(0, 2), SampleRef(0, 0)]
    assert (update.num_rollouts, update.num_tokens) == (3, 4 + 6 + 4)


def test_supervised_samples_have_no_reward_and_are_all_trained() -> None:
    (update,) = plan([group([5], rewards=[None]), group([5], rewards=[None], number=1)], supervised=True)
    assert len(refs(update)) == 2
    assert (update.num_rollouts, update.num_tokens) == (2, 8)


def test_nothing_to_work_on_gives_every_rank_no_micro_batch() -> None:
    (update,) = plan([group([3, 3], rewards=[0, 0])], dp=3)
    assert update.micro_batches == ((), (), ())
    assert (update.num_rollouts, update.num_tokens) == (2, 4)


@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("max_tokens", [10, 11, 100])
def test_a_token_mean_does_not_depend_on_the_split(dp: int, max_tokens: int) -> None:
    groups = [group([2, 10], trainable=[1, 9])]
    loss = {SampleRef(0, 0): 1.0, SampleRef(0, 1): 0.0}
    (update,) = plan(groups, dp=dp, max_tokens=max_tokens)
    assert sum(loss[ref] / update.num_tokens for ref in refs(update)) == 0.1


def test_rank_local_figures_pair_each_length_with_its_own_reward() -> None:
    groups = [group([10, 20, 30, 40], rewards=[1, 0, 0, 1])]
    parts = (((SampleRef(0, 0), SampleRef(0, 2)),), ((SampleRef(0, 1), SampleRef(0, 3)),))
    local = [rank_samples(UpdatePlan(parts, 4, 96), rank, groups=groups) for rank in (0, 1)]
    assert [[s.total_tokens for s in samples if s.reward == 1] for samples in local] == [[10], [40]]


# ---- updates


def test_updates_are_whole_groups_in_delivery_order_with_denominators_of_their_own() -> None:
    groups = [
        group([3, 4], number=9),
        group([5, 6], number=2),
        group([7, 8], rewards=[1, 1], number=5),
        group([9, 2], number=1),
    ]
    updates = plan(groups, updates_per_step=2)
    assert [sorted({ref.group for ref in refs(update)}) for update in updates] == [[0, 1], [3]]
    assert [(update.num_rollouts, update.num_tokens) for update in updates] == [(4, 14), (4, 22)]


@pytest.mark.parametrize(
    ("batch", "updates", "advice"),
    [
        (12, 5, "use 4 or 6 updates, or batches of 10 or 15 groups"),
        (8, 9, "use 8 updates, or batches of 9 groups"),
        (7, 2, "use 1 or 7 updates, or batches of 6 or 8 groups"),
        (4, 0, "use 1 updates"),
    ],
)
def test_updates_must_divide_the_batch(batch: int, updates: int, advice: str) -> None:
    with pytest.raises(ConfigError, match=f"updates_per_step {updates} does not divide a batch of {batch} groups") as caught:
        check_updates(batch, updates)
    assert caught.value.fix == advice
    with pytest.raises(ConfigError):
        plan([group([2, 2], number=i) for i in range(batch)], updates_per_step=updates)


def test_updates_that_divide_are_accepted() -> None:
    for updates in (1, 2, 3, 4, 6, 12):
        check_updates(12, updates)


def test_a_smaller_last_supervised_batch_splits_as_evenly_as_it_can() -> None:
    groups = [group([2], rewards=[None], number=i) for i in range(5)]
    updates = plan(groups, updates_per_step=2, supervised=True)
    assert [[ref.group for ref in refs(update)] for update in updates] == [[0, 1], [2, 3, 4]]
    assert len(plan(groups[:1], updates_per_step=3, supervised=True)) == 1


@pytest.mark.parametrize("changes", [{"dp": 0}, {"max_tokens": 0}, {"multiple": 0}, {"square": -0.1}])
def test_sizes_are_checked(changes: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        plan([group([2, 2])], **changes)


# ---- work


def work(lengths: Sequence[int], square: float) -> float:
    return sum(n + square * n * n for n in lengths)


def test_attention_counts_in_what_makes_ranks_even() -> None:
    """By tokens 8 and 4 + 4 are even; by pairs of tokens the long sample weighs as much as four short ones."""
    groups = [group([8, 4, 4, 4, 4, 8])]
    (by_tokens,) = plan(groups, dp=2)
    assert [sum(map(sum, rank)) for rank in sizes(by_tokens, groups)] == [16, 16]
    groups = [group([8, 4, 4, 4, 4])]
    (by_work,) = plan(groups, dp=2, square=100.0)
    assert sorted([n for micro in rank for n in micro] for rank in sizes(by_work, groups)) == [[4, 4, 4, 4], [8]]


def test_differences_even_out_what_greed_does_not() -> None:
    """Each to the rank with the least so far, 8 7 6 5 4 would be 8 + 5 + 4 = 17 and 7 + 6 = 13."""
    groups = [group([8, 7, 6, 5, 4])]
    (update,) = plan(groups, dp=2)
    assert [sum(map(sum, rank)) for rank in sizes(update, groups)] == [15, 15]
    (apart,) = plan(groups, dp=2, max_tokens=8)
    assert max(sum(map(sum, rank)) for rank in sizes(apart, groups)) <= 16


@pytest.mark.parametrize(("cap", "micro_batches"), [(100, 2), (40, 2), (21, 4), (15, 6)])
def test_a_virtual_pipeline_gets_whole_rounds_of_micro_batches(cap: int, micro_batches: int) -> None:
    """60 tokens in parts of at most the cap, in pairs; room that rounding makes is used to make them smaller."""
    groups = [group([10] * 6)]
    (update,) = plan(groups, max_tokens=cap, multiple=2)
    loads = [sum(micro) for micro in sizes(update, groups)[0]]
    assert (len(loads), sum(loads)) == (micro_batches, 60)
    assert max(loads) <= min(cap, 30)


def test_too_few_samples_for_a_round_leave_micro_batches_without_any() -> None:
    (update,) = plan([group([5], rewards=[1.0])], multiple=4, skip_flat=False)
    assert [len(micro) for micro in update.micro_batches[0]] == [1, 0, 0, 0]


# ---- any batch


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=6), min_size=1, max_size=12),
    dp=st.integers(1, 5),
    cap=st.integers(40, 90),
    multiple=st.integers(1, 4),
    square=st.sampled_from([0.0, 0.01, 1.0]),
)
def test_any_batch_is_packed_whole_within_the_cap_and_evenly(
    lengths: list[list[int]], dp: int, cap: int, multiple: int, square: float
) -> None:
    groups = [group(one, trainable=[1] * len(one), number=i) for i, one in enumerate(lengths)]
    (update,) = plan(groups, dp=dp, max_tokens=cap, multiple=multiple, square=square, skip_flat=False)
    assert Counter(refs(update)) == Counter(SampleRef(i, j) for i, one in enumerate(lengths) for j in range(len(one)))
    loads = [[sum(micro) for micro in rank] for rank in sizes(update, groups)]
    assert len({len(rank) for rank in loads}) == 1
    assert max(max(rank) for rank in loads) <= cap
    total = sum(map(sum, lengths))
    fewest = math.ceil(math.ceil(total / cap) / dp)
    assert len(loads[0]) % multiple == 0
    assert fewest <= len(loads[0]) < math.ceil((2 * total / cap + 1) / dp) + multiple
    works = [[work(micro, square) for micro in rank] for rank in sizes(update, groups)]
    assert max(map(sum, works)) - min(map(sum, works)) <= max(max(rank) for rank in works) + 1e-6
    assert all(micro == sorted(micro, reverse=True) for rank in sizes(update, groups) for micro in rank)


def test_samples_of_one_rollout_are_one_in_the_denominator() -> None:
    """Three samples of rollout 1 in one group, the same number in another group, and a sample that is a whole rollout."""
    fanned, other = group([3, 4, 5, 6]), group([3, 3], number=1)
    fanned = replace(fanned, samples=(*(replace(info, rollout=1) for info in fanned.samples[:3]), fanned.samples[3]))
    other = replace(other, samples=tuple(replace(info, rollout=1) for info in other.samples))
    (update,) = plan([fanned, other], dp=2)
    assert update.num_rollouts == 3
    assert len(refs(update)) == 6
