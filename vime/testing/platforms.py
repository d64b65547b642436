"""A platform that answers from a few numbers, for tests of planning: discrete devices, memory that leaves, two transports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from vime.facts.bindings import RayBinding
from vime.facts.capabilities import Capabilities
from vime.facts.collectives import CollectiveSpec, GroupRequest
from vime.facts.inventory import Device, DeviceProfile, NodeInventory
from vime.facts.memory import EngineSleep, MemoryBackend, NullMemory, Tag, TagSemantics
from vime.facts.model import ModelShape
from vime.facts.perf import PerfTable, Provenance, Quantity
from vime.facts.process import EnvValue, Factory, MegatronAdaptation, RoleRequest, TrainerRuntime, VllmDefaults
from vime.facts.transports import Edge, Precondition, Relation, Side, TransferCost, TransportOffer

GIB = 2**30
_NOTHING = Factory("vime.testing.platforms:nothing")

FREED = TagSemantics(frees=True, preserves=True, why="copied to the host")
STAYS = TagSemantics(frees=False, preserves=True, why="stays on the device")

TINY_MODEL = ModelShape(
    family="qwen3",
    layers=4,
    hidden=128,
    heads=4,
    kv_heads=2,
    head_dim=32,
    ffn=384,
    vocab=320,
    tied_embeddings=True,
    parameters=830_000,
    max_positions=512,
)


def nothing(**_options: object) -> None:
    """Target of factories that are never built."""


@dataclass
class FakePlatform:
    """A platform of one device kind; change fields to change its answers.

    `backend` and `sleep` say what can leave a device, `offers` lists (protocol, seconds per GiB, sides that offer it).
    `rules` are environment rules of every process.
    """

    name: str = "acme"
    memory_bytes: int = 80 * GIB
    devices_per_node: int | None = 8
    node_memory_bytes: int = 1024 * GIB
    virtual: bool = False
    dtypes: tuple[str, ...] = ("bfloat16", "float32")
    backend: MemoryBackend | NullMemory = field(
        default_factory=lambda: MemoryBackend(
            _NOTHING, {Tag.PARAMS: FREED, Tag.GRADS: FREED, Tag.OPTIMIZER: FREED, Tag.ACTIVATIONS: STAYS}, pinned_host=True
        )
    )
    sleep: EngineSleep = field(default_factory=lambda: EngineSleep(1, {Tag.ENGINE_WEIGHTS: FREED, Tag.KV: FREED}))
    rules: Mapping[str, EnvValue] = field(default_factory=dict)
    domain_ranks: int | None = None
    engine_args: Mapping[str, object] = field(default_factory=dict)
    offers: tuple[tuple[str, float | None, tuple[Side, ...]], ...] = (
        ("device_ipc", 0.01, (Side.TRAINER, Side.ENGINE)),
        ("collective", 0.1, (Side.TRAINER, Side.ENGINE)),
        ("disk", 10.0, (Side.TRAINER, Side.ENGINE)),
    )
    calls: list[str] = field(default_factory=list)

    @property
    def lineage(self) -> tuple[str, ...]:
        return (self.name, "base")

    def profile(self, name: str = "acme-80g") -> DeviceProfile:
        """The nominal device."""
        return DeviceProfile(
            name=name,
            platform=self.name,
            memory_bytes=self.memory_bytes,
            devices_per_node=self.devices_per_node,
            arch="x86_64",
            node_memory_bytes=self.node_memory_bytes,
            virtual=self.virtual,
        )

    def node(self, hostname: str = "n0", devices: int = 8) -> NodeInventory:
        """A machine as it would be found."""
        found = tuple(Device(i, f"{hostname}/{i}", "acme-80g", self.memory_bytes) for i in range(devices))
        blank = NodeInventory(hostname, self.name, "x86_64", found, cpus=64, memory_bytes=self.node_memory_bytes)
        return replace(blank, virtual=self.virtual)

    def profiles(self) -> tuple[DeviceProfile, ...]:
        self.calls.append("profiles")
        return (self.profile(),)

    def capabilities(self, inventory: NodeInventory) -> Capabilities:
        self.calls.append("capabilities")
        return Capabilities("acme", self.dtypes, self.dtypes[0], collectives=("gloo",), virtual_devices=self.virtual)

    def ray_binding(self, inventory: NodeInventory) -> RayBinding:
        self.calls.append("ray_binding")
        return RayBinding("ACME", virtual=self.virtual)

    def process_env(self, request: RoleRequest) -> Mapping[str, EnvValue]:
        self.calls.append("process_env")
        return self.rules

    def trainer_runtime(self, request: RoleRequest) -> TrainerRuntime:
        self.calls.append("trainer_runtime")
        return TrainerRuntime(_NOTHING, device_type="acme")

    def megatron_adapt(self, request: RoleRequest, model: ModelShape) -> MegatronAdaptation:
        self.calls.append("megatron_adapt")
        return MegatronAdaptation()

    def vllm_defaults(self, request: RoleRequest) -> VllmDefaults:
        self.calls.append("vllm_defaults")
        return VllmDefaults(args=self.engine_args)

    def collective(self, request: RoleRequest, group: GroupRequest) -> CollectiveSpec:
        self.calls.append("collective")
        return CollectiveSpec("gloo", 60.0, ("sum",), domain_ranks=self.domain_ranks)

    def memory_backend(self, request: RoleRequest) -> MemoryBackend | NullMemory:
        self.calls.append("memory_backend")
        return self.backend

    def engine_sleep(self, request: RoleRequest) -> EngineSleep:
        self.calls.append("engine_sleep")
        return self.sleep

    def transports(self, edge: Edge, side: Side) -> tuple[TransportOffer, ...]:
        self.calls.append("transports")
        return tuple(self._offer(name, cost, edge, side) for name, cost, sides in self.offers if side in sides)

    def _offer(self, protocol: str, seconds_per_gib: float | None, edge: Edge, side: Side) -> TransportOffer:
        needs = ()
        if protocol == "device_ipc":
            shared = edge.relation is Relation.SAME_DEVICE and edge.rank_beside_engines
            needs = (Precondition(shared, "trainer and engine must be on the same devices, each engine on one host"),)
        rate = None if seconds_per_gib is None else GIB / seconds_per_gib
        return TransportOffer(protocol, side, _NOTHING, TransferCost(rate, provenance="spec"), preconditions=needs)

    def perf_model(self, inventory: NodeInventory) -> PerfTable:
        self.calls.append("perf_model")
        return PerfTable({"host_link": Quantity(50e9, "bytes/s", Provenance.SPEC, "data sheet")})
