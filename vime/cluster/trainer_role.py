"""The loop's Trainer role over trainer ranks: plan the step, send references, merge metrics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from vime.cluster.links import TrainerLink
from vime.cluster.payload import rank_work
from vime.data.schedule import plan_updates
from vime.facts.process import Parallel
from vime.types import Batch, PolicyVersion, StepReport


@dataclass(frozen=True)
class StepRules:
    """How a batch becomes optimizer steps."""

    parallel: Parallel
    max_tokens: int
    updates_per_step: int
    skip_flat: bool
    supervised: bool
    timeout_s: float


class MegatronTrainer:
    """Trains batches on all ranks. `incarnation` is part of every version it reports."""

    def __init__(self, link: TrainerLink, rules: StepRules, *, incarnation: int, on_event: Callable[[str, str], None]) -> None:
        self._link = link
        self._event = on_event
        self._rules = rules
        self._incarnation = incarnation

    async def step(self, batch: Batch) -> StepReport:
        """See `vime.roles.Trainer`. Raises TrainerError or DeadlineError naming the rank."""
        rules = self._rules
        plans = plan_updates(
            batch.groups,
            dp=rules.parallel.dp,
            max_tokens=rules.max_tokens,
            updates_per_step=rules.updates_per_step,
            skip_flat=rules.skip_flat,
            supervised=rules.supervised,
        )
        if not any(micro_batch for plan in plans for micro_batch in plan.micro_batches):
            self._event("nothing_to_learn", f"step {batch.step}: every sample is masked or in a group of equal rewards")
        work = [rank_work(batch.groups, plans, rank=rank) for rank in range(rules.parallel.dp)]
        shares = [(work[data_parallel_rank(rank, rules.parallel)],) for rank in range(self._link.size)]
        reports = await self._link.each("train", shares, timeout_s=rules.timeout_s)
        return StepReport(batch.step, PolicyVersion(self._incarnation, batch.step), reports[0])


def data_parallel_rank(rank: int, parallel: Parallel) -> int:
    """Megatron-core's default rank order is tp, cp, (ep inside dp), dp, pp: the data-parallel index of a global rank."""
    return rank // (parallel.tp * parallel.cp) % parallel.dp
