"""What the platform answers a run, on nominal and on fake nodes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from vime.facts.collectives import GroupRequest
from vime.facts.diagnosis import ProbeContext
from vime.facts.inventory import Device, NodeInventory, NumaNode
from vime.facts.memory import MemoryBackend, Tag
from vime.facts.model import ModelShape
from vime.facts.perf import Provenance
from vime.facts.process import EnvMode, Parallel, RoleKind, RolePlacement, RoleRequest, Slot
from vime.facts.transports import Edge, Relation, Side
from vime.platforms.lineage import Platform
from vime_ascend import inventory as nodes
from vime_ascend import plugin
from vime_ascend.testing.fake_npu_smi import installed

DENSE = ModelShape("qwen3", 4, 128, 4, 2, 32, 384, 320, True, 830_000, 512)
SPARSE = replace(DENSE, family="qwen3_moe", experts=8, experts_per_token=2, expert_ffn=96)


@pytest.fixture(scope="module")
def platform() -> Platform:
    return Platform.of(plugin)


@pytest.fixture(scope="module")
def node() -> NodeInventory:
    with installed("atlas-a2x8") as env:
        return nodes.of(ProbeContext(env))


def request(
    node: NodeInventory, kind: RoleKind = RoleKind.TRAINER, *, slots: tuple[int, ...] = (0,), residency: str | None = None
) -> RoleRequest:
    name, other = ("actor", "rollout") if kind is RoleKind.TRAINER else ("rollout", "actor")
    return RoleRequest(
        role=name,
        kind=kind,
        placement=RolePlacement(name, tuple(Slot(0, slot) for slot in slots)),
        inventories=(node,),
        capabilities=plugin.vime_capabilities(node),
        parallel=Parallel(tp=len(slots)),
        dtype="bfloat16",
        shared_with=(other,) if residency else (),
        residency=residency,
    )


# ---- facts


def test_profiles_are_what_the_vendor_describes(platform: Platform) -> None:
    found = {p.name: p for p in platform.profiles()}
    assert {(p.arch, p.memory_bytes) for p in found.values()} == {("aarch64", 64 * 2**30)}
    assert (found["atlas-a2"].devices_per_node, found["atlas-a2"].domain_devices, found["atlas-a2"].numa_nodes) == (8, 8, 4)
    assert (found["atlas-a3"].devices_per_node, found["atlas-a3"].domain_devices) == (16, 16)
    assert found["atlas-a3-pod"].domain_devices == 384 * 2


def test_binding_and_capabilities(platform: Platform, node: NodeInventory) -> None:
    binding = platform.ray_binding(node)
    assert (binding.resource, binding.visible_env, binding.id_kind) == ("NPU", ("ASCEND_RT_VISIBLE_DEVICES",), "index")
    assert binding.noset_env == ("RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES",)
    found = platform.capabilities(node)
    assert (found.device_type, found.default_dtype, found.fp8_recipes) == ("npu", "bfloat16", ())
    assert "Ascend 950" in found.absent["fp8_recipes"]


def test_rates_are_the_vendors_or_unknown(platform: Platform, node: NodeInventory) -> None:
    a2 = platform.perf_model(node)
    assert {name for name, q in a2.quantities.items() if q.value is not None} == set()
    a3 = platform.perf_model(replace(node, devices=(Device(0, "n/0", "atlas-a3", 2**36, arch="ascend910c"),)))
    assert a3.get("scale_up").value == 392e9 / 2
    assert a3.get("device_memory").value == 3.2e12 / 2
    assert {q.provenance for q in a3.quantities.values() if q.value is not None} == {Provenance.SPEC}
    assert a3.get("host_link").value is None


# ---- processes


@pytest.mark.parametrize("kind", list(RoleKind))
@pytest.mark.parametrize("residency", [None, "park", "resident"])
def test_environment_of_a_process(platform: Platform, node: NodeInventory, kind: RoleKind, residency: str | None) -> None:
    rules = platform.process_env(request(node, kind, residency=residency))
    values = {name: rule.value for name, rule in rules.items()}
    assert all(rule.why for rule in rules.values())
    assert values["HCCL_CONNECT_TIMEOUT"] == "1800"
    assert 120 <= int(values["HCCL_CONNECT_TIMEOUT"]) <= 7200
    assert values["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert values["TASK_QUEUE_ENABLE"] == ("2" if kind is RoleKind.TRAINER else "1")
    assert ("HCCL_NPU_SOCKET_PORT_RANGE" in values) is (residency is not None)
    assert ("VLLM_ASCEND_ENABLE_NZ" in values) is (kind is RoleKind.ENGINE)
    assert "HCCL_DETERMINISTIC" not in values
    assert "PYTORCH_NPU_ALLOC_CONF" not in values


def test_weights_must_stay_nd_and_buffers_are_told_with_their_price(platform: Platform, node: NodeInventory) -> None:
    rules = platform.process_env(request(node, RoleKind.ENGINE))
    assert (rules["VLLM_ASCEND_ENABLE_NZ"].value, rules["VLLM_ASCEND_ENABLE_NZ"].mode) == ("0", EnvMode.REQUIRE)
    assert "400 MiB" in rules["HCCL_BUFFSIZE"].why


def test_a_repeatable_run_asks_hccl_for_one_order(platform: Platform, node: NodeInventory) -> None:
    rules = platform.process_env(replace(request(node), deterministic=True))
    assert rules["HCCL_DETERMINISTIC"].value == "true"


def test_the_runtime_gets_the_processors_next_to_each_chip_of_a_node(platform: Platform, node: NodeInventory) -> None:
    """By the chip's place on the node, whichever chips the role has: that is the number that `bind_host` is told."""
    for slots in ((1, 4), (4,)):
        near = platform.trainer_runtime(request(node, slots=slots)).bootstrap.options["numa_cpus"]
        assert (near[1], near[4], len(near)) == (tuple(range(144, 168)), tuple(range(24)), len(node.devices))
    homeless = replace(node, devices=(replace(node.devices[0], numa_node=None),), numa=(NumaNode(0, (0, 1), 2**30),))
    assert platform.trainer_runtime(request(homeless)).bootstrap.options["numa_cpus"] == ()


