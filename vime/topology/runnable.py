"""What a run can start of a topology. The file may say more: it is checked all the same, and refused by name here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Asked:
    """What the algorithm asks of a topology: engines to sample with, and which tasks beside the actor's (`critic`, ...)."""

    samples: bool = True
    uses: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class RunRoles:
    """The roles that a run starts; `others` are its critic, reference and teacher, in the order of the file."""

    actor: ResolvedRole
    others: tuple[ResolvedRole, ...]
    rollout: ResolvedRole | None

    @property
    def all(self) -> tuple[ResolvedRole, ...]:
        """The actor, the other training roles, the engines."""
        return (self.actor, *self.others, *([] if self.rollout is None else [self.rollout]))


BESIDE = {"critic": "critic", "reference": "ref", "teacher": "teacher"}
"""Tasks beside the actor's, and what a role of each is usually called."""

_USED_BY = {"critic": "algorithm.kind ppo", "reference": "algorithm.kl.coef above 0", "teacher": "algorithm.kind distill"}
"""The settings that make an algorithm use a task."""


def runnable_roles(loaded: Loaded, asked: Asked) -> RunRoles:
    """The roles that a run starts.

    Raises PlanError E301 for the first role that a run cannot start, for one that is missing, and for one that nobody uses.
    """
    for name, text, fix in _beyond(loaded.roles):
        raise _refused(loaded, f"roles.{name}: {text}", ("roles", name), fix)
    trains = [role for role in loaded.roles if role.kind == "train"]
    actors = [role for role in trains if role.task == "actor"]
    rollouts = [role for role in loaded.roles if role.kind == "rollout"]
    if not actors:
        raise _refused(loaded, "no role is trained", ("roles",), "add `actor: {kind: train}`")
    if not rollouts and asked.samples:
        fix = "add `rollout: {kind: rollout}`, or choose algorithm.kind sft"
        raise _refused(loaded, "no rollout role, but the algorithm samples", ("roles",), fix)
    others = tuple(role for role in trains if role.task != "actor")
    _check_used(loaded, actors[0], others, asked.uses)
    _check_shares(loaded, actors[0])
    return RunRoles(actors[0], others, rollouts[0] if rollouts else None)


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


def _refused(loaded: Loaded, text: str, path: tuple[str | int, ...], fix: str) -> PlanError:
    return PlanError(f"E301 {text}", where=loaded.where(*path), fix=fix)


# ---- training roles beside the actor


def _check_used(loaded: Loaded, actor: ResolvedRole, others: Sequence[ResolvedRole], uses: frozenset[str]) -> None:
    """Raises for a task that the algorithm needs and no role has, and for a role whose task it does not need."""
    for task in (task for task in BESIDE if task in uses and task not in {role.task for role in others}):
        text = f"the algorithm needs a {task} ({_USED_BY[task]}), but no role is one"
        raise _refused(loaded, text, ("roles",), _lines_to_add(loaded, actor, BESIDE[task]))
    for role in (role for role in others if role.task not in uses):
        text = f"roles.{role.name}: the algorithm uses no {role.task}, so its devices would do nothing"
        fix = f"remove the role {role.name}, or choose {_USED_BY[role.task]}"
        raise _refused(loaded, text, ("roles", role.name), fix)


def _lines_to_add(loaded: Loaded, actor: ResolvedRole, name: str) -> str:
    """The lines that put a role on the actor's devices."""
    role = f"add `{name}: {{kind: train, like: {actor.name}}}` to roles"
    for index, share in enumerate(loaded.topology.share):
        if actor.name in share.roles:
            at = share.roles.index(actor.name) + 1
            listed = ", ".join((*share.roles[:at], name, *share.roles[at:]))
            return f"{role}, and write `roles: [{listed}]` in share.{index}"
    more = f"{actor.devices} more devices in pool {actor.pool}" if actor.part is None else "devices of its own"
    return f"{role}, and `share: [{{roles: [{actor.name}, {name}]}}]`; without share it needs {more}"


def _check_shares(loaded: Loaded, actor: ResolvedRole) -> None:
    """Raises for roles that share devices without the actor: nothing plans their turns."""
    for index, share in enumerate(loaded.topology.share):
        if actor.name not in share.roles:
            who = " and ".join(share.roles)
            text = f"share.{index}: {who} share devices without the actor, but turns are taken on its devices alone"
            fix = f"name {actor.name} in it, or remove it and give each role devices of its own"
            raise _refused(loaded, text, ("share", index), fix)


# ---- what no run starts

_STARTED = (
    "vime pauses and updates an engine through its gate and its half of the weight transport, and vLLM takes both only when it"
    " starts (--middleware, --weight-transfer-config), with a key of this run"
)
_SPLIT = (
    "between its two stages a request runs on neither engine, so an update does not wait for it and its cache would be of other"
    " weights than its tokens; and of a request for several samples vLLM hands on the cache of one"
)
_ONE_SIZE = "cache, transport and decode rate are planned once, for all engines behind the router"


def _beyond(roles: tuple[ResolvedRole, ...]) -> Iterator[tuple[str, str, str]]:
    """(role, why not, the next step) for every role that a run does not start."""
    first: dict[str, str] = {}
    for role in (role for role in roles if role.kind == "train"):
        if role.task in first:
            fix = f"remove the role {role.name}" + (", or start a run of its own for it" if role.task == "actor" else "")
            yield role.name, f"a run has one {role.task}, and {first[role.task]} is it", fix
        first.setdefault(role.task, role.name)
    rollouts = [role for role in roles if role.kind == "rollout"]
    for index, role in enumerate(rollouts):
        if role.endpoints:
            fix = "remove `endpoints` and give the role a pool: vime then starts the engines"
            yield role.name, f"these engines run already; {_STARTED}", fix
        elif role.stage is not None:
            yield role.name, f"these are engines for {role.stage} alone; {_SPLIT}", "write one rollout role without `stage`"
        elif role.groups:
            fix = "write one number of `engines` of one size"
            yield role.name, f"its engines differ: {role.told}; {_ONE_SIZE}", fix
        elif index:
            fix = f"remove the role {role.name}, and give {rollouts[0].name} more engines"
            yield role.name, f"this is a second set of engines beside {rollouts[0].name}; {_ONE_SIZE}", fix
