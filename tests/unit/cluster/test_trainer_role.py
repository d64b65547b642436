"""A step over several training roles: who scores, who trains, in which order, and what reaches whom without the driver."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from vime.cluster.memory_role import Parked, Resident
from vime.cluster.payload import GroupPayload, RankWork, group_info, placed, resolve
from vime.cluster.team import Member, Team
from vime.cluster.trainer_role import MegatronTrainer, StepRules, data_parallel_rank
from vime.errors import TrainerError
from vime.facts.memory import Tag
from vime.facts.process import Parallel
from vime.planning.amounts import TURNS
from vime.types import Batch, PromptId, Sample, SampleStatus, TrainSample, UpdateWork

RULES = StepRules(max_tokens=64, updates_per_step=1, skip_flat=False, supervised=False, timeout_s=60.0)
ON_THE_DEVICE = {"score": {Tag.PARAMS}, "train": {Tag.PARAMS, Tag.GRADS, Tag.OPTIMIZER}}


@dataclass
class Store:
    """The object store, and who did what in which order. `working` are the roles at it right now."""

    objects: list[Any] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    working: set[str] = field(default_factory=set)
    together: set[frozenset[str]] = field(default_factory=set)

    def put(self, value: Any) -> Any:
        self.objects.append(value)
        return ("ref", len(self.objects) - 1)

    def get(self, ref: tuple[str, int]) -> Any:
        return self.objects[ref[1]]


class Ranks:
    """All ranks of a role: they score a token by its id plus `offset`, and keep what they trained on."""

    def __init__(self, store: Store, role: str, parallel: Parallel, *, offset: float = 0.0, fails: bool = False) -> None:
        self.store, self.role, self.parallel, self.offset, self.fails = store, role, parallel, offset, fails
        self.size = parallel.devices
        self.trained: list[list[tuple[UpdateWork, ...]]] = []
        self.here: set[Tag] = set(Tag)
        self.woken: Counter[Tag] = Counter()

    async def each(self, method: str, shares: Sequence[tuple[RankWork]], *, timeout_s: float | None = None) -> list[Any]:
        assert self.here >= ON_THE_DEVICE[method], f"{self.role} works while it is off the device"
        self.store.calls.append(f"{method} {self.role}")
        self.store.working.add(self.role)
        self.store.together.add(frozenset(self.store.working))
        await asyncio.sleep(0.01)
        self.store.working.discard(self.role)
        if self.fails:
            raise TrainerError(f"trainer rank 0 of {self.role} died")
        works = [self._resolved(share[0]) for share in shares]
        if method == "train":
            self.trained.append(works)
            return [{f"train/{self.role}": 1.0}] * self.size
        return [self._scored(rank, share[0], work) for rank, (share, work) in enumerate(zip(shares, works, strict=True))]

    async def all(self, method: str, *words: Any) -> list[Any]:
        if method in ("park", "wake"):
            change = set(words[0])
            self.woken.update(change if method == "wake" else ())
            self.here = self.here - change if method == "park" else self.here | change
        return [{}] * self.size

    def _resolved(self, work: RankWork) -> tuple[UpdateWork, ...]:
        facts = {name: [self.store.get(ref) for ref in refs] for name, refs in work.facts.items()}
        return resolve(work, [self.store.get(ref) for ref in work.refs], facts)

    def _scored(self, rank: int, work: RankWork, updates: tuple[UpdateWork, ...]) -> Any:
        stages = self.parallel.tp * self.parallel.dp
        if rank // stages != self.parallel.pp - 1 or rank % self.parallel.tp:
            return None
        batches = [samples for update in updates for samples in update.micro_batches]
        return self.store.put(placed(work, [[tuple(t + self.offset for t in s.response_ids) for s in mb] for mb in batches]))


def batch(store: Store, *, step: int = 1) -> Batch:
    """Three groups in two bundles; every response is unlike every other."""
    made = []
    for bundle in ((0, 1), (2,)):
        groups = [[answer(group, index) for index in range(3)] for group in bundle]
        ref = store.put(groups)
        made += [
            group_info(samples, prompt=PromptId(group, 0, group), payload=GroupPayload(ref, position))
            for position, (group, samples) in enumerate(zip(bundle, groups, strict=True))
        ]
    return Batch(step, tuple(made))


def answer(group: int, index: int) -> Sample:
    size = 1 + (group + index) % 3
    response = tuple(100 * group + 10 * index + i for i in range(size))
    return Sample(index, (7, group), response, (0.0,) * size, (1,) * size, SampleStatus.COMPLETED, (), float(index))


def team(store: Store, memory: Any = None, **roles: Any) -> tuple[Team, dict[str, Ranks]]:
    """`roles`: (parallel, devices, offset); the members' order is that of the words."""
    links = {role: Ranks(store, role, parallel, offset=offset) for role, (parallel, _, offset) in roles.items()}
    tasks = {"ref": "reference"}
    members = [
        Member(role, tasks.get(role, role), links[role], parallel, devices)  # type: ignore[arg-type]
        for role, (parallel, devices, _) in roles.items()
    ]
    return Team(members, memory or Resident(links, {}, lambda *_: None)), links  # type: ignore[arg-type]


