"""Which steps a run makes, and how a batch becomes optimizer updates, ranks and micro-batches."""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from vime.config.schema import StopWhen
from vime.errors import ConfigError, TrainerError
from vime.types import Group, SampleInfo, SampleRef, UpdatePlan


class StepSchedule:
    """The steps after `start` up to `num_steps`, fewer once an evaluation metric is good enough.

    `num_steps` counts from the beginning of the run and does not depend on epochs: a run restored at an epoch border goes on.
    """

    def __init__(self, num_steps: int, *, start: int = 0, stop_when: StopWhen | None = None) -> None:
        self._num_steps = num_steps
        self._start = start
        self._stop_when = stop_when
        self._stopped = False

    def __iter__(self) -> Iterator[int]:
        for step in range(self._start + 1, self._num_steps + 1):
            if self._stopped:
                return
            yield step

    @property
    def stopped(self) -> bool:
        """The metric was reached: the step in progress is the last one."""
        return self._stopped

    def is_last(self, step: int) -> bool:
        """Known before the step's evaluation, so a stop by metric is not foreseen here."""
        return step >= self._num_steps or self._stopped

    def observe(self, metrics: Mapping[str, float]) -> None:
        """Look for the metric that ends the run; others, and its absence, change nothing."""
        if self._stop_when is not None and self._stop_when.metric in metrics:
            self._stopped = self._stopped or metrics[self._stop_when.metric] >= self._stop_when.at_least


def steps_that_data_allows(num_steps: int, *, num_groups: int | None, batch_size: int, partial_last: bool) -> int:
    """`num_steps`, or fewer where `num_groups` prompts fill fewer batches (None: no limit)."""
    if num_groups is None:
        return num_steps
    batches = math.ceil(num_groups / batch_size) if partial_last else num_groups // batch_size
    return min(num_steps, batches)


def check_updates(batch_size: int, updates_per_step: int) -> None:
    """Updates are made of whole groups. Raises ConfigError naming the nearest numbers that divide the batch."""
    if updates_per_step >= 1 and batch_size % updates_per_step == 0:
        return
    divisors = [n for n in range(1, batch_size + 1) if batch_size % n == 0]
    below = [n for n in divisors if n < updates_per_step][-1:]
    above = [n for n in divisors if n > updates_per_step][:1]
    lower = batch_size - batch_size % max(updates_per_step, 1)
    sizes = [n for n in (lower, lower + updates_per_step) if n > 0] if updates_per_step >= 1 else []
    other = f", or batches of {' or '.join(map(str, sizes))} groups" if sizes else ""
    raise ConfigError(
        f"trainer.updates_per_step {updates_per_step} does not divide a batch of {batch_size} groups",
        fix=f"use {' or '.join(map(str, below + above))} updates{other}",
    )


def plan_updates(
    groups: Sequence[Group], *, dp: int, max_tokens: int, updates_per_step: int, skip_flat: bool, supervised: bool
) -> tuple[UpdatePlan, ...]:
    """Split a batch into optimizer updates and each update into `dp` ranks of equally many micro-batches.

    Groups stay whole and in delivery order across updates. Inside an update samples go to ranks so that loads are even, and
    by decreasing length into the fewest micro-batches; then the fullest micro-batch is made as small as that number allows
    (MULTIFIT, Coffman, Garey and Johnson 1978). Micro-batches come largest first, equal lengths next to each other.

    Left out of the work, because their gradient is zero, but counted in `num_rollouts` and `num_tokens`: samples without
    trainable tokens, and with `skip_flat` the groups whose scored samples have equal rewards. Neither worked on nor counted:
    samples without a reward, unless `supervised`. An update of nothing but such samples has no micro-batch; the optimizer
    step is still made, with zero gradient.

    Args:
        dp: data-parallel ranks.
        max_tokens: strict cap on the real tokens (prompt and response) of a micro-batch.
        supervised: samples carry labels instead of rewards; a smaller last batch of an epoch may split unevenly.

    Raises:
        TrainerError: a sample is longer than `max_tokens`.
        ConfigError: `updates_per_step` does not divide the groups.
    """
    if dp < 1 or max_tokens < 1:
        raise ConfigError(f"expected dp >= 1 and max_tokens >= 1, got {dp} and {max_tokens}")
    _check_lengths(groups, dp=dp, max_tokens=max_tokens)
    if not supervised:
        check_updates(len(groups), updates_per_step)
    bounds = [round(i * len(groups) / updates_per_step) for i in range(updates_per_step + 1)]
    plans = []
    for first, end in itertools.pairwise(bounds):
        if first < end:
            counted = _counted(groups, range(first, end), supervised=supervised)
            plans.append(_plan(groups, counted, dp=dp, max_tokens=max_tokens, skip_flat=skip_flat and not supervised))
    return tuple(plans)


def rank_samples(plan: UpdatePlan, rank: int, *, groups: Sequence[Group]) -> list[SampleInfo]:
    """The samples that `rank` trains, in its order: what rank-local figures are computed from."""
    return [groups[ref.group].samples[ref.sample] for micro in plan.micro_batches[rank] for ref in micro]


@dataclass(frozen=True, slots=True)
class _Item:
    ref: SampleRef
    tokens: int


