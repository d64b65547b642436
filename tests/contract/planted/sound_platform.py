"""A correct platform of two pretended devices that compute on the host. Faults are planted into it one at a time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from vime.errors import PluginError
from vime.facts.bindings import RayBinding
from vime.facts.capabilities import Capabilities
from vime.facts.collectives import CollectiveSpec, GroupRequest
from vime.facts.diagnosis import Check, DoctorContext, Match, ProbeContext, RecordedFixture, Severity
from vime.facts.inventory import Device, DeviceProfile, Link, NodeInventory, NumaNode
from vime.facts.memory import EngineSleep, MemoryBackend, Tag, TagSemantics
from vime.facts.model import ModelShape
from vime.facts.perf import PerfTable, Provenance, Quantity
from vime.facts.process import (
    EnvMode,
    EnvValue,
    Factory,
    MegatronAdaptation,
    Override,
    RoleKind,
    RoleRequest,
    TrainerRuntime,
    VllmDefaults,
)
from vime.facts.transports import Edge, Precondition, Side, TransferCost, TransportOffer
from vime.hooks import PluginInfo, hookimpl

VIME_PLUGIN = PluginInfo("sound", parent="base")
VARIABLE = "SOUND_DEVICES"
GIB = 2**30

MOVES = TagSemantics(frees=True, preserves=True, why="copied aside")
LOST = TagSemantics(frees=True, preserves=False, why="made anew when it wakes")
SLEEP = EngineSleep(1, {Tag.ENGINE_WEIGHTS: MOVES, Tag.KV: LOST}, args={"enable_sleep_mode": True})
PAUSE = EngineSleep(
    0,
    {tag: TagSemantics(frees=False, preserves=True, why="the engine only pauses") for tag in (Tag.ENGINE_WEIGHTS, Tag.KV)},
    why="it shares its device with nobody",
)
MEMORY = MemoryBackend(
    Factory("sound_pieces:Memory"),
    dict.fromkeys((Tag.PARAMS, Tag.GRADS, Tag.OPTIMIZER), MOVES),
    env={"SOUND_POOL": EnvValue("1", "storages must be freed one by one")},
)
PROFILE = DeviceProfile("sound-16g", "sound", 16 * GIB, 2, "x86_64", 64 * GIB, device_arch="sound1", numa_nodes=2)
OFFERS = {
    "sound_link": (Factory("sound_pieces:LinkTrainer"), Factory("sound_pieces:LinkEngine"), 5e9),
    "host_shm": (
        Factory("vime.weights.transports.host_shm:HostShmTrainer"),
        Factory("vime.weights.transports.host_shm:HostShmEngine"),
        2e9,
    ),
}


def facts_of(ctx: ProbeContext) -> Mapping[str, object]:
    if ctx.recording is not None:
        return ctx.recording
    count = ctx.env.get(VARIABLE, "0")
    if not count.isdigit() or count == "0":
        raise PluginError("no sound device is here", fix=f"set {VARIABLE}")
    return {"devices": int(count), "driver": "1.0"}


def node(facts: Mapping[str, object]) -> NodeInventory:
    count = int(str(facts["devices"]))
    return NodeInventory(
        hostname="sound-host",
        platform="sound",
        arch="x86_64",
        devices=tuple(Device(i, f"SOUND-{i}", "Sound One", 16 * GIB, numa_node=0, arch="sound1") for i in range(count)),
        cpus=4,
        memory_bytes=64 * GIB,
        numa=(NumaNode(0, (0, 1, 2, 3), 64 * GIB),),
        links=(Link(0, 1, "wire", 1e9),) if count > 1 else (),
        driver=str(facts["driver"]),
        vendor=dict(facts),
    )


@hookimpl
def vime_probe(ctx: ProbeContext) -> Match | None:
    found = ctx.env.get(VARIABLE, "0") != "0"
    return Match("sound", 10, f"{VARIABLE} is set") if found else None


@hookimpl
def vime_inventory(ctx: ProbeContext) -> NodeInventory:
    return node(facts_of(ctx))


@hookimpl
def vime_profiles() -> Iterable[DeviceProfile]:
    return (PROFILE,)


@hookimpl
def vime_capabilities(inventory: NodeInventory) -> Capabilities:
    why = {"fp8_recipes": "it has no scaled 8-bit kernels", "ipc": "its memory cannot be opened by others"}
    return Capabilities("cpu", ("float32",), "float32", collectives=("gloo",), absent=why)


@hookimpl
def vime_ray_binding(inventory: NodeInventory) -> RayBinding:
    return RayBinding("SOUND", visible_env=("SOUND_VISIBLE",))  # Ray masks no resource of this name.


@hookimpl
def vime_process_env(request: RoleRequest) -> Mapping[str, EnvValue]:
    rules = {
        "SOUND_ORDER": EnvValue("1", "both ends must number devices alike", EnvMode.REQUIRE, scope="both_equal"),
        "SOUND_ALLOC": EnvValue("expandable:False", "a sleeping engine frees its pool", EnvMode.OPTION),
    }
    if request.kind is RoleKind.ENGINE:
        rules["SOUND_GRAPHS"] = EnvValue("1", "graphs fail here", EnvMode.FORBID)
    return rules


@hookimpl
def vime_trainer_runtime(request: RoleRequest) -> TrainerRuntime:
    return TrainerRuntime(Factory("sound_pieces:Runtime", {"threads": request.threads}), device_type="cpu")


@hookimpl
def vime_megatron_adapt(request: RoleRequest, model: ModelShape) -> MegatronAdaptation:
    off = Override(False, "its kernel is not built")
    return MegatronAdaptation(norm=Factory("sound_pieces:Norm"), overrides={"apply_rope_fusion": off})


@hookimpl
def vime_vllm_defaults(request: RoleRequest) -> VllmDefaults:
    return VllmDefaults(
        args={"enforce_eager": True, "block_size": 32},
        env={"SOUND_LOG": EnvValue("0", "one line a request is too much")},
        entry_points=("vime",),
        expected_platform="vllm.platforms.cpu.CpuPlatform",
    )


@hookimpl
def vime_collective(request: RoleRequest, group: GroupRequest) -> CollectiveSpec:
    return CollectiveSpec("gloo", 60.0, ("sum", "max"))


@hookimpl
def vime_memory_backend(request: RoleRequest) -> MemoryBackend:
    return MEMORY


@hookimpl
def vime_engine_sleep(request: RoleRequest) -> EngineSleep:
    return SLEEP if request.residency == "park" else PAUSE


@hookimpl
def vime_transports(edge: Edge, side: Side) -> Iterable[TransportOffer]:
    return offers(edge, side)


def offers(edge: Edge, side: Side) -> list[TransportOffer]:
    near = Precondition(edge.on_one_host, "both ends must be on one node")
    return [
        TransportOffer(
            name, side, halves[list(Side).index(side)], TransferCost(halves[2], provenance="spec"), preconditions=(near,)
        )
        for name, halves in OFFERS.items()
    ]


@hookimpl
def vime_perf_model(inventory: NodeInventory) -> PerfTable:
    link = Quantity(5e10, "bytes/s", Provenance.SPEC, "data sheet of a device that does not exist")
    return PerfTable({"host_link": link, "network": Quantity(None, "bytes/s", Provenance.UNKNOWN)})


@hookimpl
def vime_doctor_checks(ctx: DoctorContext) -> Iterable[Check]:
    sick = [device for device in ctx.inventory.devices if device.health != "ok"]
    if sick:
        return [Check("sound.health", Severity.ERROR, f"{len(sick)} devices do not answer", "reset them")]
    return [Check("sound.health", Severity.OK, "every device answers")]


@hookimpl
def vime_fixture(ctx: ProbeContext) -> RecordedFixture:
    return RecordedFixture("sound", "synthetic", "2026-01-31", dict(facts_of(ctx)))
