from __future__ import annotations

import ast
import dataclasses
import importlib.metadata
import inspect
import json
import pickle
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from vime.errors import PluginError
from vime.facts.collectives import GroupRequest
from vime.facts.diagnosis import DoctorContext, ProbeContext
from vime.facts.inventory import NodeInventory
from vime.facts.memory import MemoryBackend, Tag
from vime.facts.model import ModelShape
from vime.facts.perf import Provenance
from vime.facts.process import EnvMode, Factory, RoleKind
from vime.facts.transports import Relation, Side
from vime.hooks.specs import RULES, hook_names
from vime.platforms import host
from vime.platforms.cpu import plugin, trainer
from vime.platforms.lineage import Platform

ROOT = Path(__file__).parents[3]
RECORDING = {
    "hostname": "laptop",
    "arch": "x86_64",
    "cpus": [0, 1, 4, 5],
    "memory_bytes": 16 * 2**30,
    "numa": [
        {"index": 0, "cpus": [0, 1], "memory_bytes": 8 * 2**30},
        {"index": 1, "cpus": [4, 5], "memory_bytes": 8 * 2**30},
    ],
    "software": {"trainer": {"torch": "2.13.0+cpu"}, "engine": {"vllm": "0.32.0"}, "router": {}},
}
DENSE = ModelShape("qwen3", 4, 128, 4, 2, 32, 384, 316, True, 828_000, 1024)
MOE = replace(DENSE, experts=8, experts_per_token=2, expert_ffn=64)


@pytest.fixture(scope="module")
def cpu() -> Platform:
    return Platform.of(plugin)


@pytest.fixture
def node(cpu: Platform) -> NodeInventory:
    return cpu.inventory(ProbeContext(env={}, recording=RECORDING))


def test_every_hook_is_implemented_in_five_lines_at_most() -> None:
    tree = ast.parse(inspect.getsource(plugin))
    functions = {f.name: f for f in tree.body if isinstance(f, ast.FunctionDef)}
    assert set(functions) == set(hook_names())
    for function in functions.values():
        assert function.end_lineno is not None
        assert function.end_lineno - function.lineno + 1 <= 5


def test_a_recording_is_replayed_slot_by_slot(node: NodeInventory) -> None:
    assert (node.hostname, node.platform, node.cpus, node.virtual) == ("laptop", "cpu", 4, True)
    assert [(d.index, d.numa_node, d.memory_bytes) for d in node.devices] == [
        (0, 0, 4 * 2**30),
        (1, 0, 4 * 2**30),
        (2, 1, 4 * 2**30),
        (3, 1, 4 * 2**30),
    ]
    assert len({d.uuid for d in node.devices}) == 4
    assert node.software["engine"] == {"vllm": "0.32.0"}


@pytest.mark.parametrize("broken", [{}, {**RECORDING, "cpus": ["x"]}, {**RECORDING, "numa": [{"index": 0}]}])
def test_a_foreign_recording_is_refused(cpu: Platform, broken: Mapping[str, Any]) -> None:
    with pytest.raises(PluginError, match="the recording is not one of the cpu platform") as caught:
        cpu.inventory(ProbeContext(env={}, recording=broken))
    assert "vime doctor" in (caught.value.fix or "")


def test_this_host_and_its_recording_give_one_inventory(cpu: Platform) -> None:
    live = ProbeContext(env={})
    fixture = cpu.fixture(live)
    assert fixture is not None
    assert (fixture.platform, fixture.origin) == ("cpu", "recorded")
    data = json.loads(json.dumps(fixture.data))
    here = cpu.inventory(live)
    assert cpu.inventory(ProbeContext(env={}, recording=data)) == here
    assert here.cpus == len(here.devices) >= 1
    assert here.memory_bytes > 2**28
    assert "torch" in here.software["trainer"]
    replayed = cpu.fixture(ProbeContext(env={}, recording=data))
    assert replayed is not None
    assert replayed.data == fixture.data


