"""Samples by reference: rollout workers store bundles of groups, the driver passes references, trainer ranks fetch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vime.types import Group, PolicyVersion, Sample, SampleInfo, TrainSample, UpdatePlan, UpdateWork

Bundle = tuple[tuple[Sample, ...], ...]
"""What one object in the store holds: the samples of several groups."""


@dataclass(frozen=True, slots=True)
class GroupPayload:
    """Where a group's samples are: an object reference and the group's position in that bundle."""

    ref: Any
    position: int


@dataclass(frozen=True, slots=True)
class SampleAddress:
    """One sample of a rank's work: bundle (position in `RankWork.refs`), group in the bundle, sample in the group."""

    bundle: int
    group: int
    sample: int
    group_rewards: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class RankUpdate:
    micro_batches: tuple[tuple[SampleAddress, ...], ...]
    num_rollouts: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class RankWork:
    """One data-parallel rank's share of a step, without the samples themselves."""

    refs: tuple[Any, ...]
    updates: tuple[RankUpdate, ...]


def group_info(group_samples: Sequence[Sample], *, prompt: Any, payload: GroupPayload) -> Group:
    """The driver's view of a finished group."""
    infos = tuple(
        SampleInfo(s.index, len(s.prompt_ids), len(s.response_ids), sum(s.loss_mask), s.reward, s.status) for s in group_samples
    )
    return Group(prompt, infos, payload, oldest_version(group_samples))


def oldest_version(samples: Sequence[Sample]) -> PolicyVersion | None:
    """The version of the oldest trainable token; None where nothing was sampled."""
    versions = [span.version for s in samples for span in s.versions if any(s.loss_mask[span.start : span.end])]
    return min(versions, default=None)


def rank_work(groups: Sequence[Group], plans: Sequence[UpdatePlan], *, rank: int) -> RankWork:
    """Address the samples that data-parallel rank `rank` trains, fetching only the bundles they are in."""
    refs: dict[Any, int] = {}
    updates: list[RankUpdate] = []
    for plan in plans:
        micro_batches: list[tuple[SampleAddress, ...]] = []
        for micro_batch in plan.micro_batches[rank]:
            addresses: list[SampleAddress] = []
            for ref in micro_batch:
                group = groups[ref.group]
                bundle = refs.setdefault(group.payload.ref, len(refs))
                addresses.append(SampleAddress(bundle, group.payload.position, ref.sample, group.rewards))
            micro_batches.append(tuple(addresses))
        updates.append(RankUpdate(tuple(micro_batches), plan.num_rollouts, plan.num_tokens))
    return RankWork(tuple(refs), tuple(updates))


def resolve(work: RankWork, bundles: Sequence[Bundle]) -> tuple[UpdateWork, ...]:
    """Put the samples in place of their addresses."""

    def sample(address: SampleAddress) -> TrainSample:
        s = bundles[address.bundle][address.group][address.sample]
        return TrainSample(s.prompt_ids, s.response_ids, s.log_probs, s.loss_mask, s.reward, address.group_rewards)

    return tuple(
        UpdateWork(tuple(tuple(map(sample, mb)) for mb in u.micro_batches), u.num_rollouts, u.num_tokens) for u in work.updates
    )
