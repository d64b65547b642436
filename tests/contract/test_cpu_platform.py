"""The embedded platform keeps the contract of every hook, reached as any plugin is: by its entry point."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from vime.errors import PluginError
from vime.facts.diagnosis import ProbeContext
from vime.facts.process import RoleKind
from vime.facts.transports import Relation, Side
from vime.platforms.discovery import discover
from vime.testing.conformance import ANY, Machine, PlatformConformance, load_subject
from vime.testing.conformance.machine import this_machine
from vime.testing.recording import read_trace, record
from vime.testing.tiny_models import make_tiny_qwen3

HERE = Machine("here", "hardware", this_machine, ANY)


class TestCpu(PlatformConformance):
    platform = "cpu"
    machines = (HERE,)
    foreign = ()  # every machine has a host


def test_a_host_offers_three_transports_and_frees_nothing_when_its_engine_sleeps(tmp_path: Path) -> None:
    subject = load_subject("cpu", machines=(HERE,), folder=tmp_path)
    case = subject.real[0]
    edge = subject.edge(case, Relation.SAME_DEVICE)
    offers = {side: {offer.protocol for offer in subject.platform.transports(edge, side)} for side in Side}
    assert offers[Side.TRAINER] == offers[Side.ENGINE] == {"host_shm", "collective", "disk"}
    sleep = subject.platform.engine_sleep(subject.request(case, RoleKind.ENGINE, residency="park"))
    assert sleep.level == 0
    assert not any(semantics.frees for semantics in sleep.tags.values())


def test_a_recording_of_another_platform_is_refused_by_name() -> None:
    with pytest.raises(PluginError, match="not one of the cpu platform"):
        discover().platform("cpu").inventory(ProbeContext({}, recording={"devices": 8}))


def test_calls_are_recorded() -> None:
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