def trainer(members: Team, rules: StepRules = RULES) -> MegatronTrainer:
    return MegatronTrainer(members, rules, incarnation=0, on_event=lambda *_: None)


def samples_of(ranks: Ranks, parallel: Parallel) -> list[TrainSample]:
    """What all data-parallel ranks trained last, each sample once; ranks of one index have the same."""
    by_index: dict[int, tuple[UpdateWork, ...]] = {}
    for rank, work in enumerate(ranks.trained[-1]):
        assert by_index.setdefault(data_parallel_rank(rank, parallel), work) == work
    return [s for work in by_index.values() for update in work for mb in update.micro_batches for s in mb]


@pytest.mark.parametrize("critic", [Parallel(), Parallel(dp=2), Parallel(tp=2, pp=2, dp=3)])
@pytest.mark.parametrize("actor", [Parallel(dp=2), Parallel(tp=2, dp=1), Parallel(pp=2, dp=3), Parallel(pp=2, cp=2, dp=2)])
async def test_every_sample_is_trained_with_its_own_scores_whatever_the_layouts(actor: Parallel, critic: Parallel) -> None:
    store = Store()
    roles = {"ref": (Parallel(dp=2), 0, 0.25), "critic": (critic, 1, 0.5), "actor": (actor, 2, 0.0)}
    members, links = team(store, **roles)
    report = await trainer(members).step(batch(store))
    for role, parallel in (("actor", actor), ("critic", critic)):
        found = samples_of(links[role], parallel)
        assert len(found) == 9
        assert len({s.response_ids for s in found}) == 9
        for s in found:
            assert s.ref_log_probs == tuple(t + 0.25 for t in s.response_ids)
            assert s.values == tuple(t + 0.5 for t in s.response_ids)
            assert s.teacher_log_probs == ()
    assert report.metrics == {"train/critic": 1.0, "train/actor": 1.0}
    assert set(report.seconds) == {"score_ref", "score_critic", "train_critic", "train_actor"}


async def test_a_virtual_pipeline_gets_whole_rounds_and_ranks_of_one_sequence_the_same() -> None:
    store, layout = Store(), Parallel(pp=3, cp=2, dp=2, vpp=2)
    members, links = team(store, actor=(layout, 0, 0.0))
    await trainer(members).step(batch(store))
    (works,) = links["actor"].trained
    assert {len(update.micro_batches) for work in works for update in work} == {3}
    assert [works[rank] == works[0] for rank in range(4)] == [True, True, False, False]
    assert len(samples_of(links["actor"], layout)) == 9


