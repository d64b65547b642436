"""The plan: where every role sits and every hook's answer for it. Made by pure functions, read by assembly and by people."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from vime.facts.bindings import RayBinding
from vime.facts.capabilities import Capabilities
from vime.facts.collectives import CollectiveSpec, GroupRequest
from vime.facts.inventory import DeviceProfile, NodeInventory
from vime.facts.memory import EngineSleep, MemoryBackend, NullMemory
from vime.facts.model import ModelShape
from vime.facts.perf import PerfTable
from vime.facts.process import EnvValue, MegatronAdaptation, RoleRequest, TrainerRuntime, VllmDefaults
from vime.facts.transports import Edge, Side, TransportOffer
from vime.planning.needs import PlanNeeds


class PlatformAnswers(Protocol):
    """One lineage's hooks as typed methods; `vime.platforms.lineage.Platform` is the real one."""

    @property
    def name(self) -> str: ...
    @property
    def lineage(self) -> tuple[str, ...]: ...
    def profiles(self) -> tuple[DeviceProfile, ...]: ...
    def capabilities(self, inventory: NodeInventory) -> Capabilities: ...
    def ray_binding(self, inventory: NodeInventory) -> RayBinding: ...
    def process_env(self, request: RoleRequest) -> Mapping[str, EnvValue]: ...
    def trainer_runtime(self, request: RoleRequest) -> TrainerRuntime: ...
    def megatron_adapt(self, request: RoleRequest, model: ModelShape) -> MegatronAdaptation: ...
    def vllm_defaults(self, request: RoleRequest) -> VllmDefaults: ...
    def collective(self, request: RoleRequest, group: GroupRequest) -> CollectiveSpec: ...
    def memory_backend(self, request: RoleRequest) -> MemoryBackend | NullMemory: ...
    def engine_sleep(self, request: RoleRequest) -> EngineSleep: ...
    def transports(self, edge: Edge, side: Side) -> tuple[TransportOffer, ...]: ...
    def perf_model(self, inventory: NodeInventory) -> PerfTable: ...


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """One pool of devices: its platform and nodes.

    `entries` holds, by node, the entry of every device in a visible-device variable; empty where nothing is masked.
    `segment_nodes` is how many nodes in a row are reserved together: those of a scale-up domain, or all of them (0).
    """

    name: str
    platform: str
    inventories: tuple[NodeInventory, ...]
    capabilities: Capabilities
    binding: RayBinding
    lineage: tuple[str, ...] = ()
    entries: tuple[tuple[str, ...], ...] = ()
    segment_nodes: int = 0


Task = Literal["actor", "critic", "reference", "teacher"]


@dataclass(frozen=True, slots=True)
class TrainerPlan:
    """A training role, one rank a slot of `request.placement`. `masks` are the visible-device variables, by rank.

    An actor and a critic are trained; a reference and a teacher only score. `model` is the role's own where it differs from the
    actor's.
    """

    pool: str
    request: RoleRequest
    runtime: TrainerRuntime
    adaptation: MegatronAdaptation
    collective: CollectiveSpec
    memory: MemoryBackend | NullMemory
    env: Mapping[str, str]
    masks: tuple[Mapping[str, str], ...] = ()
    task: Task = "actor"
    model: ModelShape | None = None

    @property
    def role(self) -> str:
        """The role's name in the topology."""
        return self.request.role

    @property
    def trained(self) -> bool:
        """Whether it has gradients and an optimizer."""
        return self.task in ("actor", "critic")


@dataclass(frozen=True, slots=True)
class EngineArg:
    """An argument of an engine's server.

    `origin` is sleep, user, plan or `platform NAME`; `over` the value that it replaced.
    """

    name: str
    value: Any
    origin: str
    over: Any = None


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """One engine of a rollout role. `mask` are its visible-device variables."""

    index: int
    pool: str
    request: RoleRequest
    defaults: VllmDefaults
    sleep: EngineSleep
    env: Mapping[str, str]
    args: tuple[EngineArg, ...] = ()
    mask: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Rejection:
    """A transport that was not chosen, and why."""

    protocol: str
    reason: str