def test_parsers() -> None:
    assert host.parse_cpulist("0-3,8,10-11\n") == (0, 1, 2, 3, 8, 10, 11)
    assert host.parse_cpulist("\n") == ()
    assert host.parse_meminfo("MemTotal:       24684096 kB\nMemFree: 1 kB\n") == 24684096 * 1024
    assert host.parse_meminfo("Node 1 MemTotal:       100 kB\n") == 102400
    assert host.parse_meminfo("") is None


def test_a_containers_limit_counts(tmp_path, monkeypatch) -> None:
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(host, "_CGROUP_LIMITS", (limit,))
    unlimited = host._memory_bytes()
    limit.write_text("max\n")
    assert host._memory_bytes() == unlimited
    limit.write_text("268435456\n")
    assert host._memory_bytes() == 268435456


def test_pure_hooks_repeat_themselves_and_touch_nothing(cpu: Platform, node: NodeInventory, monkeypatch) -> None:
    def untouched() -> None:
        raise AssertionError("a pure hook looked at the machine")

    monkeypatch.setattr(host, "read_host", untouched)
    for ask in (cpu.capabilities, cpu.ray_binding, cpu.perf_model):
        assert ask(node) == ask(pickle.loads(pickle.dumps(node)))
    assert cpu.profiles() == cpu.profiles()


def test_the_nominal_device(cpu: Platform) -> None:
    (profile,) = cpu.profiles()
    assert (profile.name, profile.platform, profile.memory_bytes) == ("cpu", "cpu", 16 * 2**30)
    assert (profile.virtual, profile.devices_per_node, profile.provenance) == (True, None, "nominal")


def test_absences_say_why(cpu: Platform, node: NodeInventory) -> None:
    able = cpu.capabilities(node)
    assert able.default_dtype == "float32"
    assert able.virtual_devices
    assert not able.engine_frees_memory
    assert "keeps its weights" in able.absent["engine_frees_memory"]
    assert set(able.absent) >= {"fp8_recipes", "ipc"}


def test_threads_reach_the_process_and_the_runtime(cpu: Platform, request_for) -> None:
    request = request_for(RoleKind.TRAINER, threads=3)
    assert cpu.process_env(request)["OMP_NUM_THREADS"].value == "3"
    assert cpu.trainer_runtime(request).bootstrap.options == {"threads": 3, "deterministic": request.deterministic}


def test_engine_rules(cpu: Platform, request_for) -> None:
    rules = cpu.process_env(request_for(RoleKind.ENGINE))
    assert (rules["TORCHDYNAMO_DISABLE"].value, rules["TORCHDYNAMO_DISABLE"].mode) == ("1", EnvMode.REQUIRE)
    assert (rules["VLLM_BATCH_INVARIANT"].value, rules["VLLM_BATCH_INVARIANT"].mode) == ("1", EnvMode.FORBID)
    assert all(rule.why for rule in rules.values())
    assert "VLLM_BATCH_INVARIANT" not in cpu.process_env(request_for(RoleKind.TRAINER))


def test_engine_launch(cpu: Platform, request_for) -> None:
    one, two = (cpu.vllm_defaults(request_for(RoleKind.ENGINE, tp=tp)) for tp in (1, 2))
    assert one.launch == "vllm.entrypoints.launchers.api_server.entry"
    assert one.entry_points == ("vime", "vime_cpu")
    assert one.expected_platform == "vllm.platforms.cpu.CpuPlatform"
    assert (one.args["block_size"], one.args["kv_cache_memory_bytes"], one.args["max_num_batched_tokens"]) == (32, 2**26, 4096)
    assert one.env["VLLM_SERVER_DEV_MODE"].mode is EnvMode.REQUIRE
    assert one.env["VLLM_CPU_OMP_THREADS_BIND"].value == two.env["VLLM_CPU_OMP_THREADS_BIND"].value == "nobind"
    assert "NUMA node for every" in two.env["VLLM_CPU_OMP_THREADS_BIND"].why


def test_the_engine_sleeps_without_freeing(cpu: Platform, request_for) -> None:
    sleep = cpu.engine_sleep(request_for(RoleKind.ENGINE))
    assert sleep.level == 0
    assert not any(tag.frees for tag in sleep.tags.values())
    assert all(tag.preserves and tag.why for tag in sleep.tags.values())


