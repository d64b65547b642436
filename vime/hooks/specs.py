"""Every question that vime asks a platform, on one page.

A hook returns a frozen, picklable, torch-free value from `vime.facts`. Where code is needed the value names a factory,
`"module:callable"`, which is built in the process that owns it: no transfer, collective or per-step work passes through
these hooks.

Three kinds:

- *first*: the leaf of the lineage answers first, None falls through to its parent. An exception never falls through.
- *all*: every plugin of the lineage contributes and the core merges, parents first.
- *isolated*: like *all*, but each implementation is called on its own, so that one that raises costs only its answer.

*required* hooks have no answer in `base`: a lineage that leaves one out does not load.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from vime.facts.bindings import RayBinding
from vime.facts.capabilities import Capabilities
from vime.facts.collectives import CollectiveSpec, GroupRequest
from vime.facts.diagnosis import Check, DoctorContext, Match, ProbeContext, RecordedFixture
from vime.facts.inventory import DeviceProfile, NodeInventory
from vime.facts.memory import EngineSleep, MemoryBackend, NullMemory
from vime.facts.model import ModelShape
from vime.facts.perf import PerfTable
from vime.facts.process import EnvValue, MegatronAdaptation, RoleRequest, TrainerRuntime, VllmDefaults
from vime.facts.transports import Edge, Side, TransportOffer
from vime.hooks.markers import hookspec


class Kind(StrEnum):
    FIRST = "first"
    ALL = "all"
    ISOLATED = "isolated"


@dataclass(frozen=True, slots=True)
class HookRule:
    """How a hook is called and what it must return. `runtime` hooks are asked in every run."""

    kind: Kind
    returns: tuple[type, ...]
    required: bool = False
    runtime: bool = False


RULES: Mapping[str, HookRule] = {
    "vime_probe": HookRule(Kind.ISOLATED, (Match,)),
    "vime_inventory": HookRule(Kind.FIRST, (NodeInventory,), required=True, runtime=True),
    "vime_profiles": HookRule(Kind.ALL, (DeviceProfile,)),
    "vime_capabilities": HookRule(Kind.FIRST, (Capabilities,), required=True, runtime=True),
    "vime_ray_binding": HookRule(Kind.FIRST, (RayBinding,), required=True, runtime=True),
    "vime_process_env": HookRule(Kind.ALL, (EnvValue,), runtime=True),
    "vime_trainer_runtime": HookRule(Kind.FIRST, (TrainerRuntime,), required=True, runtime=True),
    "vime_megatron_adapt": HookRule(Kind.FIRST, (MegatronAdaptation,), runtime=True),
    "vime_vllm_defaults": HookRule(Kind.ALL, (VllmDefaults,), runtime=True),
    "vime_collective": HookRule(Kind.FIRST, (CollectiveSpec,), required=True, runtime=True),
    "vime_memory_backend": HookRule(Kind.FIRST, (MemoryBackend, NullMemory), runtime=True),
    "vime_engine_sleep": HookRule(Kind.FIRST, (EngineSleep,), runtime=True),
    "vime_transports": HookRule(Kind.ALL, (TransportOffer,), runtime=True),
    "vime_perf_model": HookRule(Kind.FIRST, (PerfTable,), runtime=True),
    "vime_doctor_checks": HookRule(Kind.ISOLATED, (Check,)),
    "vime_fixture": HookRule(Kind.FIRST, (RecordedFixture,)),
}


class VimeSpecs(Protocol):
    """The hook specifications. Implementations may leave out trailing parameters that they do not need."""

    # ---- device discovery

    @hookspec
    def vime_probe(self, ctx: ProbeContext) -> Match | None:
        """Say whether this machine has the platform's hardware. Isolated.

        Asked in a child process with a time limit, only when the platform is `auto`. Must not open a device context.
        A crash or time-out counts as "no" and is shown by `vime plugins list`.
        """
        ...

    @hookspec(firstresult=True)
    def vime_inventory(self, ctx: ProbeContext) -> NodeInventory | None:
        """List the devices of this node. First, required.

        Asked once on every node of a run. With `ctx.recording` set, replay it instead of looking at hardware.
        Raises PluginError when the hardware cannot be read; partial knowledge goes into `health` and unknown fields.
        """
        ...

    @hookspec
    def vime_profiles(self) -> Iterable[DeviceProfile]:
        """List nominal devices by name, so that a plan needs no machine. All."""
        ...

    @hookspec(firstresult=True)
    def vime_capabilities(self, inventory: NodeInventory) -> Capabilities | None:
        """Derive what a node can do. First, required, pure: same inventory, same answer, no device touched."""
        ...

    @hookspec(firstresult=True)
    def vime_ray_binding(self, inventory: NodeInventory) -> RayBinding | None:
        """Name the Ray resource, labels and visible-device variables. First, required, pure."""
        ...

    # ---- process

    @hookspec
    def vime_process_env(self, request: RoleRequest) -> Mapping[str, EnvValue]:
        """Environment rules for one process of a role. All: children override parents, the user overrides defaults."""
        ...

    @hookspec(firstresult=True)
    def vime_trainer_runtime(self, request: RoleRequest) -> TrainerRuntime | None:
        """Name the factory that prepares a trainer process before megatron-core is imported. First, required."""
        ...

    @hookspec(firstresult=True)
    def vime_megatron_adapt(self, request: RoleRequest, model: ModelShape) -> MegatronAdaptation | None:
        """Choose layer-spec pieces, kernels, optimizer and forced settings for a model. First."""
        ...

    @hookspec
    def vime_vllm_defaults(self, request: RoleRequest) -> VllmDefaults:
        """Give launch arguments, environment, plugin entry points and the expected vLLM platform. All, merged."""
        ...

    # ---- collective backends

    @hookspec(firstresult=True)
    def vime_collective(self, request: RoleRequest, group: GroupRequest) -> CollectiveSpec | None:
        """Choose the backend of a process group. First, required. For an edge both sides are asked and intersected."""
        ...

    # ---- memory offload

    @hookspec(firstresult=True)
    def vime_memory_backend(self, request: RoleRequest) -> MemoryBackend | NullMemory | None:
        """Say how a trainer leaves its device, tag by tag. First."""
        ...

    @hookspec(firstresult=True)
    def vime_engine_sleep(self, request: RoleRequest) -> EngineSleep | None:
        """Say how an engine sleeps and what each tag really does. First."""
        ...

    # ---- weight-transfer kernels

    @hookspec
    def vime_transports(self, edge: Edge, side: Side) -> Iterable[TransportOffer]:
        """Offer this side's half of each transport it can take part in. All.

        Offers that do not hold are returned too, with the failed precondition, so that the plan can print why.
        """
        ...

    # ---- planning

    @hookspec(firstresult=True)
    def vime_perf_model(self, inventory: NodeInventory) -> PerfTable | None:
        """Give rates for the plan, each marked spec, measured or derived; unknown stays unknown. First, pure."""
        ...

    # ---- diagnosis

    @hookspec
    def vime_doctor_checks(self, ctx: DoctorContext) -> Iterable[Check]:
        """Check what usually goes wrong on this platform, each finding with a fix. Isolated."""
        ...

    @hookspec(firstresult=True)
    def vime_fixture(self, ctx: ProbeContext) -> RecordedFixture | None:
        """Record what replays `vime_inventory` without the hardware. First."""
        ...


def hook_names() -> tuple[str, ...]:
    """All hook names, in the order of the page above."""
    return tuple(name for name in vars(VimeSpecs) if name.startswith("vime_"))


def first_line(name: str) -> str:
    """A hook's one-line summary, for listings."""
    doc: Any = getattr(VimeSpecs, name).__doc__
    return str(doc).strip().splitlines()[0]
