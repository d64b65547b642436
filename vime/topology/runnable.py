"""What a run can start of a topology. The file may say more: it is checked all the same, and refused by name here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from vime.errors import PlanError, VimeError
from vime.topology.model import Topology
from vime.topology.rules import ResolvedRole


class Loaded(Protocol):
    """A checked topology, as far as it is asked here."""

    @property
    def topology(self) -> Topology: ...
    @property
    def roles(self) -> tuple[ResolvedRole, ...]: ...
    def where(self, *path: str | int) -> str: ...


_PLANNED = "vime plans one trained role and one set of engines that it starts itself"
_TASKS = {
    "actor": ("a second actor", "remove the role {name}, or start a run of its own for it"),
    "critic": ("a critic", "remove the role {name}, and choose an algorithm without a critic (algorithm.kind grpo)"),
    "reference": ("a reference", "remove the role {name}, and choose an algorithm that needs no reference"),
    "teacher": ("a teacher", "remove the role {name}, and put the teacher's answers into the data (algorithm.kind sft)"),
}


def runnable_roles(loaded: Loaded, *, samples: bool) -> tuple[ResolvedRole, ResolvedRole | None]:
    """The one training role and the one set of engines that a run starts. `samples`: the algorithm needs engines.

    Raises PlanError E301 for the first role that a run cannot start, and for one that is missing.
    """
    for name, text, fix in _beyond(loaded.roles):
        raise _refused(loaded, f"roles.{name}: {_PLANNED}; {text}", ("roles", name), fix)
    trains = [role for role in loaded.roles if role.kind == "train"]
    rollouts = [role for role in loaded.roles if role.kind == "rollout"]
    if not trains:
        raise _refused(loaded, "no role is trained", ("roles",), "add `actor: {kind: train}`")
    if not rollouts and samples:
        fix = "add `rollout: {kind: rollout}`, or choose algorithm.kind sft"
        raise _refused(loaded, "no rollout role, but the algorithm samples", ("roles",), fix)
    return trains[0], rollouts[0] if rollouts else None


def check_pools(loaded: Loaded) -> list[VimeError]:
    """E301 for every wish about a pool's machines that nobody fulfils."""
    errors: list[VimeError] = []
    for name, pool in loaded.topology.pools.items():
        if pool.interpreter is not None:
            text = f"pools.{name}.interpreter: every process runs in the environment that runs vime"
            fix = "remove it, and install what the pool's platform needs into that environment"
            errors.append(_refused(loaded, text, ("pools", name, "interpreter"), fix))
        if pool.select.labels:
            text = f"pools.{name}.select.labels: machines are chosen by host name alone"
            errors.append(_refused(loaded, text, ("pools", name, "select", "labels"), "write `select: {hosts: [...]}`"))
    return errors


def _refused(loaded: Loaded, text: str, path: tuple[str, ...], fix: str) -> PlanError:
    return PlanError(f"E301 {text}", where=loaded.where(*path), fix=fix)


def _beyond(roles: tuple[ResolvedRole, ...]) -> Iterator[tuple[str, str, str]]:
    """(role, what it is, the next step) for every role that a run does not start."""
    actors = [role.name for role in roles if role.kind == "train" and role.task == "actor"]
    for role in roles:
        if role.kind == "train" and role.name not in actors[:1]:
            what, fix = _TASKS[role.task]
            yield role.name, f"this is {what}", fix.format(name=role.name)
    rollouts = [role for role in roles if role.kind == "rollout"]
    for index, role in enumerate(rollouts):
        if role.endpoints:
            fix = "remove `endpoints` and give the role a pool: vime then starts the engines"
            yield role.name, "these engines run already", fix
        elif role.stage is not None:
            yield role.name, f"these are engines for {role.stage} alone", "use one rollout role without `stage`"
        elif role.groups:
            yield role.name, f"its engines differ: {role.told}", "write one number of `engines` of one size"
        elif index:
            fix = f"remove the role {role.name}, and give {rollouts[0].name} more engines"
            yield role.name, "this is a second set of engines", fix