def test_trainer_memory_parks_what_a_step_needs(cpu: Platform, request_for) -> None:
    memory = cpu.memory_backend(request_for())
    assert isinstance(memory, MemoryBackend)
    assert [tag for tag, what in memory.tags.items() if what.frees] == [Tag.PARAMS, Tag.GRADS, Tag.OPTIMIZER]
    assert all(what.preserves and what.why for what in memory.tags.values())


def test_megatron_overrides_have_reasons_and_experts_add_theirs(cpu: Platform, request_for) -> None:
    dense, moe = (cpu.megatron_adapt(request_for(), model) for model in (DENSE, MOE))
    assert dense.overrides["use_cpu_initialization"].value is True
    assert {o.value for name, o in dense.overrides.items() if name != "use_cpu_initialization"} == {False}
    assert all(override.why for override in moe.overrides.values())
    assert set(moe.overrides) - set(dense.overrides) == {"moe_permute_fusion"}
    assert not dense.transformer_engine


def test_collective(cpu: Platform, request_for) -> None:
    spec = cpu.collective(request_for(), GroupRequest("trainer", 2))
    assert (spec.backend, spec.object_backend) == ("gloo", "gloo")
    assert {"sum", "avg", "max"} <= set(spec.reduce_ops)
    assert cpu.collective(request_for(), GroupRequest("weight_sync", 2)).timeout_s < spec.timeout_s


def test_shared_memory_needs_one_node(cpu: Platform, edge_for) -> None:
    for side in Side:
        near = {o.protocol: o for o in cpu.transports(edge_for(Relation.SAME_NODE), side)}
        far = {o.protocol: o for o in cpu.transports(edge_for(Relation.NETWORK), side)}
        assert set(near) == set(far) == {"host_shm", "collective", "disk"}
        assert all(p.holds for offer in near.values() for p in offer.preconditions)
        (failed,) = [p for offer in far.values() for p in offer.preconditions if not p.holds]
        assert failed in far["host_shm"].preconditions
        assert "one node" in failed.reason
        rates = [near[name].cost.bytes_per_s for name in ("host_shm", "collective", "disk")]
        assert rates == sorted(rates, key=lambda rate: -(rate or 0))
        assert {offer.cost.provenance for offer in near.values()} == {"measured"}


def test_collective_needs_gloo(cpu: Platform, edge_for) -> None:
    edge = edge_for(Relation.SAME_NODE)
    mute = replace(edge, engine=replace(edge.engine, capabilities=replace(edge.engine.capabilities, collectives=())))
    offer = next(o for o in cpu.transports(mute, Side.ENGINE) if o.protocol == "collective")
    assert [p.holds for p in offer.preconditions] == [False]
    (trainers,) = [o for o in cpu.transports(mute, Side.TRAINER) if o.protocol == "collective"]
    assert [p.holds for p in trainers.preconditions] == [True, False]
    assert "engine side" in trainers.preconditions[1].reason


def test_rates_say_where_they_come_from(cpu: Platform, node: NodeInventory) -> None:
    table = cpu.perf_model(node)
    assert table.get("memcpy").provenance is Provenance.MEASURED
    assert table.get("host_link").value == table.get("memcpy").value
    assert table.get("network").value is None
    other = cpu.perf_model(replace(node, arch="aarch64"))
    assert all(q.value is None and q.provenance is Provenance.UNKNOWN for q in other.quantities.values())
    assert all(q.unit and q.source for q in table.quantities.values())


