"""What roles get: capabilities, names in Ray, environment, groups, engine, trainer, memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from vime.facts.collectives import GroupRequest
from vime.facts.inventory import NodeInventory
from vime.facts.memory import Tag
from vime.facts.model import ModelShape
from vime.facts.perf import UNITS
from vime.facts.process import EnvMode, Parallel, RoleRequest
from vime.hooks.specs import hook_names
from vime.platforms.lineage import Platform
from vime_cuda import engine, memory, perf, plugin, process, trainer
from vime_cuda.inventory import PROFILES

Node = Callable[..., NodeInventory]
Request = Callable[..., RoleRequest]
DENSE = ModelShape("qwen3", 28, 1024, 16, 8, 128, 3072, 151936, True, 596_049_920, 40960)
EXPERTS = ModelShape("qwen3_moe", 48, 2048, 32, 4, 128, 6144, 151936, False, 30_532_122_624, 40960, 128, 8, 768)


def test_every_hook_is_implemented() -> None:
    assert [name for name in hook_names() if not hasattr(plugin, name)] == []


# ---- capabilities and binding


@pytest.mark.parametrize(
    ("name", "recipes"),
    [
        ("a100x8", ()),
        ("h200x8", ("blockwise", "tensorwise")),
        ("gh200", ("blockwise", "tensorwise")),
        ("b200x8", ("mxfp8", "nvfp4")),
        ("gb200-tray", ("mxfp8", "nvfp4")),
        ("gb300-tray", ("mxfp8", "nvfp4")),
        ("mixed-devices", ()),
    ],
)
def test_recipes_are_those_that_every_device_runs_itself(node_of: Node, name: str, recipes: tuple[str, ...]) -> None:
    found = process.capabilities(node_of(name))
    assert found.fp8_recipes == recipes
    assert ("fp8_recipes" in found.absent) == (recipes == ())
    assert (found.device_type, found.default_dtype) == ("cuda", "bfloat16")
    assert found.dtypes == ("bfloat16", "float16", "float32")
    assert (found.ipc, found.collectives) == (("cuda_ipc",), ("nccl", "gloo"))


def test_blackwell_says_that_hoppers_blocks_are_emulated(node_of: Node) -> None:
    assert "emulated" in process.capabilities(node_of("b200x8")).absent["blockwise"]
    assert "blockwise" not in process.capabilities(node_of("h200x8")).absent


def test_a_split_device_opens_nothing(node_of: Node) -> None:
    found = process.capabilities(node_of("mig-on"))
    assert (found.ipc, "MIG" in found.absent["ipc"]) == ((), True)


@pytest.mark.parametrize("profile", PROFILES, ids=lambda profile: profile.name)
def test_nominal_devices_can_what_real_ones_can(nominal: Node, profile: Any) -> None:
    with_arch, by_name = nominal(profile.name, profile.device_arch), nominal(profile.name)
    assert process.capabilities(with_arch) == process.capabilities(by_name)
    assert process.capabilities(with_arch).dtypes[0] == "bfloat16"


def test_a_device_that_no_role_may_use_takes_nothing_from_the_others(node_of: Node) -> None:
    node = node_of("lost-device")
    assert process.capabilities(node).fp8_recipes == ("blockwise", "tensorwise")
    assert process.ray_binding(node).labels == {"ray.io/accelerator-type": "H200"}
    assert perf.table(node).get("matmul").value == 790e12


def test_a_device_of_unknown_kind_gets_no_recipe(nominal: Node) -> None:
    found = process.capabilities(nominal("mystery"))
    assert (found.fp8_recipes, found.absent["fp8_recipes"]) == ((), "the instruction set of a device is unknown")


@pytest.mark.parametrize(
    ("name", "labels"),
    [
        ("h200x8", {"ray.io/accelerator-type": "H200"}),
        ("gh200", {"ray.io/accelerator-type": "GH200"}),
        ("mixed-devices", {}),
    ],
)
def test_ray_knows_devices_by_number_and_product(node_of: Node, name: str, labels: dict[str, str]) -> None:
    binding = process.ray_binding(node_of(name))
    assert (binding.resource, binding.visible_env, binding.id_kind) == ("GPU", ("CUDA_VISIBLE_DEVICES",), "index")
    assert binding.noset_env == ("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES",)
    assert (binding.labels, binding.virtual) == (labels, False)


# ---- environment


@pytest.mark.parametrize("kind", ["trainer", "engine"])
def test_numbers_in_masks_mean_nvmls_order(node_of: Node, request_for: Request, kind: str) -> None:
    rule = process.environment(request_for(node_of("h200x8"), kind))["CUDA_DEVICE_ORDER"]
    assert (rule.value, rule.mode) == ("PCI_BUS_ID", EnvMode.REQUIRE)


@pytest.mark.parametrize(
    ("name", "kind", "parallel", "expected"),
    [
        ("h200x8", "trainer", Parallel(tp=2), True),
        ("a100x8", "trainer", Parallel(cp=2), True),
        ("h200x8", "trainer", Parallel(dp=8), False),
        ("b200x8", "trainer", Parallel(tp=2), False),
        ("h200x8", "engine", Parallel(tp=2), False),
    ],
)
def test_one_queue_for_split_layers_before_blackwell(
    node_of: Node, request_for: Request, name: str, kind: str, parallel: Parallel, expected: bool
) -> None:
    rules = process.environment(request_for(node_of(name), kind, parallel=parallel))
    assert ("CUDA_DEVICE_MAX_CONNECTIONS" in rules) == expected


def test_threads_are_the_roles_share(node_of: Node, request_for: Request) -> None:
    rules = process.environment(request_for(node_of("h200x8"), threads=12))
    assert {rules[name].value for name in ("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS")} == {"12"}


def test_a_child_may_forbid_that_nccl_loses_its_memory_api(node_of: Node, request_for: Request) -> None:
    """No rule of this platform names NCCL_CUMEM_ENABLE, or a child that forbids 0 would contradict it."""
    for kind in ("trainer", "engine"):
        asked = request_for(node_of("h200x8"), kind, residency="park", shared_with=("x",))
        answers: list[Mapping[str, Any]] = [process.environment(asked), engine.defaults(asked).env, engine.sleep(asked).env]
        assert all("NCCL_CUMEM_ENABLE" not in rules for rules in answers)


# ---- groups


@pytest.mark.parametrize(
    ("purpose", "backend", "timeout"), [("trainer", "cpu:gloo,cuda:nccl", 1800.0), ("weight_sync", "nccl", 120.0)]
)
def test_groups(node_of: Node, request_for: Request, purpose: str, backend: str, timeout: float) -> None:
    spec = process.collective(request_for(node_of("h200x8")), GroupRequest(purpose, 8))
    assert (spec.backend, spec.timeout_s, spec.object_backend) == (backend, timeout, "gloo")
    assert "avg" in spec.reduce_ops
    assert any("one device" in condition for condition in spec.limits)


def test_reduction_in_the_switch_begins_with_hopper(node_of: Node, request_for: Request) -> None:
    def told(name: str) -> bool:
        limits = process.collective(request_for(node_of(name)), GroupRequest("trainer", 8)).limits
        return any("NVLS (" in effect for effect in limits.values())

    assert (told("a100x8"), told("h200x8"), told("b200x8")) == (False, True, True)


# ---- engine


def test_the_server_is_the_one_of_the_installed_release(node_of: Node, request_for: Request) -> None:
    found = engine.defaults(request_for(node_of("h200x8"), "engine"))
    assert found.launch is None
    assert "enable_scale_out" not in found.args
    assert found.expected_platform == "vllm.platforms.cuda.CudaPlatform"
    assert found.entry_points == ("vime",)
    assert found.env["VLLM_WORKER_MULTIPROC_METHOD"].value == "spawn"


@pytest.mark.parametrize(
    ("shared", "residency", "share"), [((), None, 0.9), (("actor",), "park", None), (("actor",), "resident", None)]
)
def test_the_plan_bounds_an_engine_that_shares_its_device(
    node_of: Node, request_for: Request, shared: tuple[str, ...], residency: str | None, share: float | None
) -> None:
    asked = request_for(node_of("h200x8"), "engine", shared_with=shared, residency=residency)
    assert engine.defaults(asked).args.get("gpu_memory_utilization") == share


def test_a_parked_engine_drops_its_weights_for_the_next_update(node_of: Node, request_for: Request) -> None:
    sleep = engine.sleep(request_for(node_of("h200x8"), "engine", shared_with=("actor",), residency="park"))
    does = {tag: (semantics.frees, semantics.preserves) for tag, semantics in sleep.tags.items()}
    assert (sleep.level, sleep.backend, sleep.args) == (2, "cumem", {"enable_sleep_mode": True})
    assert does == {
        Tag.ENGINE_WEIGHTS: (True, False),
        Tag.KV: (True, False),
        Tag.GRAPHS: (False, True),
        Tag.COMMUNICATORS: (False, True),
    }


@pytest.mark.parametrize("variable", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_expandable_segments_leave_the_sleeping_engine_alone(node_of: Node, request_for: Request, variable: str) -> None:
    node = node_of("h200x8")
    asleep = request_for(node, "engine", shared_with=("actor",), residency="park")
    rule = engine.sleep(asleep).env[variable]
    assert (rule.value, rule.mode) == ("expandable_segments", EnvMode.WITHOUT)
    awake = request_for(node, "engine", residency="resident")
    trains = request_for(node, "trainer", shared_with=("rollout",), residency="park")
    for rules in (engine.sleep(awake).env, engine.defaults(asleep).env, process.environment(trains)):
        assert variable not in rules


@pytest.mark.parametrize("residency", ["resident", None])
def test_an_engine_that_keeps_its_device_never_sleeps(node_of: Node, request_for: Request, residency: str | None) -> None:
    sleep = engine.sleep(request_for(node_of("h200x8"), "engine", residency=residency))
    assert (sleep.level, sleep.args, sleep.env) == (0, {}, {})
    assert {(semantics.frees, semantics.preserves) for semantics in sleep.tags.values()} == {(False, True)}


# ---- trainer


def test_transformer_engine_is_used_where_it_is_installed(node_of: Node, request_for: Request) -> None:
    found = trainer.adaptation(request_for(node_of("h200x8"), software={"transformer-engine": "2.9.0"}), DENSE)
    assert (found.transformer_engine, found.norm, found.core_attention, found.optimizer) == (True, None, None, None)
    assert (dict(found.overrides), found.fp8_recipe) == ({}, "blockwise")


def test_plain_pieces_where_it_is_not(node_of: Node, request_for: Request) -> None:
    found = trainer.adaptation(request_for(node_of("h200x8")), DENSE)
    pieces = [piece.target if piece else None for piece in (found.norm, found.core_attention, found.optimizer)]
    assert pieces == [
        "vime.trainer.megatron.attention:RmsNorm",
        "vime.trainer.megatron.varlen:VarlenCoreAttention",
        "vime_cuda.fused_adam:FusedAdam",
    ]
    assert {name: override.value for name, override in found.overrides.items()} == {
        "gradient_accumulation_fusion": False,
        "apply_rope_fusion": False,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
    }
    assert (found.async_save, "asynchronous checkpoints" in found.limits) == (False, True)
    assert "fp8 training without Transformer Engine" in found.limits


def test_models_with_experts_turn_their_fusions_off_too(node_of: Node, request_for: Request) -> None:
    found = trainer.adaptation(request_for(node_of("h200x8")), EXPERTS)
    assert {"moe_permute_fusion", "moe_router_fusion"} <= set(found.overrides)


@pytest.mark.parametrize(("name", "recipe"), [("a100x8", None), ("h200x8", "blockwise"), ("gb300-tray", "mxfp8")])
def test_the_native_recipe(node_of: Node, request_for: Request, name: str, recipe: str | None) -> None:
    assert trainer.adaptation(request_for(node_of(name)), DENSE).fp8_recipe == recipe


def test_the_runtime_gets_threads_and_the_processors_next_to_each_device(node_of: Node, request_for: Request) -> None:
    found = trainer.runtime(request_for(node_of("h200x8"), threads=6, deterministic=True))
    first, second = tuple(range(64)), tuple(range(64, 128))
    assert (found.device_type, found.bootstrap.target) == ("cuda", "vime_cuda.runtime:CudaRuntime")
    assert found.bootstrap.options == {"threads": 6, "deterministic": True, "numa_cpus": (first,) * 4 + (second,) * 4}


def test_no_binding_where_there_is_nothing_to_choose(node_of: Node, nominal: Node) -> None:
    assert trainer.near_cpus((node_of("h200-vm"),)) == ()
    assert trainer.near_cpus((nominal("h200", "sm90"),)) == ()
    assert trainer.near_cpus((node_of("h200x8"), node_of("h200-vm"))) == ()
    assert trainer.near_cpus((node_of("lost-device"),)) == ()


def test_a_parked_trainer_keeps_its_state_and_its_communicators(node_of: Node, request_for: Request) -> None:
    backend = memory.backend(request_for(node_of("h200x8")))
    does = {tag: (semantics.frees, semantics.preserves) for tag, semantics in backend.tags.items()}
    assert {does[tag] for tag in (Tag.PARAMS, Tag.GRADS, Tag.OPTIMIZER)} == {(True, True)}
    assert does[Tag.COMMUNICATORS] == (False, True)
    assert (backend.communicators, backend.pinned_host) == ("keep", True)
    assert "GB a rank" in backend.tags[Tag.COMMUNICATORS].why


# ---- rates


@pytest.mark.parametrize(
    ("name", "quantity", "value", "provenance"),
    [
        ("h200x8", "host_link", 55.4e9, "measured"),
        ("h200x8", "matmul", 790e12, "measured"),
        ("h200x8", "scale_up", 370e9, "measured"),
        ("h200x8", "device_memory", 4.8e12, "spec"),
        ("hopper-claims-fabric", "device_memory", 3.35e12, "spec"),
        ("hopper-claims-fabric", "scale_up", 18 * 20.6e9, "derived"),
        ("a100x8", "device_memory", 2.0e12, "spec"),
        ("a100x8", "scale_up", 240e9, "derived"),
        ("b200x8", "scale_up", 18 * 40.1e9, "derived"),
        ("gb200-tray", "host_link", None, "unknown"),
        ("gh200", "device_memory", None, "unknown"),
        ("mixed-devices", "matmul", None, "unknown"),
        ("h200x8", "network", None, "unknown"),
        ("h200x8", "parking", 50e9, "measured"),
        ("a100x8", "parking", None, "unknown"),
        ("h200x8", "process", round(0.51 * 2**30), "measured"),
        ("b200x8", "process", round(0.51 * 2**30), "derived"),
        ("gh200", "engine_load", None, "unknown"),
    ],
)
def test_rates_say_where_they_come_from(node_of: Node, name: str, quantity: str, value: float | None, provenance: str) -> None:
    found = perf.table(node_of(name)).get(quantity)
    assert found.value == (None if value is None else pytest.approx(value))
    assert found.provenance == provenance
    assert found.source
    assert found.unit == UNITS[quantity]


@pytest.mark.parametrize(("name", "rate"), [("a100-40g", 1.555e12), ("a100-80g", 2.0e12), ("h200", 4.8e12), ("b200", 8e12)])
def test_nominal_devices_have_rates(nominal: Node, name: str, rate: float) -> None:
    assert perf.table(nominal(name)).get("device_memory").value == rate


@pytest.mark.parametrize("name", ["NVIDIA H200 NVL", "NVIDIA A100-PCIE-40GB", "NVIDIA H100 PCIe"])
def test_variants_on_cards_have_no_rates_of_their_namesakes(nominal: Node, name: str) -> None:
    assert {quantity.value for quantity in perf.table(nominal(name)).quantities.values()} == {None}


# ---- under this name


@pytest.mark.parametrize("name", ["gb200-tray", "gb300-tray"])
def test_trays_run_under_cuda_with_one_notice(node_of: Node, request_for: Request, name: str) -> None:
    from vime.facts.diagnosis import DoctorContext

    platform, node = Platform.of(plugin), node_of(name)
    asked = request_for(node, "trainer", devices=(0, 1, 2, 3))
    assert platform.capabilities(node).fp8_recipes[0] == "mxfp8"
    assert platform.ray_binding(node).resource == "GPU"
    assert platform.megatron_adapt(asked, DENSE).fp8_recipe == "mxfp8"
    notices = [check for check in platform.doctor_checks(DoctorContext(node, {})) if "gb200" in check.fix]
    assert [check.id for check in notices] == ["cuda.gb200"]