@dataclass(frozen=True, slots=True)
class TransportPlan:
    """The transport of an edge. `seconds` is the estimate for a full update (None where a rate is unknown), `how` its sum."""

    edge: Edge
    trainer: TransportOffer
    engine: TransportOffer
    seconds: float | None
    provenance: str
    rejected: tuple[Rejection, ...]
    buffer_bytes: int
    how: str = ""

    @property
    def protocol(self) -> str:
        return self.trainer.protocol


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """Bytes per device of one tag of one role in one phase (see `MemoryPlan.phases`)."""

    pool: str
    role: str
    tag: str
    phase: str
    num_bytes: int
    how: str


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """`capacity_bytes` is the memory of a device, by pool. `together` lists the roles that sit on the same devices.

    Of the fullest node: `host_bytes_per_node` for parked state and published weights, and `copied_bytes_per_node` beside them
    while a checkpoint is written.

    `phases` are in the order of a step: serving, scoring (of references, teachers and critics), training, updating. A role that
    takes turns with another one of its kind on the same devices has a phase of its own, such as `training critic`.
    """

    rows: tuple[MemoryRow, ...]
    capacity_bytes: Mapping[str, int]
    reserve_bytes: int
    host_bytes_per_node: int
    copied_bytes_per_node: int = field(default=0, kw_only=True)
    together: tuple[tuple[str, ...], ...] = ()
    phases: tuple[str, ...] = ("serving", "training", "updating")

    def phase_bytes(self, pool: str, phase: str) -> int:
        """Bytes on the fullest device of a pool."""
        rows = [r for r in self.rows if r.pool == pool and r.phase == phase]
        return max((sum(r.num_bytes for r in rows if r.role in roles) for roles in self.together), default=0)


@dataclass(frozen=True, slots=True)
class EnvReason:
    """Why a process has an environment variable; `mode` is user, inherited or that of the rule."""

    process: str
    name: str
    value: str
    mode: str
    why: str


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that assembly needs. `shared` is true when trainer and engines time-share devices (colocated).

    `residency` is that of the roles on the actor's devices; None where the actor has them alone. `others` are the critic, the
    reference and the teacher, each where the run has one.
    """

    topology: str
    model: ModelShape
    dtype: str
    pools: tuple[PoolPlan, ...]
    actor: TrainerPlan
    engines: tuple[EnginePlan, ...]
    shared: bool
    residency: str | None
    transport: TransportPlan | None
    memory: MemoryPlan
    perf: Mapping[str, PerfTable]
    start_timeout_s: float
    notes: tuple[str, ...] = ()
    env_reasons: tuple[EnvReason, ...] = ()
    recompute: str = "none"
    """What the trainer recomputes: none, selective or full."""
    recompute_why: str = ""
    hooks_asked: tuple[str, ...] = ()
    """`platform.hook(subject)` in the order asked."""
    needs: PlanNeeds = field(default_factory=PlanNeeds)
    others: tuple[TrainerPlan, ...] = ()

    @property
    def trainers(self) -> tuple[TrainerPlan, ...]:
        """Every training role, the actor first."""
        return (self.actor, *self.others)

    def shares_actor(self, other: TrainerPlan) -> bool:
        """Whether a training role is on the actor's devices."""
        return (other.pool, other.request.placement.slots) == (self.actor.pool, self.actor.request.placement.slots)

    def model_of(self, trainer: TrainerPlan) -> ModelShape:
        """The model that a training role holds."""
        return trainer.model or self.model


def pool_of(pools: Iterable[PoolPlan], name: str) -> PoolPlan:
    """The pool by name. Raises KeyError."""
    return {p.name: p for p in pools}[name]