def answers(cpu: Platform, node: NodeInventory, request_for, edge_for) -> dict[str, Any]:
    ctx = ProbeContext(env={}, recording=RECORDING)
    engine = request_for(RoleKind.ENGINE, tp=2)
    return {
        "vime_probe": cpu.probe(ctx),
        "vime_inventory": node,
        "vime_profiles": cpu.profiles(),
        "vime_capabilities": cpu.capabilities(node),
        "vime_ray_binding": cpu.ray_binding(node),
        "vime_process_env": cpu.process_env(engine),
        "vime_trainer_runtime": cpu.trainer_runtime(request_for()),
        "vime_megatron_adapt": cpu.megatron_adapt(request_for(), MOE),
        "vime_vllm_defaults": cpu.vllm_defaults(engine),
        "vime_collective": cpu.collective(request_for(), GroupRequest("trainer", 2)),
        "vime_memory_backend": cpu.memory_backend(request_for()),
        "vime_engine_sleep": cpu.engine_sleep(engine),
        "vime_transports": cpu.transports(edge_for(Relation.SAME_NODE), Side.ENGINE),
        "vime_perf_model": cpu.perf_model(node),
        "vime_doctor_checks": cpu.doctor_checks(DoctorContext(node, {})),
        "vime_fixture": cpu.fixture(ctx),
    }


def test_every_answer_is_frozen_pickles_and_is_json(cpu: Platform, node: NodeInventory, request_for, edge_for) -> None:
    given = answers(cpu, node, request_for, edge_for)
    assert set(given) == set(RULES)
    for hook, answer in given.items():
        assert pickle.loads(pickle.dumps(answer)) == answer, hook
        text = TypeAdapter(type(answer)).dump_json(answer) if dataclasses.is_dataclass(answer) else json.dumps(plain(answer))
        assert json.loads(text) is not None, hook
        for value in answer.values() if isinstance(answer, Mapping) else answer if isinstance(answer, tuple) else [answer]:
            assert dataclasses.is_dataclass(value), hook
            assert type(value).__dataclass_params__.frozen, hook  # type: ignore[attr-defined]


def plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, tuple) else dataclasses.asdict(value)


def test_an_inventory_survives_json(node: NodeInventory) -> None:
    adapter = TypeAdapter(NodeInventory)
    assert adapter.validate_json(adapter.dump_json(node)) == node


def factories(value: Any) -> list[Factory]:
    if isinstance(value, Factory):
        return [value]
    if isinstance(value, Mapping):
        return [found for item in value.values() for found in factories(item)]
    if isinstance(value, (tuple, list)):
        return [found for item in value for found in factories(item)]
    if dataclasses.is_dataclass(value):
        return [found for f in dataclasses.fields(value) for found in factories(getattr(value, f.name))]
    return []


def test_every_factory_names_code_that_exists(cpu: Platform, node: NodeInventory, request_for, edge_for) -> None:
    given = answers(cpu, node, request_for, edge_for)
    given["trainer halves"] = cpu.transports(edge_for(Relation.SAME_NODE), Side.TRAINER)
    found = factories(tuple(given.values()))
    assert len(found) >= 11
    for factory in found:
        module, _, name = factory.target.partition(":")
        assert name in definitions(ROOT / (module.replace(".", "/") + ".py")), factory.target


def definitions(path: Path) -> dict[str, ast.ClassDef | ast.FunctionDef]:
    """Top-level classes and functions, without importing anything."""
    return {n.name: n for n in ast.parse(path.read_text()).body if isinstance(n, ast.ClassDef | ast.FunctionDef)}


def test_megatron_knows_every_overridden_setting() -> None:
    package = importlib.metadata.distribution("megatron-core")
    known: set[str] = set()
    for file, name in (
        ("transformer/transformer_config.py", "TransformerConfig"),
        ("model_parallel_config.py", "ModelParallelConfig"),
    ):
        config = definitions(Path(str(package.locate_file(f"megatron/core/{file}"))))[name]
        known |= {n.target.id for n in config.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
    assert set(trainer.OVERRIDES | trainer.MOE_OVERRIDES) <= known


def test_hooks_need_no_heavy_package() -> None:
    code = (
        "import sys; from vime.platforms.cpu import plugin; from vime.platforms.lineage import Platform;"
        "from vime.facts.diagnosis import ProbeContext; p = Platform.of(plugin); n = p.inventory(ProbeContext({}));"
        "p.capabilities(n); p.perf_model(n);"
        "print([m for m in ('torch', 'ray', 'vllm', 'megatron', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