def test_adaptation_switches_off_what_others_compiled(platform: Platform, node: NodeInventory) -> None:
    dense, sparse = (platform.megatron_adapt(request(node), model) for model in (DENSE, SPARSE))
    assert all(override.value is False and override.why for override in sparse.overrides.values())
    assert set(sparse.overrides) - set(dense.overrides) == {"moe_permute_fusion"}
    assert dense.core_attention is not None
    assert (dense.transformer_engine, dense.fp8_recipe, dense.async_save) == (False, None, False)
    assert "asynchronous checkpoint" in dense.limits


def test_groups_join_host_and_device(platform: Platform, node: NodeInventory) -> None:
    assert platform.collective(request(node), GroupRequest("trainer", 8)).backend == "cpu:gloo,npu:hccl"
    weights = platform.collective(request(node), GroupRequest("weight_sync", 9))
    assert (weights.backend, "avg" in weights.reduce_ops) == ("hccl", False)
    assert "HCCL_BUFFSIZE" in weights.limits["every communicator"]


# ---- engine


def test_every_plugin_of_vllm_ascend_is_let_in(platform: Platform, node: NodeInventory) -> None:
    found = platform.vllm_defaults(request(node, RoleKind.ENGINE))
    assert set(found.entry_points) == {
        *("ascend", "ascend_kv_connector", "ascend_model_loader", "ascend_service_profiling", "ascend_model"),
        "vime",
    }
    assert found.expected_platform == "vllm_ascend.platform.NPUPlatform"
    assert found.args["additional_config"] == {"weight_nz_mode": 0}


def test_the_server_is_the_one_of_the_installed_release(platform: Platform, node: NodeInventory) -> None:
    assert platform.vllm_defaults(request(node, RoleKind.ENGINE)).launch is None


def test_a_parked_engine_sleeps_at_level_1_with_expandable_segments_switched_off(
    platform: Platform, node: NodeInventory
) -> None:
    sleep = platform.engine_sleep(request(node, RoleKind.ENGINE, residency="park"))
    assert (sleep.level, sleep.args) == (1, {"enable_sleep_mode": True})
    rule = sleep.env["PYTORCH_NPU_ALLOC_CONF"]
    assert (rule.mode, rule.value) == (EnvMode.OPTION, "expandable_segments:False")
    assert (sleep.tags[Tag.ENGINE_WEIGHTS].frees, sleep.tags[Tag.ENGINE_WEIGHTS].preserves) == (True, True)
    assert (sleep.tags[Tag.KV].frees, sleep.tags[Tag.KV].preserves) == (True, False)
    assert not sleep.tags[Tag.GRAPHS].frees
    assert "transposed" in sleep.why
    assert "stale dispatcher" in sleep.why


@pytest.mark.parametrize("residency", [None, "resident"])
def test_an_engine_that_stays_does_not_sleep(platform: Platform, node: NodeInventory, residency: str | None) -> None:
    sleep = platform.engine_sleep(request(node, RoleKind.ENGINE, residency=residency))
    assert (sleep.level, dict(sleep.args), dict(sleep.env)) == (0, {}, {})
    assert not any(tag.frees for tag in sleep.tags.values())


def test_a_trainer_parks_what_it_owns(platform: Platform, node: NodeInventory) -> None:
    backend = platform.memory_backend(request(node, residency="park"))
    assert isinstance(backend, MemoryBackend)
    assert {tag for tag, semantics in backend.tags.items() if semantics.frees} == {Tag.PARAMS, Tag.GRADS, Tag.OPTIMIZER}
    assert backend.pinned_host


