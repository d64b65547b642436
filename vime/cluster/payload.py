"""Samples by reference: rollout workers store bundles of groups, the driver passes references, trainer ranks fetch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from vime.types import Group, PolicyVersion, Sample, SampleInfo, SampleRef, TrainSample, UpdatePlan, UpdateWork

Bundle = tuple[tuple[Sample, ...], ...]
"""What one object in the store holds: the samples of several groups."""

Scores = Mapping[SampleRef, tuple[float, ...]]
"""What a rank that scored stores: a number for every response token, by the sample's place in the batch."""


@dataclass(frozen=True, slots=True)
class GroupPayload:
    """Where a group's samples are: an object reference and the group's position in that bundle."""

    ref: Any
    position: int


@dataclass(frozen=True, slots=True)
class SampleAddress:
    """One sample of a rank's work: bundle (position in `RankWork.refs`), group in the bundle, sample in the group.

    `group_rewards`, `group_lengths` (response tokens) and `group_weights` are those of the group's scored samples and
    `rollout_tokens` the rollout's trained tokens, as in `vime.types.TrainSample`; `place` is the sample's place in the batch.
    """

    bundle: int
    group: int
    sample: int
    group_rewards: tuple[float, ...]
    group_lengths: tuple[int, ...]
    place: SampleRef
    group_weights: tuple[float, ...] = ()
    rollout_tokens: int = 0


@dataclass(frozen=True, slots=True)
class RankUpdate:
    micro_batches: tuple[tuple[SampleAddress, ...], ...]
    num_rollouts: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class RankWork:
    """One data-parallel rank's share of a step, without the samples themselves.

    `facts` are references to `Scores` that cover these samples, by the field of `TrainSample` that they fill.
    """

    refs: tuple[Any, ...]
    updates: tuple[RankUpdate, ...]
    facts: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Scored:
    """What a scoring role left in the store: references to `Scores` by data-parallel rank, and which rank has a sample."""

    refs: tuple[Any, ...]
    holder: Mapping[SampleRef, int]

    def covering(self, places: Sequence[SampleRef]) -> tuple[Any, ...]:
        """The references that these samples are in. Raises KeyError for one that was not scored."""
        return tuple(self.refs[rank] for rank in sorted({self.holder[place] for place in places}))


def group_info(group_samples: Sequence[Sample], *, prompt: Any, payload: GroupPayload) -> Group:
    """The driver's view of a finished group."""
    infos = tuple(
        SampleInfo(s.index, len(s.prompt_ids), len(s.response_ids), sum(s.loss_mask), s.reward, s.status, s.rollout)
        for s in group_samples
    )
    mixed = sum(len({span.version for span in s.versions}) > 1 for s in group_samples)
    metrics = {"mixed_versions": mixed / len(group_samples)} if any(s.versions for s in group_samples) else {}
    return Group(prompt, infos, payload, oldest_version(group_samples), metrics)


def oldest_version(samples: Sequence[Sample]) -> PolicyVersion | None:
    """The version of the oldest trainable token; None where nothing was sampled."""
    versions = [span.version for s in samples for span in s.versions if any(s.loss_mask[span.start : span.end])]
    return min(versions, default=None)


def rank_work(
    groups: Sequence[Group], plans: Sequence[UpdatePlan], *, rank: int, facts: Mapping[str, Scored] | None = None
) -> RankWork:
    """Address the samples that data-parallel rank `rank` trains, fetching only the bundles and scores they are in."""
    refs: dict[Any, int] = {}
    updates: list[RankUpdate] = []
    for plan in plans:
        micro_batches: list[tuple[SampleAddress, ...]] = []
        for micro_batch in plan.micro_batches[rank]:
            addresses: list[SampleAddress] = []
            for ref in micro_batch:
                group = groups[ref.group]
                bundle = refs.setdefault(group.payload.ref, len(refs))
                addresses.append(_address(group, ref, bundle))
            micro_batches.append(tuple(addresses))
        updates.append(RankUpdate(tuple(micro_batches), plan.num_rollouts, plan.num_tokens))
    places = [ref for plan in plans for micro_batch in plan.micro_batches[rank] for ref in micro_batch]
    covering = {name: scored.covering(places) for name, scored in (facts or {}).items()}
    return RankWork(tuple(refs), tuple(updates), covering)


def _address(group: Group, ref: SampleRef, bundle: int) -> SampleAddress:
    """A sample with what its training needs of the group's scored samples."""
    scored = [(info, info.reward) for info in group.samples if info.reward is not None]
    address = SampleAddress(
        bundle=bundle,
        group=group.payload.position,
        sample=ref.sample,
        group_rewards=tuple(reward for _, reward in scored),
        group_lengths=tuple(info.response_tokens for info, _ in scored),
        place=ref,
    )
    rollouts = [info.rollout for info, _ in scored]
    if all(rollout is None for rollout in rollouts):
        return address
    own = group.samples[ref.sample].rollout
    return replace(
        address,
        group_weights=tuple(1.0 if rollout is None else 1.0 / rollouts.count(rollout) for rollout in rollouts),
        rollout_tokens=0 if own is None else sum(info.trainable_tokens for info, _ in scored if info.rollout == own),
    )


def holders(plans: Sequence[UpdatePlan]) -> dict[SampleRef, int]:
    """Which data-parallel rank works on which sample."""
    return {
        ref: rank
        for plan in plans
        for rank, micro_batches in enumerate(plan.micro_batches)
        for micro_batch in micro_batches
        for ref in micro_batch
    }


def resolve(
    work: RankWork, bundles: Sequence[Bundle], facts: Mapping[str, Sequence[Scores]] | None = None
) -> tuple[UpdateWork, ...]:
    """Put the samples in place of their addresses, with what other roles scored of them."""
    merged = {name: {place: row for part in parts for place, row in part.items()} for name, parts in (facts or {}).items()}

    def sample(address: SampleAddress) -> TrainSample:
        s = bundles[address.bundle][address.group][address.sample]
        made = TrainSample(
            prompt_ids=s.prompt_ids,
            response_ids=s.response_ids,
            log_probs=s.log_probs,
            loss_mask=s.loss_mask,
            reward=s.reward,
            group_rewards=address.group_rewards,
            group_lengths=address.group_lengths,
            group_weights=address.group_weights,
            rollout_tokens=address.rollout_tokens,
            routed_experts=s.routed_experts,
        )
        found: dict[str, Any] = {name: rows[address.place] for name, rows in merged.items()}
        return replace(made, **found) if found else made

    return tuple(
        UpdateWork(tuple(tuple(map(sample, mb)) for mb in u.micro_batches), u.num_rollouts, u.num_tokens) for u in work.updates
    )


def placed(work: RankWork, scores: Sequence[Sequence[tuple[float, ...]]]) -> Scores:
    """Scores of all micro-batches of a share, update after update, by the samples' places in the batch."""
    micro_batches = [micro_batch for update in work.updates for micro_batch in update.micro_batches]
    return {
        address.place: row
        for addresses, rows in zip(micro_batches, scores, strict=True)
        for address, row in zip(addresses, rows, strict=True)
    }