async def test_a_rank_is_sent_only_the_scores_of_its_samples() -> None:
    store = Store()
    members, links = team(store, ref=(Parallel(dp=3), 0, 0.0), actor=(Parallel(dp=3), 1, 0.0))
    sent: list[RankWork] = []
    each = links["actor"].each

    async def noted(method: str, shares: Any, **options: Any) -> Any:
        sent.extend(share[0] for share in shares)
        return await each(method, shares, **options)

    links["actor"].each = noted  # type: ignore[method-assign]
    await trainer(members).step(batch(store))
    assert [len(work.facts["ref_log_probs"]) for work in sent] == [1, 1, 1], "equal sizes split a batch alike"


async def test_who_shares_devices_takes_turns_and_the_others_work_side_by_side() -> None:
    store = Store()
    members, _ = team(store, ref=(Parallel(), 0, 0.0), critic=(Parallel(), 0, 0.0), actor=(Parallel(), 0, 0.0))
    await trainer(members).step(batch(store))
    assert store.calls == ["score ref", "score critic", "train critic", "train actor"]
    assert max(map(len, store.together)) == 1
    store = Store()
    members, _ = team(store, ref=(Parallel(), 0, 0.0), critic=(Parallel(), 1, 0.0), actor=(Parallel(), 2, 0.0))
    await trainer(members).step(batch(store))
    assert {frozenset({"ref", "critic"}), frozenset({"critic", "actor"})} <= store.together


async def test_on_parked_devices_whoever_works_is_there_alone_and_comes_once_a_step() -> None:
    store = Store()
    frozen, trained = (Tag.PARAMS,), (Tag.PARAMS, Tag.GRADS, Tag.OPTIMIZER)
    tasks: Any = {"actor": "actor", "critic": "critic", "ref": "reference"}
    tags = {"actor": trained, "critic": trained, "ref": frozen}
    links: Any = {role: Ranks(store, role, Parallel()) for role in tasks}
    for ranks in links.values():
        ranks.here = set()
    memory = Parked(links, {}, lambda *_: None, tags=tags, away=True)
    turns = sorted(tasks, key=lambda role: TURNS.index(tasks[role]))
    members = Team([Member(role, tasks[role], links[role], Parallel()) for role in turns], memory)
    for step in (1, 2):
        await trainer(members).step(batch(store, step=step))
        assert {role: ranks.here for role, ranks in links.items()} == {"ref": set(), "critic": set(), "actor": set(trained)}
        await memory.to_publish()
        await memory.to_serve()
        assert {role: ranks.woken for role, ranks in links.items()} == {role: dict.fromkeys(tags[role], step) for role in tags}
    assert len(links["actor"].trained) == 2


async def test_the_critic_trains_alone_while_it_warms_up() -> None:
    store = Store()
    members, links = team(store, critic=(Parallel(), 0, 0.5), actor=(Parallel(), 1, 0.0))
    rules = StepRules(max_tokens=64, updates_per_step=1, skip_flat=False, supervised=False, timeout_s=9, critic_warmup_steps=2)
    reports = [await trainer(members, rules).step(batch(store, step=step)) for step in (1, 2, 3)]
    assert (len(links["critic"].trained), len(links["actor"].trained)) == (3, 1)
    assert [r.version.step for r in reports] == [1, 2, 3]
    assert [sorted(r.metrics) for r in reports] == [["train/critic"]] * 2 + [["train/actor", "train/critic"]]


async def test_a_dead_rank_of_any_role_ends_the_step() -> None:
    for dead in ("ref", "critic", "actor"):
        store = Store()
        members, links = team(store, ref=(Parallel(), 0, 0.0), critic=(Parallel(), 1, 0.0), actor=(Parallel(), 2, 0.0))
        links[dead].fails = True
        with pytest.raises(TrainerError, match=f"of {dead} died"):
            await trainer(members).step(batch(store))


async def test_an_actor_alone_is_sent_no_scores_and_reports_no_parts() -> None:
    store = Store()
    members, links = team(store, actor=(Parallel(), 0, 0.0))
    report = await trainer(members).step(batch(store))
    assert store.calls == ["train actor"]
    assert report.seconds == {}
    assert {s.values for s in samples_of(links["actor"], Parallel())} == {()}
