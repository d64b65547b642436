"""What a plan is decided about: roles on their devices, and a candidate with every platform's answers for one residency."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from vime.errors import PlanError
from vime.facts.memory import EngineSleep, MemoryBackend, NullMemory
from vime.facts.model import ModelShape
from vime.facts.perf import PerfTable
from vime.facts.process import RoleRequest
from vime.planning.amounts import RECOMPUTE
from vime.planning.memory import PoolSpace
from vime.planning.needs import PlanNeeds
from vime.planning.plan import PlatformAnswers, TransportPlan
from vime.planning.transports import End, Wishes
from vime.topology.rules import ResolvedRole


@dataclass(frozen=True, slots=True)
class Seat:
    """A role with its platform, its device set, and the requests of its processes before residency is decided.

    A training role has one request, a rollout role one per engine. `group` names the set of devices, `model` is what it holds.
    """

    role: ResolvedRole
    platform: PlatformAnswers
    space: PoolSpace
    end: End
    group: str
    requests: tuple[RoleRequest, ...]
    model: ModelShape

    @property
    def nodes(self) -> tuple[int, ...]:
        """The node of every device."""
        return tuple(slot.node for slot in self.end.slots)


@dataclass(frozen=True, slots=True)
class Situation:
    """What every candidate has in common.

    `others` are the training roles beside the actor. `share_where` is set where another role is on the actor's devices; `perf`
    is by pool.
    """

    model: ModelShape
    dtype: str
    needs: PlanNeeds
    actor: Seat
    rollout: Seat | None
    wishes: Wishes
    edge_where: str | None
    share_where: str | None
    perf: Mapping[str, PerfTable] = field(default_factory=dict)
    others: tuple[Seat, ...] = ()

    @property
    def seats(self) -> Iterator[Seat]:
        """Every role: the actor, the other training roles, the engines."""
        yield self.actor
        yield from self.others
        if self.rollout is not None:
            yield self.rollout

    @property
    def spaces(self) -> tuple[PoolSpace, ...]:
        """The pools in use, each once."""
        return tuple({seat.space.name: seat.space for seat in self.seats}.values())

    @property
    def engines_share(self) -> bool:
        """Whether engines are on the actor's devices."""
        return self.rollout is not None and self.with_actor(self.rollout)

    def with_actor(self, seat: Seat) -> bool:
        """Whether a role takes turns on the actor's devices."""
        return self.share_where is not None and seat.group == self.actor.group

    def rates(self, seat: Seat) -> PerfTable:
        """What is known of a seat's devices."""
        return self.perf.get(seat.space.name, PerfTable())


@dataclass(frozen=True, slots=True)
class Answered:
    """A training role with its decided request, and what can leave its device."""

    seat: Seat
    request: RoleRequest
    backend: MemoryBackend | NullMemory


@dataclass(frozen=True, slots=True)
class Candidate:
    """The answers for one residency, what is recomputed and what the engine gets with it. It fits where there are no errors.

    `chosen` are engine arguments that the plan sets where the user does not; `cache_how` is the arithmetic of the cache.
    `tight` is true where training leaves little free.
    """

    residency: str | None
    actor: Answered
    engine_requests: tuple[RoleRequest, ...]
    sleeps: tuple[EngineSleep, ...]
    transport: TransportPlan | None
    errors: tuple[PlanError, ...]
    others: tuple[Answered, ...] = ()
    recompute: str = RECOMPUTE[0]
    recompute_why: str = ""
    chosen: Mapping[str, Any] = field(default_factory=dict)
    cache_how: str = ""
    tight: bool = False
