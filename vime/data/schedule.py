"""Which steps a run makes, and how a batch becomes optimizer updates, ranks and micro-batches."""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from vime.config.rules import nearest_updates
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
    raise ConfigError(
        f"trainer.updates_per_step {updates_per_step} does not divide a batch of {batch_size} groups",
        fix=nearest_updates(batch_size, updates_per_step),
    )


@dataclass(frozen=True, slots=True)
class Split:
    """How the work of an update is cut.

    `dp` data-parallel ranks; `max_tokens` is a strict cap on the real tokens (prompt and response) of a micro-batch;
    `multiple` is what the number of micro-batches must be a multiple of (the stages of a virtual pipeline). The work of a
    sample of n tokens is taken as n + `square` n^2, in units of a token's work outside attention.
    """

    dp: int
    max_tokens: int
    multiple: int = 1
    square: float = 0.0

    def __post_init__(self) -> None:
        if min(self.dp, self.max_tokens, self.multiple) < 1 or self.square < 0:
            raise ConfigError(f"expected dp, max_tokens and multiple >= 1 and square >= 0, got {self}")


def plan_updates(
    groups: Sequence[Group], *, split: Split, updates_per_step: int, skip_flat: bool, supervised: bool
) -> tuple[UpdatePlan, ...]:
    """Split a batch into optimizer updates and each update into ranks of equally many micro-batches.

    Groups stay whole and in delivery order across updates. Inside an update samples go to ranks so that their work is even,
    and by decreasing length into the fewest micro-batches that `split` allows; then the fullest micro-batch is made as small
    as that number allows (MULTIFIT, Coffman, Garey and Johnson 1978). Micro-batches come largest first, equal lengths next to
    each other.

    Left out of the work, because their gradient is zero, but counted in `num_rollouts` and `num_tokens`: samples without
    trainable tokens, and with `skip_flat` the groups whose scored samples have equal rewards. Neither worked on nor counted:
    samples without a reward, unless `supervised`. An update of nothing but such samples has no micro-batch; the optimizer
    step is still made, with zero gradient.

    Args:
        split: ranks, cap, and what makes work even.
        supervised: samples carry labels instead of rewards; a smaller last batch of an epoch may split unevenly.

    Raises:
        TrainerError: a sample is longer than the cap.
        ConfigError: `updates_per_step` does not divide the groups.
    """
    _check_lengths(groups, split)
    if not supervised:
        check_updates(len(groups), updates_per_step)
    bounds = [round(i * len(groups) / updates_per_step) for i in range(updates_per_step + 1)]
    plans = []
    for first, end in itertools.pairwise(bounds):
        if first < end:
            counted = _counted(groups, range(first, end), supervised=supervised)
            plans.append(_plan(groups, counted, split=split, skip_flat=skip_flat and not supervised))
    return tuple(plans)


def rank_samples(plan: UpdatePlan, rank: int, *, groups: Sequence[Group]) -> list[SampleInfo]:
    """The samples that `rank` trains, in its order: what rank-local figures are computed from."""
    return [groups[ref.group].samples[ref.sample] for micro in plan.micro_batches[rank] for ref in micro]


@dataclass(frozen=True, slots=True)
class _Item:
    ref: SampleRef
    tokens: int
    work: float


T = TypeVar("T")
_Bins = list[list[_Item]]
"""Micro-batches, or the samples of several ranks."""


