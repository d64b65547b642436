"""The embedded platform keeps the contract of every hook, reached as any plugin is: by its entry point."""

from __future__ import annotations

import importlib
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vime.facts.collectives import GroupRequest
from vime.facts.diagnosis import DoctorContext, ProbeContext
from vime.facts.memory import MemoryBackend, Tag
from vime.facts.model import ModelShape
from vime.facts.process import Factory, Parallel, RoleKind, RolePlacement, RoleRequest, Slot
from vime.facts.transports import Edge, Relation, Side
from vime.hooks.specs import RULES, hook_names
from vime.platforms.discovery import discover
from vime.platforms.lineage import Platform
from vime.testing.recording import read_trace, record
from vime.testing.tiny_models import make_tiny_qwen3

MODEL = ModelShape("qwen3", 2, 64, 4, 2, 32, 128, 320, True, 100_000, 256)


@pytest.fixture(scope="module")
def platform() -> Platform:
    return discover().platform("cpu")


def request_for(platform: Platform, kind: RoleKind) -> RoleRequest:
    inventory = platform.inventory(ProbeContext(dict(os.environ)))
    return RoleRequest(
        role="actor" if kind is RoleKind.TRAINER else "rollout",
        kind=kind,
        placement=RolePlacement(kind.value, (Slot(0, 0),)),
        inventories=(inventory,),
        capabilities=platform.capabilities(inventory),
        parallel=Parallel(),
        dtype="float32",
    )


def answers(platform: Platform) -> dict[str, Any]:
    """Every hook's answer, as a run gets it."""
    trainer, engine = (request_for(platform, kind) for kind in (RoleKind.TRAINER, RoleKind.ENGINE))
    inventory, ctx = trainer.inventories[0], ProbeContext(dict(os.environ))
    edge = Edge(trainer, engine, Relation.SAME_NODE, 400_000)
    return {
        "vime_probe": platform.probe(ctx),
        "vime_inventory": inventory,
        "vime_profiles": platform.profiles(),
        "vime_capabilities": trainer.capabilities,
        "vime_ray_binding": platform.ray_binding(inventory),
        "vime_process_env": platform.process_env(trainer),
        "vime_trainer_runtime": platform.trainer_runtime(trainer),
        "vime_megatron_adapt": platform.megatron_adapt(trainer, MODEL),
        "vime_vllm_defaults": platform.vllm_defaults(engine),
        "vime_collective": platform.collective(trainer, GroupRequest("trainer", 2)),
        "vime_memory_backend": platform.memory_backend(trainer),
        "vime_engine_sleep": platform.engine_sleep(engine),
        "vime_transports": (platform.transports(edge, Side.TRAINER), platform.transports(edge, Side.ENGINE)),
        "vime_perf_model": platform.perf_model(inventory),
        "vime_doctor_checks": platform.doctor_checks(DoctorContext(inventory, dict(os.environ))),
        "vime_fixture": platform.fixture(ctx),
    }


def test_every_hook_is_asked_here(platform: Platform) -> None:
    assert set(answers(platform)) == set(hook_names()) == set(RULES)


@pytest.mark.parametrize("hook", hook_names())
def test_answers_are_there_and_travel(platform: Platform, hook: str) -> None:
    answer = answers(platform)[hook]
    assert answer is not None
    assert pickle.loads(pickle.dumps(answer)) == answer


def factories(value: Any) -> Iterator[Factory]:
    if isinstance(value, Factory):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from factories(item)
    elif hasattr(value, "__dataclass_fields__"):
        for name in value.__dataclass_fields__:
            yield from factories(getattr(value, name))


def test_every_factory_names_something_that_exists(platform: Platform) -> None:
    found = {factory.target for answer in answers(platform).values() for factory in factories(answer)}
    assert len(found) >= 10
    for target in found:
        module, _, name = target.partition(":")
        assert hasattr(importlib.import_module(module), name), target


def test_both_sides_offer_the_same_protocols(platform: Platform) -> None:
    trainer, engine = answers(platform)["vime_transports"]
    assert {o.protocol for o in trainer} == {o.protocol for o in engine} == {"host_shm", "collective", "disk"}


def test_engine_sleep_says_that_it_frees_nothing(platform: Platform) -> None:
    sleep = answers(platform)["vime_engine_sleep"]
    assert sleep.level == 0
    assert all(not semantics.frees and semantics.why for semantics in sleep.tags.values())


def test_memory_backend_frees_what_it_says(platform: Platform) -> None:
    import torch

    backend = answers(platform)["vime_memory_backend"]
    assert isinstance(backend, MemoryBackend)
    memory = backend.factory.build()
    tensor = torch.arange(1000, dtype=torch.float32)
    memory.region(Tag.PARAMS, lambda: [tensor])
    memory.pause([Tag.PARAMS])
    assert tensor.untyped_storage().nbytes() == 0
    memory.resume([Tag.PARAMS])
    assert torch.equal(tensor, torch.arange(1000, dtype=torch.float32))


def test_rules_of_the_environment_say_why(platform: Platform) -> None:
    rules = platform.process_env(request_for(platform, RoleKind.ENGINE))
    assert rules
    assert all(rule.why for rule in rules.values())


def test_doctor_findings_have_stable_ids_and_fixes(platform: Platform) -> None:
    checks = answers(platform)["vime_doctor_checks"]
    assert len({check.id for check in checks}) == len(checks)
    assert all(check.fix for check in checks if check.severity.value in ("warning", "error"))


def test_a_recording_replays_the_inventory(platform: Platform) -> None:
    fixture = answers(platform)["vime_fixture"]
    replayed = platform.inventory(ProbeContext({}, recording=fixture.data))
    assert replayed == platform.inventory(ProbeContext(dict(os.environ)))


def test_calls_are_recorded(platform: Platform) -> None:
    recording = record(discover().platform("cpu"))
    recording.profiles()
    assert "vime_profiles" in recording.asked()


def test_plan_and_doctor_ask_the_hooks_that_no_run_asks(tmp_path: Path) -> None:
    model = make_tiny_qwen3(tmp_path / "model")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1 + 1 =", "label": "2"}\n')
    (tmp_path / "run.yaml").write_text(
        f"run: {{dir: {tmp_path / 'run'}}}\nmodel: {{path: {model}}}\ndata: {{path: {tmp_path / 'prompts.jsonl'}}}\n"
        "schedule: {num_steps: 1}\n"
    )
    trace = tmp_path / "trace.jsonl"
    env = {**os.environ, "VIME_TRACE_PLUGINS": str(trace)}
    for words in (["plan", str(tmp_path / "run.yaml")], ["doctor", "--record", str(tmp_path / "host.json")]):
        done = subprocess.run([sys.executable, "-m", "vime.cli.main", *words], env=env, capture_output=True, text=True)
        assert "Traceback" not in done.stderr, done.stderr
    asked = {call.hook for call in read_trace(trace)}
    assert {"vime_profiles", "vime_doctor_checks", "vime_fixture"} <= asked
