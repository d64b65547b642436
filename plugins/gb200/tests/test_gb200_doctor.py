"""Findings on trays: what is found, how severe it is, and that the fix says what to do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

import vime_cuda.plugin
import vime_gb200.plugin
from vime.facts.diagnosis import Check, DoctorContext, ProbeContext, Severity
from vime.platforms.lineage import Platform
from vime_gb200 import doctor
from vime_gb200.testing import machines

GB200 = Platform.of(vime_cuda.plugin, vime_gb200.plugin)


def findings(
    change: machines.Change = machines.as_is, *, profile: str = "gb200-tray", env: Mapping[str, str] | None = None
) -> dict[str, Check]:
    with machines.tray(profile, change) as found:
        inventory = GB200.inventory(ProbeContext(found))
    return {check.id: check for check in doctor.checks(DoctorContext(inventory, env or {}))}


def troubles(found: Mapping[str, Check]) -> dict[str, Severity]:
    return {id: check.severity for id, check in found.items() if check.severity in (Severity.WARNING, Severity.ERROR)}


def test_a_tray_in_order_has_no_troubles_and_a_finding_for_every_device() -> None:
    found = findings()
    assert troubles(found) == {}
    assert {f"gb200.fabric-{i}" for i in range(4)} | {"gb200.imex", "gb200.cliques", "gb200.numa"} <= set(found)
    assert found["gb200.clique-size"].severity is Severity.INFO


def without_addressing(profile: dict[str, Any]) -> None:
    for device in profile["devices"]:
        del device["AddressingMode"]


def hmm(profile: dict[str, Any]) -> None:
    profile["devices"][1]["AddressingMode"] = 1


def no_affinity(profile: dict[str, Any]) -> None:
    for device in profile["devices"]:
        del device["CpuAffinity"]


def no_vllm(profile: dict[str, Any]) -> None:
    profile["host"]["software"]["engine"] = {"torch": "2.11.0"}


def no_router(profile: dict[str, Any]) -> None:
    profile["host"]["software"]["router"] = {}


@pytest.mark.parametrize(
    ("change", "expected", "words"),
    [
        (machines.no_channel, {"gb200.imex": "error", "gb200.fabric": "error"}, ("gb200.imex", "NVreg_CreateImexChannel0=1")),
        (machines.two_cliques, {"gb200.cliques": "error", "gb200.fabric": "error"}, ("gb200.cliques", "one partition")),
        (machines.two_devices, {"gb200.devices": "warning"}, ("gb200.devices", "devices_per_node: 4")),
        (
            machines.lost_device,
            {"gb200.fabric-3": "warning", "gb200.fabric": "warning", "gb200.numa": "warning"},
            ("gb200.fabric-3", "nvidia-smi -q -i 3"),
        ),
        (hmm, {"gb200.addressing": "warning"}, ("gb200.addressing", "Addressing Mode")),
        (no_affinity, {"gb200.numa": "warning"}, ("gb200.numa", "cpuset")),
        (no_vllm, {"gb200.wheels-engine": "warning"}, ("gb200.wheels-engine", "aarch64")),
        (no_router, {"gb200.wheels-router": "warning"}, ("gb200.wheels-router", "another node")),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_each_fault_is_found_with_its_fix(change: machines.Change, expected: dict[str, str], words: tuple[str, str]) -> None:
    found = findings(change)
    assert troubles(found) == expected
    assert words[1] in found[words[0]].fix


def test_every_device_of_a_broken_fabric_has_its_own_finding() -> None:
    found = findings(profile="gb200-broken-fabric")
    assert troubles(found) == dict.fromkeys(("gb200.fabric-1", "gb200.fabric-2", "gb200.imex", "gb200.fabric"), "error")
    assert found["gb200.fabric-0"].severity is Severity.OK
    assert "in progress" in found["gb200.fabric-1"].finding
    assert "degraded" in found["gb200.fabric-2"].finding


@pytest.mark.parametrize(
    ("change", "severity", "words"),
    [
        (machines.as_is, Severity.INFO, "memory node 2, 10, 18, 26"),
        (machines.device_memory_apart, Severity.OK, "CDMM"),
        (without_addressing, Severity.INFO, "does not tell"),
    ],
    ids=["node of the host", "apart", "untold"],
)
def test_where_device_memory_is(change: machines.Change, severity: Severity, words: str) -> None:
    check = findings(change)["gb200.addressing"]
    assert check.severity is severity
    assert words in check.finding


@pytest.mark.parametrize(
    ("env", "change", "expected"),
    [
        ({"NCCL_CUMEM_ENABLE": "0"}, machines.as_is, {"gb200.cumem": "error"}),
        ({"NCCL_CUMEM_ENABLE": "1"}, machines.as_is, {}),
        ({"NCCL_MNNVL_ENABLE": "0"}, machines.as_is, {"gb200.mnnvl": "warning"}),
        ({"NCCL_MNNVL_ENABLE": "2"}, machines.as_is, {}),
        ({"NCCL_MNNVL_ENABLE": "0"}, machines.no_channel, {"gb200.imex": "error", "gb200.fabric": "error"}),
        (
            {"NCCL_MNNVL_ENABLE": "1"},
            machines.no_channel,
            {"gb200.imex": "error", "gb200.fabric": "error", "gb200.mnnvl": "error"},
        ),
    ],
)
def test_variables_that_turn_nvlink_between_trays_off(
    env: dict[str, str], change: machines.Change, expected: dict[str, str]
) -> None:
    assert troubles(findings(change, env=env)) == expected


@pytest.mark.parametrize(("present", "severity"), [(True, Severity.OK), (False, Severity.WARNING)])
def test_numactl(monkeypatch: pytest.MonkeyPatch, present: bool, severity: Severity) -> None:
    with machines.tray("gb200-tray") as env:
        monkeypatch.setattr("vime_gb200.inventory.find_program", lambda name: f"/usr/bin/{name}" if present else None)
        inventory = GB200.inventory(ProbeContext(env))
    found = {check.id: check for check in doctor.checks(DoctorContext(inventory, {}))}
    assert found["gb200.numactl"].severity is severity
    assert present or "apt-get install numactl" in found["gb200.numactl"].fix


def test_findings_of_cuda_come_beside_without_its_hint_to_change_the_platform() -> None:
    with machines.tray("gb200-tray") as env:
        inventory = GB200.inventory(ProbeContext(env))
    ids = [check.id for check in GB200.doctor_checks(DoctorContext(inventory, {}))]
    assert any(id.startswith("cuda.") for id in ids)
    assert "cuda.gb200" not in ids
    assert len(ids) == len(set(ids))
