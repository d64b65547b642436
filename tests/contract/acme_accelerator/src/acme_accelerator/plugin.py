"""Every hook of the acme platform. Each names where its answer is made; nothing here imports torch or the driver."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from acme_accelerator import doctor, engine, inventory, memory, perf, probe, process, trainer, weights
from vime.facts.bindings import RayBinding
from vime.facts.capabilities import Capabilities
from vime.facts.collectives import CollectiveSpec, GroupRequest
from vime.facts.diagnosis import Check, DoctorContext, Match, ProbeContext, RecordedFixture
from vime.facts.inventory import DeviceProfile, NodeInventory
from vime.facts.memory import EngineSleep, MemoryBackend
from vime.facts.model import ModelShape
from vime.facts.perf import PerfTable
from vime.facts.process import EnvValue, MegatronAdaptation, RoleRequest, TrainerRuntime, VllmDefaults
from vime.facts.transports import Edge, Side, TransportOffer
from vime.hooks import PluginInfo, hookimpl

VIME_PLUGIN = PluginInfo("acme", parent="base")


@hookimpl
def vime_probe(ctx: ProbeContext) -> Match | None:
    return probe.match(ctx)


@hookimpl
def vime_inventory(ctx: ProbeContext) -> NodeInventory:
    return inventory.from_facts(inventory.read_machine(ctx.env) if ctx.recording is None else ctx.recording)


@hookimpl
def vime_profiles() -> Iterable[DeviceProfile]:
    return (inventory.NOMINAL,)


@hookimpl
def vime_capabilities(inventory: NodeInventory) -> Capabilities:
    return process.CAPABILITIES


@hookimpl
def vime_ray_binding(inventory: NodeInventory) -> RayBinding:
    return process.BINDING


@hookimpl
def vime_process_env(request: RoleRequest) -> Mapping[str, EnvValue]:
    return process.environment(request)


@hookimpl
def vime_trainer_runtime(request: RoleRequest) -> TrainerRuntime:
    return trainer.runtime(request)


@hookimpl
def vime_megatron_adapt(request: RoleRequest, model: ModelShape) -> MegatronAdaptation:
    return trainer.adaptation(model)


@hookimpl
def vime_vllm_defaults(request: RoleRequest) -> VllmDefaults:
    return engine.defaults(request)


@hookimpl
def vime_collective(request: RoleRequest, group: GroupRequest) -> CollectiveSpec:
    return trainer.collective(group)


@hookimpl
def vime_memory_backend(request: RoleRequest) -> MemoryBackend:
    return memory.BACKEND


@hookimpl
def vime_engine_sleep(request: RoleRequest) -> EngineSleep:
    return memory.SLEEP


@hookimpl
def vime_transports(edge: Edge, side: Side) -> Iterable[TransportOffer]:
    return weights.offers(edge, side)


@hookimpl
def vime_perf_model(inventory: NodeInventory) -> PerfTable:
    return perf.TABLE


@hookimpl
def vime_doctor_checks(ctx: DoctorContext) -> Iterable[Check]:
    return doctor.checks(ctx)


@hookimpl
def vime_fixture(ctx: ProbeContext) -> RecordedFixture:
    return inventory.fixture(ctx)
