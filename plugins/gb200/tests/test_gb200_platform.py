"""What the platform answers on trays, through its lineage: gb200 over cuda, on the fake NVML."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import vime_cuda.plugin
import vime_gb200.plugin
from vime.errors import PlanError
from vime.facts.collectives import GroupRequest
from vime.facts.diagnosis import ProbeContext
from vime.facts.inventory import NodeInventory, NumaNode
from vime.facts.memory import MemoryBackend
from vime.facts.model import ModelShape
from vime.facts.process import EnvMode, Parallel, RoleKind, RolePlacement, RoleRequest, Slot
from vime.facts.transports import Edge, Relation, Side, TransportOffer
from vime.planning.env import EdgeEnd, check_equal, merge_env
from vime.planning.time import switch, transfer
from vime.planning.transports import End, relation
from vime.platforms.lineage import Platform
from vime.topology.model import Pool
from vime.topology.profiles import nominal_nodes
from vime.yamltree import Where, from_value
from vime_gb200.testing import machines

DOMAIN = "5c1a903e-7742-4b0d-9f21-6a88d40b13ee"
MODEL = ModelShape("qwen3", 2, 64, 4, 2, 32, 128, 320, True, 100_000, 256)


@pytest.fixture(scope="module")
def gb200() -> Platform:
    return Platform.of(vime_cuda.plugin, vime_gb200.plugin)


@pytest.fixture(scope="module")
def cuda() -> Platform:
    return Platform.of(vime_cuda.plugin)


def read(platform: Platform, change: machines.Change = machines.as_is, *, profile: str = "gb200-tray") -> NodeInventory:
    with machines.tray(profile, change) as env:
        return platform.inventory(ProbeContext(env))


def nominal(name: str = "gb200", nodes: int = 1) -> tuple[NodeInventory, ...]:
    profile = next(p for p in vime_gb200.plugin.vime_profiles() if p.name == name)
    tree = from_value({}, Where("test", 0))
    return nominal_nodes("rack", Pool(platform="gb200", nodes=nodes), profile, demand=4, tree=tree)


def ask(platform: Platform, kind: RoleKind, *nodes: NodeInventory, slots: tuple[Slot, ...] = ()) -> RoleRequest:
    placed = slots or tuple(Slot(n, d) for n, node in enumerate(nodes) for d in range(len(node.devices)))
    return RoleRequest(
        role="actor" if kind is RoleKind.TRAINER else "rollout",
        kind=kind,
        placement=RolePlacement("role", placed),
        inventories=nodes,
        capabilities=platform.capabilities(nodes[0]),
        parallel=Parallel(dp=len(placed)),
        dtype="bfloat16",
        software=nodes[0].software.get(str(kind), {}),
    )


def test_the_cuda_platform_still_runs_a_tray(cuda: Platform) -> None:
    node = read(cuda)
    assert (node.platform, len(node.devices), node.fabric) == ("cuda", 4, None)
    request = ask(cuda, RoleKind.TRAINER, node)
    assert "ray.io/gpu-domain" not in cuda.ray_binding(node).labels
    assert "NCCL_CUMEM_ENABLE" not in cuda.process_env(request)
    assert "numa_bind" not in cuda.vllm_defaults(ask(cuda, RoleKind.ENGINE, node)).args


# ---- binding


def test_labels_name_the_domain_and_the_place(gb200: Platform) -> None:
    binding = gb200.ray_binding(read(gb200))
    assert binding.resource == "GPU"
    assert binding.labels == {
        "ray.io/accelerator-type": "GB200",
        "ray.io/gpu-domain": f"{DOMAIN}.32766",
        "vime/chassis": "1820000000001",
        "vime/tray": "6",
        "vime/host-id": "1",
    }


@pytest.mark.parametrize("change", [machines.no_channel, machines.two_cliques, machines.no_fabric_functions])
def test_a_domain_that_may_not_work_is_not_named(gb200: Platform, change: machines.Change) -> None:
    assert "ray.io/gpu-domain" not in gb200.ray_binding(read(gb200, change)).labels


def test_a_place_that_ray_cannot_take_is_left_out(gb200: Platform) -> None:
    def odd(profile: dict[str, Any]) -> None:
        for device in profile["devices"]:
            device["PlatformInfo"] = {**device["PlatformInfo"], "chassisSerialNumber": "a b"}
        profile["devices"][0]["PlatformInfo"]["trayIndex"] = 9

    labels = gb200.ray_binding(read(gb200, odd)).labels
    assert "vime/chassis" not in labels
    assert "vime/tray" not in labels
    assert labels["vime/host-id"] == "1"


def test_a_nominal_rack_has_no_place(gb200: Platform) -> None:
    assert set(gb200.ray_binding(nominal()[0]).labels) == {"ray.io/accelerator-type"}


# ---- environment


@pytest.mark.parametrize("kind", list(RoleKind))
def test_cumem_may_not_be_turned_off(gb200: Platform, kind: RoleKind) -> None:
    rules = gb200.process_env(ask(gb200, kind, read(gb200)))
    rule = rules["NCCL_CUMEM_ENABLE"]
    assert (rule.value, rule.mode, rule.scope) == ("0", EnvMode.FORBID, "both_equal")
    with pytest.raises(PlanError, match="E261"):
        merge_env([rules], {"NCCL_CUMEM_ENABLE": "0"}, process="actor")
    values, _ = merge_env([rules], {"NCCL_CUMEM_ENABLE": "1"}, process="actor")
    assert values["NCCL_CUMEM_ENABLE"] == "1"
    ends = EdgeEnd([rules], values), EdgeEnd([rules], {})
    with pytest.raises(PlanError, match="E262"):
        check_equal(*ends, protocol="collective")
    check_equal(*ends, protocol="device_ipc")


@pytest.mark.parametrize(
    ("change", "mnnvl", "ucx"),
    [
        (machines.as_is, None, "y"),
        (machines.no_fabric_functions, None, None),
        (machines.no_channel, "0", None),
        (machines.two_cliques, "0", None),
    ],
)
def test_nvlink_between_trays_is_left_alone_unless_it_is_known_to_fail(
    gb200: Platform, change: machines.Change, mnnvl: str | None, ucx: str | None
) -> None:
    node = read(gb200, change)
    engine, trainer = (gb200.process_env(ask(gb200, kind, node)) for kind in (RoleKind.ENGINE, RoleKind.TRAINER))
    values, _ = merge_env([engine], {}, process="rollout")
    assert values.get("NCCL_MNNVL_ENABLE") == mnnvl
    assert values.get("UCX_CUDA_IPC_ENABLE_MNNVL") == ucx
    assert "UCX_CUDA_IPC_ENABLE_MNNVL" not in trainer
    if mnnvl is not None:
        assert node.fabric is not None
        assert node.fabric.reason in engine["NCCL_MNNVL_ENABLE"].why
        assert engine["NCCL_MNNVL_ENABLE"].mode is EnvMode.DEFAULT
        assert trainer["NCCL_MNNVL_ENABLE"].scope == "both_equal"


def test_one_bad_tray_turns_it_off_for_all_of_the_pool(gb200: Platform) -> None:
    good, bad = read(gb200), read(gb200, profile="gb200-broken-fabric")
    rules = gb200.process_env(ask(gb200, RoleKind.TRAINER, good, bad, slots=(Slot(0, 0),)))
    assert rules["NCCL_MNNVL_ENABLE"].value == "0"
    assert "gb200-broken-fabric: device 1" in rules["NCCL_MNNVL_ENABLE"].why


def test_rules_of_cuda_hold_beside(cuda: Platform, gb200: Platform) -> None:
    request = ask(gb200, RoleKind.ENGINE, read(gb200))
    parents, own = cuda.process_env(request), gb200.process_env(request)
    assert parents.items() <= own.items()
    assert set(own) - set(parents) == {"NCCL_CUMEM_ENABLE", "NCCL_NET_GDR_LEVEL", "UCX_CUDA_IPC_ENABLE_MNNVL"}
    assert (own["NCCL_NET_GDR_LEVEL"].value, own["NCCL_NET_GDR_LEVEL"].mode) == ("SYS", EnvMode.DEFAULT)


def test_a_sleeping_engine_registers_nothing_with_its_graphs(gb200: Platform) -> None:
    request = ask(gb200, RoleKind.ENGINE, read(gb200))
    asleep = gb200.engine_sleep(replace(request, shared_with=("actor",), residency="park"))
    awake = gb200.engine_sleep(replace(request, shared_with=("actor",), residency="resident"))
    assert asleep.env["NCCL_GRAPH_REGISTER"].value == "0"
    assert "NCCL_GRAPH_REGISTER" not in awake.env


# ---- trainer and engine near their memory


def test_trainers_are_bound_to_the_grace_of_their_device(gb200: Platform) -> None:
    left, right = tuple(range(72)), tuple(range(72, 144))
    assert numa_cpus(gb200, read(gb200)) == (left, left, right, right)
    assert numa_cpus(gb200, read(gb200), replace(read(gb200), hostname="other")) == (left, left, right, right)


def test_trainers_stay_where_they_are_when_a_grace_is_unknown(gb200: Platform) -> None:
    whole = read(gb200)
    other = replace(whole, hostname="other", numa=(NumaNode(0, tuple(range(64)), 1), NumaNode(1, tuple(range(64, 128)), 1)))
    assert not numa_cpus(gb200, read(gb200, machines.lost_device))
    assert not numa_cpus(gb200, *nominal())
    assert not numa_cpus(gb200, whole, other)


def numa_cpus(platform: Platform, *nodes: NodeInventory) -> tuple[tuple[int, ...], ...]:
    runtime = platform.trainer_runtime(ask(platform, RoleKind.TRAINER, *nodes))
    assert runtime.bootstrap.target == "vime_cuda.runtime:CudaRuntime"
    return runtime.bootstrap.options.get("numa_cpus", ())


def test_workers_of_an_engine_are_bound_in_the_order_of_its_devices(gb200: Platform) -> None:
    node = read(gb200)
    slots = (Slot(0, 3), Slot(0, 0))
    args = gb200.vllm_defaults(ask(gb200, RoleKind.ENGINE, node, slots=slots)).args
    assert (args["numa_bind"], args["numa_bind_nodes"]) == (True, [1, 0])
    assert "enable_prompt_tokens_details" in args


@pytest.mark.parametrize(
    ("software", "numactl", "change"),
    [
        ({"vllm": "0.25.1"}, True, machines.as_is),
        ({"vllm": "unknown"}, True, machines.as_is),
        ({}, True, machines.as_is),
        ({"vllm": "0.32.0"}, False, machines.as_is),
        ({"vllm": "0.32.0"}, None, machines.as_is),
        ({"vllm": "0.32.0"}, True, machines.lost_device),
    ],
)
def test_engines_are_not_bound_where_that_could_end_them(
    gb200: Platform, software: dict[str, str], numactl: bool | None, change: machines.Change
) -> None:
    found = read(gb200, change)
    node = replace(found, vendor={**found.vendor, "numactl": numactl})
    request = replace(ask(gb200, RoleKind.ENGINE, node), software=software)
    assert "numa_bind" not in gb200.vllm_defaults(request).args


def test_an_engine_over_two_trays_is_not_bound(gb200: Platform) -> None:
    node = read(gb200)
    assert "numa_bind" not in gb200.vllm_defaults(ask(gb200, RoleKind.ENGINE, node, replace(node, hostname="other"))).args


def test_parked_memory_excludes_what_other_trays_hold(cuda: Platform, gb200: Platform) -> None:
    request = ask(gb200, RoleKind.TRAINER, read(gb200))
    parent, own = cuda.memory_backend(request), gb200.memory_backend(request)
    assert isinstance(parent, MemoryBackend)
    assert isinstance(own, MemoryBackend)
    assert own.factory == parent.factory
    assert set(own.exclusions) > set(parent.exclusions)
    assert "fabric handle" in own.exclusions[-1]


# ---- transports


def offer(platform: Platform, near: Relation, protocol: str) -> TransportOffer:
    node = read(platform)
    nodes = (node, replace(node, hostname="other")) if near in (Relation.SAME_DOMAIN, Relation.NETWORK) else (node,)
    place = {Relation.SAME_DEVICE: Slot(0, 0), Relation.SAME_NODE: Slot(0, 1)}.get(near, Slot(1, 0))
    trainer = ask(platform, RoleKind.TRAINER, *nodes, slots=(Slot(0, 0),))
    engine = ask(platform, RoleKind.ENGINE, *nodes, slots=(place,))
    offers = platform.transports(Edge(trainer, engine, near, 10**9), Side.ENGINE)
    return next(o for o in offers if o.protocol == protocol)


@pytest.mark.parametrize(
    ("protocol", "near", "seconds"),
    [
        # 1e9 bytes / (0.8 x 18 x 40.1e9) = 0.00173 s, and 0.01 s to start.
        ("collective", Relation.SAME_NODE, 0.01173),
        ("collective", Relation.SAME_DOMAIN, 0.01173),
        ("collective", Relation.NETWORK, None),
        ("device_ipc", Relation.SAME_NODE, 0.01173),
    ],
)
def test_bytes_between_trays_travel_at_fabric_speed_or_at_none_that_is_known(
    gb200: Platform, protocol: str, near: Relation, seconds: float | None
) -> None:
    found = offer(gb200, near, protocol)
    estimate = transfer(found.cost, found.cost, num_bytes=10**9, buffer_bytes=10**9)
    assert estimate.seconds == (None if seconds is None else pytest.approx(seconds, abs=1e-5))
    assert estimate.provenance == ("unknown" if seconds is None else "derived")
    assert all(condition.holds for condition in found.preconditions)


def test_conditions_and_halves_stay_those_of_cuda(cuda: Platform, gb200: Platform) -> None:
    for near in (Relation.SAME_DEVICE, Relation.SAME_DOMAIN):
        for protocol in ("device_ipc", "collective", "host_shm", "disk"):
            own, parent = offer(gb200, near, protocol), offer(cuda, near, protocol)
            assert (own.factory, own.options) == (parent.factory, parent.options)
            assert [c.holds for c in own.preconditions] == [c.holds for c in parent.preconditions]
    assert not offer(gb200, Relation.SAME_DOMAIN, "device_ipc").preconditions[0].holds


@pytest.mark.parametrize(
    ("change", "near"),
    [
        (machines.as_is, Relation.SAME_DOMAIN),
        (machines.other_clique, Relation.NETWORK),
        (machines.no_channel, Relation.NETWORK),
        (machines.no_fabric_functions, Relation.NETWORK),
    ],
)
def test_trays_of_one_domain_are_near(gb200: Platform, change: machines.Change, near: Relation) -> None:
    here, there = read(gb200), replace(read(gb200, change), hostname="there")
    nodes = (here, there)
    assert relation(End("rack", nodes, (Slot(0, 0),)), End("rack", nodes, (Slot(1, 0),))) is near


# ---- numbers and limits


def test_two_devices_share_the_memory_of_one_grace(gb200: Platform) -> None:
    for node in (read(gb200), nominal()[0]):
        estimate = switch(66 * 10**9, gb200.perf_model(node), node)
        assert estimate.seconds == pytest.approx(0.264)  # 66e9 / min(330e9, 500e9 / 2)
        assert estimate.provenance == "spec"


@pytest.mark.parametrize("name", ["gb200", "gb300"])
def test_rates(gb200: Platform, name: str) -> None:
    table = gb200.perf_model(nominal(name)[0])
    rates = {key: (quantity.value, str(quantity.provenance)) for key, quantity in table.quantities.items()}
    assert rates["host_link"] == (330e9, "measured")
    assert rates["host_link_remote"] == (115e9, "measured")
    assert rates["device_memory"] == (8e12, "spec")
    assert rates["scale_up"] == (pytest.approx(721.8e9), "derived")
    assert rates["matmul"][0] == 2.5e15
    assert rates["network"] == (None, "unknown")


@pytest.mark.parametrize(("world", "told"), [(43, False), (44, True)])
def test_large_groups_are_warned_of(gb200: Platform, world: int, told: bool) -> None:
    spec = gb200.collective(ask(gb200, RoleKind.TRAINER, *nominal()), GroupRequest("trainer", world))
    (effect,) = (text for condition, text in spec.limits.items() if "43 ranks" in condition)
    assert (f"{world} ranks" in effect) is told
    assert spec.domain_ranks == 43
    assert spec.backend == "cpu:gloo,cuda:nccl"


def test_native_8_bit_recipes_and_their_limits(gb200: Platform) -> None:
    node = read(gb200)
    found = gb200.capabilities(node)
    assert found.fp8_recipes == ("mxfp8", "nvfp4")
    assert "scale_up_between_nodes" not in found.absent
    adaptation = gb200.megatron_adapt(ask(gb200, RoleKind.TRAINER, node), MODEL)
    assert adaptation.fp8_recipe == "mxfp8"
    assert any("HybridEP" in condition for condition in adaptation.limits)
    assert any("128 x 128" in condition for condition in adaptation.limits)


def test_a_plan_can_say_why_trays_are_apart(gb200: Platform) -> None:
    absent = gb200.capabilities(read(gb200, machines.no_channel)).absent
    assert absent["scale_up_between_nodes"].startswith("fabric usable: no: there is no IMEX channel")
