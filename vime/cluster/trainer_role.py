"""The loop's Trainer role over all training roles: plan the step, send references, merge metrics."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from vime.cluster.payload import Scored, holders, rank_work
from vime.cluster.team import Member, Team
from vime.data.schedule import Split, plan_updates
from vime.facts.memory import Tag
from vime.facts.process import Parallel
from vime.memory.residency import TRAINER_TAGS
from vime.planning.plan import Task
from vime.types import Batch, PolicyVersion, StepReport, UpdatePlan

SCORES: Mapping[Task, str] = {"reference": "ref_log_probs", "teacher": "teacher_log_probs", "critic": "values"}
"""The field of `TrainSample` that a task's scores fill."""


@dataclass(frozen=True)
class StepRules:
    """How a batch becomes optimizer steps. In the first `critic_warmup_steps` steps of a run only the critic trains.

    `square` is that of `vime.data.schedule.Split`.
    """

    max_tokens: int
    updates_per_step: int
    skip_flat: bool
    supervised: bool
    timeout_s: float
    critic_warmup_steps: int = 0
    square: float = 0.0


class MegatronTrainer:
    """Trains batches on all ranks. `incarnation` is part of every version it reports.

    A step: the frozen roles and the critic score the batch, then critic and actor train on it with these scores.
    """

    def __init__(self, team: Team, rules: StepRules, *, incarnation: int, on_event: Callable[[str, str], None]) -> None:
        self._team = team
        self._event = on_event
        self._rules = rules
        self._incarnation = incarnation

    async def step(self, batch: Batch) -> StepReport:
        """See `vime.roles.Trainer`. Raises TrainerError or DeadlineError naming the role and the rank."""
        step = _Step(batch, self._rules, self._team)
        if not any(micro_batch for plan in step.plans(self._team.actor) for micro_batch in plan.micro_batches):
            self._event("nothing_to_learn", f"step {batch.step}: every sample is masked or in a group of equal rewards")
        await step.score(self._team.of(*SCORES))
        warms_up = batch.step <= self._rules.critic_warmup_steps
        metrics = await step.train(self._team.of("critic") if warms_up else self._team.of("critic", "actor"))
        version = PolicyVersion(self._incarnation, batch.step)
        return StepReport(batch.step, version, metrics, step.seconds if len(self._team.members) > 1 else {})


class _Step:
    """One batch on its way through the team."""

    def __init__(self, batch: Batch, rules: StepRules, team: Team) -> None:
        self._batch, self._rules, self._team = batch, rules, team
        self._plans: dict[Parallel, tuple[UpdatePlan, ...]] = {}
        self._facts: dict[str, Scored] = {}
        self.seconds: dict[str, float] = {}
        """By part and role, such as `score_ref` and `train_critic`; those on different devices overlap."""

    def plans(self, member: Member) -> tuple[UpdatePlan, ...]:
        """How a role splits the batch over its data-parallel ranks. Roles of one layout split it alike."""
        layout = member.parallel
        multiple = layout.pp if layout.vpp > 1 else 1
        if layout not in self._plans:
            self._plans[layout] = plan_updates(
                self._batch.groups,
                split=Split(layout.dp, self._rules.max_tokens, multiple, self._rules.square),
                updates_per_step=self._rules.updates_per_step,
                skip_flat=self._rules.skip_flat,
                supervised=self._rules.supervised,
            )
        return self._plans[layout]

    async def score(self, members: Iterable[Member]) -> None:
        """Let roles score what is trained; the scores stay where they are made."""
        members = tuple(members)
        found = await self._team.work(members, self._timed("score", self._score), needs=(Tag.PARAMS,))
        self._facts = {SCORES[member.task]: found[member.role] for member in members}

    async def train(self, members: Iterable[Member]) -> dict[str, float]:
        """Metrics of all roles that train. What the roles scored is in the samples that they get."""
        reports = await self._team.work(members, self._timed("train", self._train), needs=TRAINER_TAGS)
        return {name: value for report in reports.values() for name, value in report.items()}

    async def _score(self, member: Member) -> Scored:
        answers = await self._send(member, "score", {})
        return Scored(tuple(ref for ref in answers if ref is not None), holders(self.plans(member)))

    async def _train(self, member: Member) -> Mapping[str, float]:
        return (await self._send(member, "train", self._facts))[0]

    async def _send(self, member: Member, method: str, facts: Mapping[str, Scored]) -> list[Any]:
        """Call a method on every rank with its data-parallel rank's share of the batch."""
        plans, dp = self.plans(member), member.parallel.dp
        work = [rank_work(self._batch.groups, plans, rank=rank, facts=facts) for rank in range(dp)]
        shares = [(work[data_parallel_rank(rank, member.parallel)],) for rank in range(member.link.size)]
        return await member.link.each(method, shares, timeout_s=self._rules.timeout_s)

    def _timed(self, what: str, do: Callable[[Member], Awaitable[Any]]) -> Callable[[Member], Awaitable[Any]]:
        async def timed(member: Member) -> Any:
            start = time.perf_counter()
            try:
                return await do(member)
            finally:
                self.seconds[f"{what}_{member.role}"] = time.perf_counter() - start

        return timed


def data_parallel_rank(rank: int, parallel: Parallel) -> int:
    """Megatron-core's default rank order is tp, cp, (ep inside dp), dp, pp: the data-parallel index of a global rank.

    So the ranks that speak for their scores, all on the last stage, come in the order of their data-parallel index.
    """
    return rank // (parallel.tp * parallel.cp) % parallel.dp
