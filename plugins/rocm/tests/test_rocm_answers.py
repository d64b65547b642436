"""What the platform says of roles, edges and numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from vime.facts.collectives import GroupRequest
from vime.facts.diagnosis import ProbeContext
from vime.facts.inventory import Device, NodeInventory
from vime.facts.memory import Tag
from vime.facts.model import ModelShape
from vime.facts.perf import Provenance
from vime.facts.process import EnvMode, Factory, Parallel, RoleKind, RolePlacement, RoleRequest, Slot
from vime.facts.transports import Edge, Hosts, Relation, Side
from vime.platforms.lineage import Platform
from vime_rocm import plugin
from vime_rocm.process import CUDA, HIP, ROCR
from vime_rocm.testing.fake_amdsmi import installed

PLATFORM = Platform.of(plugin)
DENSE = ModelShape("qwen3", 2, 64, 4, 2, 32, 128, 320, True, 100_000, 256)


def node(profile: str) -> NodeInventory:
    with installed(profile) as env:
        return PLATFORM.inventory(ProbeContext(env))


def nominal(name: str, arch: str | None) -> NodeInventory:
    device = Device(0, "n:0", name, 1, arch=arch)
    return NodeInventory("n", "rocm", "x86_64", (device,), cpus=0, memory_bytes=1)


NODE = node("mi300x8")


def request(kind: RoleKind, devices: tuple[int, ...] = (0,), at: NodeInventory = NODE, **more: Any) -> RoleRequest:
    return RoleRequest(
        role="actor" if kind is RoleKind.TRAINER else "rollout",
        kind=kind,
        placement=RolePlacement(kind.value, tuple(Slot(0, device) for device in devices)),
        inventories=(at,),
        capabilities=PLATFORM.capabilities(at),
        parallel=more.pop("parallel", Parallel(dp=len(devices))),
        dtype="bfloat16",
        **more,
    )


def edge(trainer: tuple[int, ...], engine: tuple[int, ...], relation: Relation, at: NodeInventory = NODE, **more: Any) -> Edge:
    ends = request(RoleKind.TRAINER, trainer, at, **more), request(RoleKind.ENGINE, engine, at, **more)
    return Edge(*ends, relation=relation, num_bytes=10**9)


def usable(found: Edge) -> set[str]:
    """Protocols whose preconditions hold on both sides."""
    sides = [{o.protocol for o in PLATFORM.transports(found, side) if all(p.holds for p in o.preconditions)} for side in Side]
    return set.intersection(*sides)


# ---- devices


@pytest.mark.parametrize(
    ("archs", "recipes"),
    [
        (("gfx942",), ("e4m3fnuz",)),
        (("gfx950", "gfx950"), ("e4m3fn", "mxfp8", "mxfp6", "mxfp4")),
        (("gfx942", "gfx950"), ()),
        ((None,), ()),
    ],
)
def test_8_bit_formats_follow_the_architecture(archs: tuple[str | None, ...], recipes: tuple[str, ...]) -> None:
    devices = tuple(Device(i, str(i), "x", 1, arch=arch) for i, arch in enumerate(archs))
    found = PLATFORM.capabilities(replace(NODE, devices=devices))
    assert found.fp8_recipes == recipes
    assert ("fp8_recipes" in found.absent) == (not recipes)
    assert ("e4m3fn" in found.absent) == (recipes == ("e4m3fnuz",))


def test_every_process_sees_the_whole_node_under_one_list_of_numbers() -> None:
    binding = PLATFORM.ray_binding(NODE)
    assert (binding.resource, binding.visible_env, binding.unset_env, binding.id_kind) == ("GPU", (HIP, CUDA), (ROCR,), "index")
    assert binding.full_node_mask
    assert set(binding.noset_env) == {f"RAY_EXPERIMENTAL_NOSET_{name}" for name in (HIP, CUDA, ROCR)}
    assert binding.labels == {"ray.io/accelerator-type": "AMD-Instinct-MI300X-OAM"}
    assert PLATFORM.ray_binding(nominal("mi355x", "gfx950")).labels["ray.io/accelerator-type"] == "AMD-Instinct-MI355X-OAM"
    assert PLATFORM.ray_binding(nominal("something", None)).labels == {}


# ---- processes


def test_one_hardware_queue_for_split_layers_only() -> None:
    split = PLATFORM.process_env(request(RoleKind.TRAINER, (0, 1), parallel=Parallel(tp=2)))
    assert split["CUDA_DEVICE_MAX_CONNECTIONS"].value == "1"
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in PLATFORM.process_env(request(RoleKind.TRAINER))


@pytest.mark.parametrize("kind", list(RoleKind))
def test_variables_of_every_process(kind: RoleKind) -> None:
    rules = PLATFORM.process_env(request(kind, threads=3))
    assert rules["GPU_PINNED_MIN_XFER_SIZE"].value == "4194304"
    assert rules.get("OMP_NUM_THREADS") is None if kind is RoleKind.ENGINE else rules["OMP_NUM_THREADS"].value == "3"
    assert all(rule.why for rule in rules.values())
    assert not [name for name in rules if "MSCCL" in name or "VISIBLE" in name]


def test_groups_have_a_backend_for_either_device() -> None:
    trainer = PLATFORM.collective(request(RoleKind.TRAINER), GroupRequest("trainer", 8))
    assert trainer.backend == "cpu:gloo,cuda:nccl"
    assert PLATFORM.collective(request(RoleKind.ENGINE), GroupRequest("weight_sync", 9)).backend == "nccl"
    assert "two ranks on one device" in trainer.limits


def test_the_runtime_knows_the_processors_next_to_each_device() -> None:
    runtime = PLATFORM.trainer_runtime(request(RoleKind.TRAINER, threads=2))
    near, far = tuple(range(8)), tuple(range(8, 16))
    expected = (near,) * 4 + (far,) * 4
    assert runtime.bootstrap == Factory("vime_rocm.runtime:RocmRuntime", {"threads": 2, "numa_cpus": expected})
    unknown = PLATFORM.trainer_runtime(request(RoleKind.TRAINER, at=nominal("mi300x", "gfx942")))
    assert unknown.bootstrap.options["numa_cpus"] == ()


def test_processors_are_not_bound_where_nodes_differ() -> None:
    other = replace(NODE, numa=NODE.numa[:1])
    both = replace(request(RoleKind.TRAINER), inventories=(NODE, other), placement=RolePlacement("t", (Slot(0, 0), Slot(1, 0))))
    assert PLATFORM.trainer_runtime(both).bootstrap.options["numa_cpus"] == ()


def test_layers_come_from_transformer_engine_where_it_is_installed() -> None:
    own = PLATFORM.megatron_adapt(request(RoleKind.TRAINER), DENSE)
    assert not own.transformer_engine
    assert own.core_attention == Factory("vime.trainer.megatron.varlen:VarlenCoreAttention")
    assert own.norm == Factory("vime.trainer.megatron.attention:RmsNorm")
    assert own.overrides["apply_rope_fusion"].value is False
    engine = PLATFORM.megatron_adapt(request(RoleKind.TRAINER, software={"transformer-engine": "2.4.0"}), DENSE)
    assert (engine.transformer_engine, engine.norm, engine.core_attention) == (True, None, None)
    assert set(engine.overrides) == {"use_cpu_initialization", "gradient_accumulation_fusion"}


def test_permutation_is_plain_for_experts_without_transformer_engine() -> None:
    experts = replace(DENSE, experts=8, experts_per_token=2, expert_ffn=64)
    assert PLATFORM.megatron_adapt(request(RoleKind.TRAINER), experts).overrides["moe_permute_fusion"].value is False
    assert "moe_permute_fusion" not in PLATFORM.megatron_adapt(request(RoleKind.TRAINER), DENSE).overrides


@pytest.mark.parametrize(("arch", "recipe"), [("gfx942", "e4m3fnuz"), ("gfx950", "mxfp8"), ("gfx1100", None), (None, None)])
def test_the_native_recipe_and_the_checkpoint_limit(arch: str | None, recipe: str | None) -> None:
    found = PLATFORM.megatron_adapt(request(RoleKind.TRAINER, at=nominal("x", arch)), DENSE)
    assert found.fp8_recipe == recipe
    assert found.async_save is False
    assert "asynchronous checkpoints" in found.limits


# ---- engines


def test_the_server_is_the_one_of_the_installed_release() -> None:
    defaults = PLATFORM.vllm_defaults(request(RoleKind.ENGINE))
    assert defaults.launch is None
    assert "enable_scale_out" not in defaults.args
    assert defaults.expected_platform == "vllm.platforms.rocm.RocmPlatform"
    assert defaults.entry_points == ("vime",)


def test_a_shared_device_bounds_the_engine() -> None:
    def share(**more: Any) -> float | None:
        return PLATFORM.vllm_defaults(request(RoleKind.ENGINE, **more)).args.get("gpu_memory_utilization")

    assert share(shared_with=("actor",), residency="park") == 0.6
    assert share(shared_with=("actor",), residency="resident") == 0.4
    assert share() is None


def test_a_parked_engine_drops_everything_and_does_without_growing_segments() -> None:
    sleep = PLATFORM.engine_sleep(request(RoleKind.ENGINE, residency="park"))
    assert (sleep.level, sleep.backend, sleep.args) == (2, "cumem", {"enable_sleep_mode": True})
    assert {tag: (s.frees, s.preserves) for tag, s in sleep.tags.items()} == {
        Tag.ENGINE_WEIGHTS: (True, False),
        Tag.KV: (True, False),
        Tag.GRAPHS: (False, True),
        Tag.COMMUNICATORS: (False, True),
    }
    assert "zeroed" in sleep.tags[Tag.KV].why
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"):
        assert (sleep.env[name].value, sleep.env[name].mode) == ("expandable_segments", EnvMode.WITHOUT)
    assert sleep.env["VLLM_ROCM_SLEEP_MEM_CHUNK_SIZE"].value == "256"


@pytest.mark.parametrize("residency", ["resident", None])
def test_another_engine_is_only_paused(residency: str | None) -> None:
    sleep = PLATFORM.engine_sleep(request(RoleKind.ENGINE, residency=residency))
    assert (sleep.level, dict(sleep.args), dict(sleep.env)) == (0, {}, {})
    assert all(s.preserves and not s.frees for s in sleep.tags.values())


# ---- weights


@pytest.mark.parametrize(
    ("trainer", "engine", "relation", "protocols"),
    [
        ((0,), (0,), Relation.SAME_DEVICE, {"device_ipc", "host_shm", "disk"}),
        ((0, 1), (0, 1), Relation.SAME_DEVICE, {"device_ipc", "host_shm", "disk"}),
        ((0, 1), (0,), Relation.SAME_DEVICE, {"host_shm", "disk"}),
        ((0, 1), (2, 3), Relation.SAME_NODE, {"collective", "host_shm", "disk"}),
        ((0,), (0,), Relation.NETWORK, {"collective", "disk"}),
    ],
)
def test_transports_by_place(
    trainer: tuple[int, ...], engine: tuple[int, ...], relation: Relation, protocols: set[str]
) -> None:
    assert usable(edge(trainer, engine, relation)) == protocols


def test_a_rejected_handle_says_that_numbers_must_agree() -> None:
    found = edge((0, 1), (0,), Relation.SAME_DEVICE)
    (offer,) = (o for o in PLATFORM.transports(found, Side.ENGINE) if o.protocol == "device_ipc")
    assert [p.reason.split(",")[0] for p in offer.preconditions if not p.holds] == [
        "HIP resolves a memory handle's device number in the importer's list"
    ]


def test_partitions_export_nothing() -> None:
    assert "device_ipc" not in usable(edge((0,), (0,), Relation.SAME_DEVICE, node("mi300x8-cpx")))


def test_the_trainers_halves_carry_the_options_and_the_engines_learn_them() -> None:
    found = edge((0,), (0,), Relation.SAME_DEVICE)
    trainer, engine = (
        {o.protocol: o.factory for o in PLATFORM.transports(found, side)} for side in (Side.TRAINER, Side.ENGINE)
    )
    assert trainer["device_ipc"] == Factory(
        "vime.weights.transports.device_ipc:DeviceIpcTrainer", {"exporter": "vime_rocm.device_export:HipExporter"}
    )
    assert trainer["collective"] == Factory(
        "vime.weights.transports.collective:CollectiveTrainer", {"backend": "nccl", "device": "cuda"}
    )
    assert engine["device_ipc"] == Factory("vime.weights.transports.device_ipc:DeviceIpcEngine")
    assert engine["collective"] == Factory("vime.weights.transports.collective:CollectiveEngine")


def test_costs_are_the_vendors_figures_or_unknown() -> None:
    def costs(found: Edge) -> dict[str, tuple[float | None, str]]:
        return {o.protocol: (o.cost.bytes_per_s, o.cost.provenance) for o in PLATFORM.transports(found, Side.TRAINER)}

    on_device = costs(edge((0,), (0,), Relation.SAME_DEVICE))
    assert on_device["device_ipc"] == (2.65e12, "derived")
    assert on_device["host_shm"] == (25e9, "derived")
    assert costs(edge((0, 1), (0, 1), Relation.SAME_DEVICE))["device_ipc"] == (64e9, "spec")
    assert costs(edge((0,), (1,), Relation.SAME_NODE, node("mi355x8")))["collective"] == (76.8e9, "spec")
    assert costs(edge((0,), (1,), Relation.NETWORK))["collective"] == (None, "unknown")
    on_two_hosts = replace(edge((0, 1), (0, 1), Relation.SAME_DEVICE), hosts=Hosts.EACH)
    assert costs(on_two_hosts)["device_ipc"] == (None, "unknown")
    assert costs(edge((0,), (0,), Relation.SAME_DEVICE, node("radeon")))["device_ipc"] == (None, "unknown")


# ---- numbers


@pytest.mark.parametrize(
    ("at", "memory", "link", "matmul"),
    [
        (NODE, 5.3e12, 64e9, 1307.4e12),
        (nominal("mi325x", "gfx942"), 6.0e12, 64e9, 1307.4e12),
        (node("mi355x8"), 8.0e12, 76.8e9, 2500e12),
    ],
)
def test_rates_are_a_data_sheets(at: NodeInventory, memory: float, link: float, matmul: float) -> None:
    table = PLATFORM.perf_model(at)
    found = [table.get(name) for name in ("device_memory", "scale_up", "matmul")]
    assert [q.value for q in found] == [memory, link, matmul]
    assert {q.provenance for q in found} == {Provenance.SPEC}
    assert (table.get("host_link").value, table.get("host_link").provenance) == (50e9, Provenance.DERIVED)
    assert table.get("network").value is None


@pytest.mark.parametrize("at", [node("mi300x8-cpx"), node("radeon"), nominal("mi400", None)])
def test_rates_of_others_stay_unknown(at: NodeInventory) -> None:
    quantities = PLATFORM.perf_model(at).quantities.values()
    assert {(q.value, q.provenance) for q in quantities} == {(None, Provenance.UNKNOWN)}
    assert all(q.unit and q.source for q in quantities)