# ---- transports


def rejected(platform: Platform, edge: Edge) -> dict[str, list[str]]:
    offers = [*platform.transports(edge, Side.TRAINER), *platform.transports(edge, Side.ENGINE)]
    return {o.protocol: [p.reason for p in o.preconditions if not p.holds] for o in offers}


def edge_of(node: NodeInventory, relation: Relation, *, engine_tp: int = 1) -> Edge:
    trainer, engine = request(node), request(node, RoleKind.ENGINE, slots=tuple(range(engine_tp)))
    return Edge(trainer, engine, relation, 8 * 10**9)


@pytest.mark.parametrize(
    ("relation", "possible"),
    [
        (Relation.SAME_DEVICE, {"device_ipc", "host_shm", "disk"}),
        (Relation.SAME_NODE, {"device_ipc", "collective", "host_shm", "disk"}),
        (Relation.SAME_DOMAIN, {"collective", "disk"}),
        (Relation.NETWORK, {"collective", "disk"}),
    ],
)
def test_what_can_carry_weights_how_far(
    platform: Platform, node: NodeInventory, relation: Relation, possible: set[str]
) -> None:
    found = rejected(platform, edge_of(node, relation))
    assert {protocol for protocol, reasons in found.items() if not reasons} == possible


@pytest.mark.parametrize(
    ("change", "tp", "reason"),
    [
        ({"driver": "24.1.rc3"}, 1, "two processes share a chip, which needs driver 25.0.rc1; atlas-a2-0 has 24.1.rc3"),
        ({"driver": "25.2.0"}, 1, None),
        ({"driver": "25.2.0"}, 2, "several engine workers open one buffer, which needs driver 25.3.rc1; atlas-a2-0 has 25.2.0"),
        ({"driver": None}, 2, None),
        (
            {"vendor": {"cann": "8.1.RC1"}},
            1,
            "CANN 8.3.rc1 or newer is needed to share memory of a chip; atlas-a2-0 has 8.1.RC1",
        ),
        ({"vendor": {}}, 1, None),
    ],
)
def test_sharing_memory_needs_a_new_enough_stack(
    platform: Platform, node: NodeInventory, change: dict[str, object], tp: int, reason: str | None
) -> None:
    found = rejected(platform, edge_of(replace(node, **change), Relation.SAME_DEVICE, engine_tp=tp))
    assert found["device_ipc"] == ([reason] if reason else [])


def test_a_partner_of_another_vendor_leaves_host_and_disk(platform: Platform, node: NodeInventory) -> None:
    edge = edge_of(node, Relation.SAME_NODE)
    other = replace(edge.engine.capabilities, ipc=("cuda_ipc",), collectives=("nccl", "gloo"))
    found = rejected(platform, replace(edge, engine=replace(edge.engine, capabilities=other)))
    assert "the engine side must open NPU storages; it has cuda_ipc" in found["device_ipc"]
    assert "the engine side must speak hccl; it has nccl, gloo" in found["collective"]
    assert found["host_shm"] == []


def test_rates_are_the_reported_ones(platform: Platform, node: NodeInventory) -> None:
    offers = {o.protocol: o for o in platform.transports(edge_of(node, Relation.SAME_NODE), Side.TRAINER)}
    assert offers["collective"].cost.bytes_per_s == 5.3e9
    rate = offers["device_ipc"].cost.bytes_per_s
    assert rate is not None
    assert 1.6 < 8.04e9 / rate < 2.3
    assert offers["host_shm"].cost.bytes_per_s is None
    assert offers["collective"].factory.options == {"backend": "hccl", "device": "npu"}
    assert offers["device_ipc"].factory.options == {"exporter": "vime_ascend.device_export:NpuExporter"}


def test_a_plan_on_paper_for_every_profile(platform: Platform) -> None:
    """Answers must not need a machine: nominal nodes know no versions, links or processors."""
    for profile in platform.profiles():
        devices = tuple(
            Device(i, f"pool-0:{i}", profile.name, profile.memory_bytes, arch=profile.device_arch)
            for i in range(profile.devices_per_node or 1)
        )
        nominal = NodeInventory("pool-0", "ascend", profile.arch, devices, cpus=0, memory_bytes=profile.node_memory_bytes)
        asked: list[Callable[[], object]] = [
            lambda n=nominal: platform.ray_binding(n),
            lambda n=nominal: platform.perf_model(n),
            lambda n=nominal: platform.trainer_runtime(request(n)),
            lambda n=nominal: platform.vllm_defaults(request(n, RoleKind.ENGINE)),
            lambda n=nominal: platform.engine_sleep(request(n, RoleKind.ENGINE, residency="park")),
        ]
        assert all(ask() is not None for ask in asked)
        assert rejected(platform, edge_of(nominal, Relation.SAME_DEVICE))["device_ipc"] == []
