"""The training roles of a run: started, put together as a team, and what of them leaves shared devices."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

from vime.assemble import setups
from vime.cluster.checkpoints import folder_of
from vime.cluster.launch import Plugins, TrainerStart, start_trainer
from vime.cluster.links import TrainerLink
from vime.cluster.memory_role import Log, Parked, Resident, TrainerMemory
from vime.cluster.placement import Placement
from vime.cluster.team import Member, Team, tags_of
from vime.config.schema import Config
from vime.data.snapshot import Snapshot
from vime.errors import CheckpointError
from vime.planning.amounts import TURNS
from vime.planning.plan import Plan, TrainerPlan


def trainer_starts(config: Config, plan: Plan, snapshot: Snapshot | None) -> list[list[TrainerStart]]:
    """All training roles, in lists that start side by side; those of one list start one after the other.

    Raises CheckpointError for a checkpoint of a run without one of the roles that train.
    """
    away = setups.away_at_start(plan)
    starts = [
        TrainerStart(
            role,
            setups.trainer_setups(config, plan, role),
            restore=_restore(snapshot, role, is_actor=role is plan.actor),
            away=tags_of(role.task) if away and plan.shares_actor(role) else (),
        )
        for role in plan.trainers
    ]
    if not setups.takes_turns_at_start(plan):
        return [[start] for start in starts]
    numbers = setups.devices_of(plan)
    return [[start for start in starts if numbers[start.role.role] == number] for number in sorted({*numbers.values()})]


def _restore(snapshot: Snapshot | None, role: TrainerPlan, *, is_actor: bool) -> Path | None:
    if snapshot is None or not role.trained:
        return None
    folder = snapshot.path / folder_of(role.role, is_actor=is_actor)
    if not folder.is_dir():
        raise CheckpointError(
            f"the checkpoint holds nothing of {role.role}: it is of a run without that role",
            where=str(snapshot.path),
            fix="resume with the algorithm and the topology of that run, or begin a new one from its model folder",
        )
    return folder


async def start_trainers(
    plan: Plan, placement: Placement, starts: Sequence[Sequence[TrainerStart]], *, plugins: Plugins
) -> dict[str, TrainerLink]:
    """Links by role, the actor first. Raises TrainerError or DeadlineError naming role and rank."""
    found: dict[str, TrainerLink] = {}

    async def in_turn(those: Sequence[TrainerStart]) -> None:
        for start in those:
            found[start.role.role] = await start_trainer(plan, placement, start, plugins=plugins)

    await asyncio.gather(*map(in_turn, starts))
    return {role.role: found[role.role] for role in plan.trainers}


def team_of(plan: Plan, links: Mapping[str, TrainerLink], memory: TrainerMemory) -> Team:
    """The members in the order of their turns."""
    numbers = setups.devices_of(plan)
    members = [
        Member(role.role, role.task, links[role.role], role.request.parallel, numbers[role.role]) for role in plan.trainers
    ]
    return Team(sorted(members, key=lambda member: TURNS.index(member.task)), memory)


def memory_of(plan: Plan, links: Mapping[str, TrainerLink], log: Log) -> Resident | Parked:
    """What moves on the actor's devices; roles on others stay where they are."""
    engine = setups.engine_bytes(plan)
    if plan.residency != "park":
        return Resident(links, engine, log)
    tags = {role.role: tags_of(role.task) for role in plan.trainers if plan.shares_actor(role)}
    return Parked({role: links[role] for role in tags}, engine, log, tags=tags, away=setups.away_at_start(plan))