def _check_lengths(groups: Sequence[Group], split: Split) -> None:
    for group in groups:
        for info in group.samples:
            if info.total_tokens > split.max_tokens:
                raise TrainerError(
                    f"sample {info.index} of group {group.prompt.group} has {info.total_tokens} tokens, "
                    f"trainer.max_tokens_per_micro_batch is {split.max_tokens} (data-parallel size {split.dp})",
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


def _plan(groups: Sequence[Group], counted: Sequence[SampleRef], *, split: Split, skip_flat: bool) -> UpdatePlan:
    def info(ref: SampleRef) -> SampleInfo:
        return groups[ref.group].samples[ref.sample]

    rewards: dict[int, set[float | None]] = {}
    for ref in counted:
        rewards.setdefault(ref.group, set()).add(info(ref).reward)
    work = [
        _Item(ref, n := info(ref).total_tokens, n + split.square * n * n)
        for ref in counted
        if info(ref).trainable_tokens > 0 and not (skip_flat and len(rewards[ref.group]) == 1)
    ]
    return UpdatePlan(
        micro_batches=_pack(work, split),
        num_rollouts=len({(ref.group, _rollout(ref, info(ref))) for ref in counted}),
        num_tokens=sum(info(ref).trainable_tokens for ref in counted),
    )


def _rollout(ref: SampleRef, info: SampleInfo) -> tuple[str, int]:
    """What a sample counts with among the rollouts of its group."""
    return ("sample", ref.sample) if info.rollout is None else ("rollout", info.rollout)


def _pack(items: Sequence[_Item], split: Split) -> tuple[tuple[tuple[SampleRef, ...], ...], ...]:
    """Micro-batches by rank. Of three ways, the one with fewer micro-batches, then with the least work of the busiest rank.

    Samples go to ranks and then into micro-batches, shared out greedily or by differences; or they go into micro-batches and
    these to ranks.
    """
    ordered = sorted(items, key=lambda item: (-item.tokens, item.ref.group, item.ref.sample))
    shares = (_share(ordered, split.dp), _differenced(ordered, split.dp, load=lambda item: item.work))
    ways = [*(_by_rank(share, split) for share in shares), _at_large(ordered, split)]
    ranks = min(ways, key=lambda way: (max(map(len, way)), max(sum(map(_work, rank)) for rank in way)))
    rows = _rows(max(map(len, ranks)), split)
    plan = []
    for rank in ranks:
        largest_first = sorted(rank, key=lambda members: -_tokens(members))
        micro_batches = [tuple(item.ref for item in members) for members in largest_first]
        plan.append((*micro_batches, *[()] * (rows - len(micro_batches))))
    return tuple(plan)


def _rows(count: int, split: Split) -> int:
    """The next number of micro-batches that is a multiple."""
    return math.ceil(count / split.multiple) * split.multiple


def _by_rank(shares: Sequence[list[_Item]], split: Split) -> list[_Bins]:
    """Micro-batches of each rank's samples, as many as the rank with the most of them needs."""
    shares = [sorted(share, key=lambda item: (-item.tokens, item.ref.group, item.ref.sample)) for share in shares]
    packed = [_fit(share, capacity=split.max_tokens) for share in shares]
    most = _rows(max(len(bins) for bins in packed), split)
    return [_even_out(share, bins=bins, num_bins=most) for share, bins in zip(shares, packed, strict=True)]


def _at_large(ordered: Sequence[_Item], split: Split) -> list[_Bins]:
    """Micro-batches of all samples, shared out to the ranks whole."""
    bins = _fit(ordered, capacity=split.max_tokens)
    rows = _rows(math.ceil(len(bins) / split.dp), split)
    return _differenced(_even_out(ordered, bins=bins, num_bins=rows * split.dp), split.dp, load=_work)


def _share(ordered: Sequence[_Item], dp: int) -> _Bins:
    """Each item, longest first, to the rank with the least work so far."""
    shares: _Bins = [[] for _ in range(dp)]
    loads = [(0.0, rank) for rank in range(dp)]
    for item in ordered:
        work, rank = heapq.heappop(loads)
        shares[rank].append(item)
        heapq.heappush(loads, (work + item.work, rank))
    return shares


def _differenced(things: Sequence[T], ways: int, *, load: Callable[[T], float]) -> list[list[T]]:
    """`ways` shares of equally many things (or one fewer) whose loads are even.

    The differencing method of Karmarkar and Karp (1982) in its balanced form (Michiels, Korst and Aarts 2003, Electronic Notes
    in Discrete Mathematics 15): things are taken `ways` at a time by decreasing load; then the two partial solutions with the
    largest spreads become one, the lightest share of either beside the heaviest of the other, until one is left.
    """
    ordered = sorted(things, key=lambda thing: -load(thing))
    count = itertools.count()
    heap: list[tuple[float, int, list[tuple[float, list[T]]]]] = []

    def push(shares: list[tuple[float, list[T]]]) -> None:
        shares.sort(key=lambda share: -share[0])
        heapq.heappush(heap, (shares[-1][0] - shares[0][0], next(count), shares))

    for first in range(0, max(len(ordered), 1), ways):
        some = [(load(thing), [thing]) for thing in ordered[first : first + ways]]
        push(some + [(0.0, [])] * (ways - len(some)))
    while len(heap) > 1:
        (_, _, one), (_, _, other) = heapq.heappop(heap), heapq.heappop(heap)
        push([(a + b, left + right) for (a, left), (b, right) in zip(one, reversed(other), strict=True)])
    return [members for _, members in heap[0][2]]


def _work(members: Sequence[_Item]) -> float:
    return sum(item.work for item in members)


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