def _check_lengths(groups: Sequence[Group], *, dp: int, max_tokens: int) -> None:
    for group in groups:
        for info in group.samples:
            if info.total_tokens > max_tokens:
                raise TrainerError(
                    f"sample {info.index} of group {group.prompt.group} has {info.total_tokens} tokens, "
                    f"trainer.max_tokens_per_micro_batch is {max_tokens} (data-parallel size {dp})",
                    fix="raise the cap, or lower data.max_prompt_tokens or rollout.sampling.max_response_tokens",
                )


def _counted(groups: Sequence[Group], positions: range, *, supervised: bool) -> list[SampleRef]:
    """The samples of an update that exist for the loss."""
    return [
        SampleRef(position, i)
        for position in positions
        for i, info in enumerate(groups[position].samples)
        if supervised or info.reward is not None
    ]


def _plan(groups: Sequence[Group], counted: Sequence[SampleRef], *, dp: int, max_tokens: int, skip_flat: bool) -> UpdatePlan:
    def info(ref: SampleRef) -> SampleInfo:
        return groups[ref.group].samples[ref.sample]

    rewards: dict[int, set[float | None]] = {}
    for ref in counted:
        rewards.setdefault(ref.group, set()).add(info(ref).reward)
    work = [
        _Item(ref, info(ref).total_tokens)
        for ref in counted
        if info(ref).trainable_tokens > 0 and not (skip_flat and len(rewards[ref.group]) == 1)
    ]
    return UpdatePlan(
        micro_batches=_pack(work, dp=dp, max_tokens=max_tokens),
        num_rollouts=len(counted),
        num_tokens=sum(info(ref).trainable_tokens for ref in counted),
    )


def _pack(items: Sequence[_Item], *, dp: int, max_tokens: int) -> tuple[tuple[tuple[SampleRef, ...], ...], ...]:
    """Micro-batches by rank. Of two ways, the one with fewer micro-batches, then with the lighter heaviest rank, is taken."""
    ordered = sorted(items, key=lambda item: (-item.tokens, item.ref.group, item.ref.sample))
    shares = _share(ordered, dp)
    packed = [_fit(share, capacity=max_tokens) for share in shares]
    most = max(len(bins) for bins in packed)
    by_rank = [_even_out(share, bins=bins, num_bins=most) for share, bins in zip(shares, packed, strict=True)]
    bins = _fit(ordered, capacity=max_tokens)
    at_large = _deal(_even_out(ordered, bins=bins, num_bins=math.ceil(len(bins) / dp) * dp), dp)
    ranks = min(by_rank, at_large, key=lambda way: (max(map(len, way)), max(sum(map(_tokens, rank)) for rank in way)))
    rows = max(map(len, ranks))
    plan = []
    for rank in ranks:
        largest_first = sorted(rank, key=lambda members: -_tokens(members))
        micro_batches = [tuple(item.ref for item in members) for members in largest_first]
        plan.append((*micro_batches, *[()] * (rows - len(micro_batches))))
    return tuple(plan)


def _share(ordered: Sequence[_Item], dp: int) -> list[list[_Item]]:
    """Each item, longest first, to the rank with the least tokens so far."""
    shares: list[list[_Item]] = [[] for _ in range(dp)]
    loads = [(0, rank) for rank in range(dp)]
    for item in ordered:
        tokens, rank = heapq.heappop(loads)
        shares[rank].append(item)
        heapq.heappush(loads, (tokens + item.tokens, rank))
    return shares


def _deal(bins: list[list[_Item]], dp: int) -> list[list[list[_Item]]]:
    """Whole bins to ranks, `dp` of like size at a time, the largest to the rank with the least tokens so far."""
    bins = sorted(bins, key=lambda members: -_tokens(members))
    ranks: list[list[list[_Item]]] = [[] for _ in range(dp)]
    for first in range(0, len(bins), dp):
        by_load = sorted(ranks, key=lambda rank: sum(map(_tokens, rank)))
        for rank, members in zip(by_load, bins[first : first + dp], strict=False):
            rank.append(members)
    return ranks


def _tokens(members: Sequence[_Item]) -> int:
    return sum(item.tokens for item in members)


def _fit(ordered: Sequence[_Item], *, capacity: int) -> list[list[_Item]]:
    """Best fit of decreasing lengths: each into the fullest bin that still takes it, a new bin where there is none."""
    bins: list[list[_Item]] = []
    free: list[tuple[int, int]] = []
    for item in ordered:
        at = bisect.bisect_left(free, (item.tokens, -1))
        if at == len(free):
            bins.append([item])
            bisect.insort(free, (capacity - item.tokens, len(bins) - 1))
            continue
        room, number = free.pop(at)
        bins[number].append(item)
        bisect.insort(free, (room - item.tokens, number))
    return bins


def _even_out(ordered: Sequence[_Item], *, bins: list[list[_Item]], num_bins: int) -> list[list[_Item]]:
    """The packing into at most `num_bins` bins whose fullest bin is smallest, as far as best fit finds it."""
    if not ordered:
        return bins
    low = max(ordered[0].tokens, math.ceil(_tokens(ordered) / num_bins))
    high = max(_tokens(members) for members in bins)
    while low < high:
        middle = (low + high) // 2
        tried = _fit(ordered, capacity=middle)
        if len(tried) <= num_bins:
            bins = tried
            high = max(_tokens(members) for members in tried)
        else:
            low = middle + 1
    return bins
