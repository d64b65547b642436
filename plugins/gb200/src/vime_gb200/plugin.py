"""Every hook of the gb200 platform: what a Grace-Blackwell rack changes in cuda's answers, and nothing else."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping

from vime.facts.bindings import RayBinding
from vime.facts.capabilities import Capabilities
from vime.facts.collectives import CollectiveSpec, GroupRequest
from vime.facts.diagnosis import Check, DoctorContext, Match, ProbeContext, RecordedFixture
from vime.facts.inventory import DeviceProfile, NodeInventory
from vime.facts.memory import MemoryBackend, NullMemory
from vime.facts.model import ModelShape
from vime.facts.perf import PerfTable
from vime.facts.process import EnvValue, MegatronAdaptation, RoleRequest, VllmDefaults
from vime.facts.transports import Edge, Side, TransportOffer
from vime.hooks import PluginInfo, hookimpl
from vime_gb200 import doctor, engine, inventory, memory, perf, probe, process, trainer, weights

VIME_PLUGIN = PluginInfo("gb200", parent="cuda")


@hookimpl
def vime_probe(ctx: ProbeContext) -> Match | None:
    return probe.match(ctx)


@hookimpl(wrapper=True)
def vime_inventory(ctx: ProbeContext) -> Generator[None, NodeInventory | None, NodeInventory | None]:
    found = yield
    return None if found is None else inventory.amend(found, ctx)


@hookimpl
def vime_profiles() -> Iterable[DeviceProfile]:
    return inventory.PROFILES


@hookimpl(wrapper=True)
def vime_capabilities(inventory: NodeInventory) -> Generator[None, Capabilities | None, Capabilities | None]:
    found = yield
    return None if found is None else process.capabilities(found, inventory)


@hookimpl(wrapper=True)
def vime_ray_binding(inventory: NodeInventory) -> Generator[None, RayBinding | None, RayBinding | None]:
    found = yield
    return None if found is None else process.binding(found, inventory)


@hookimpl
def vime_process_env(request: RoleRequest) -> Mapping[str, EnvValue]:
    return process.environment(request)


@hookimpl(wrapper=True)
def vime_megatron_adapt(
    request: RoleRequest, model: ModelShape
) -> Generator[None, MegatronAdaptation | None, MegatronAdaptation | None]:
    found = yield
    return None if found is None else trainer.adaptation(found)


@hookimpl
def vime_vllm_defaults(request: RoleRequest) -> VllmDefaults:
    return engine.defaults(request)


@hookimpl(wrapper=True)
def vime_collective(request: RoleRequest, group: GroupRequest) -> Generator[None, CollectiveSpec | None, CollectiveSpec | None]:
    found = yield
    return None if found is None else process.collective(found, group)


@hookimpl(wrapper=True)
def vime_memory_backend(
    request: RoleRequest,
) -> Generator[None, MemoryBackend | NullMemory | None, MemoryBackend | NullMemory | None]:
    found = yield
    return memory.amend(found) if isinstance(found, MemoryBackend) else found


@hookimpl(wrapper=True)
def vime_transports(
    edge: Edge, side: Side
) -> Generator[None, list[tuple[TransportOffer, ...]], list[tuple[TransportOffer, ...]]]:
    found = yield
    return weights.amend(found, edge)


@hookimpl(wrapper=True)
def vime_perf_model(inventory: NodeInventory) -> Generator[None, PerfTable | None, PerfTable | None]:
    found = yield
    return None if found is None else perf.table(found, inventory)


@hookimpl
def vime_doctor_checks(ctx: DoctorContext) -> Iterable[Check]:
    return doctor.checks(ctx)


@hookimpl(wrapper=True)
def vime_fixture(ctx: ProbeContext) -> Generator[None, RecordedFixture | None, RecordedFixture | None]:
    found = yield
    return None if found is None else inventory.amend_fixture(found, ctx)
