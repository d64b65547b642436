"""What the probe makes of NVML's answers: facts, unknowns, faults."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from vime.errors import PluginError
from vime.facts.diagnosis import ProbeContext
from vime_cuda import probe
from vime_cuda.testing.fake_nvml import installed, load_profile

Facts = Callable[..., dict[str, Any]]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("h200x8", "NVML lists 8 x NVIDIA H200"),
        ("gb200-tray", "NVML lists 4 x NVIDIA GB200"),
        ("gh200", "NVML lists 1 x NVIDIA GH200 480GB"),
        ("hopper-claims-fabric", "NVML lists 8 x NVIDIA H100 80GB HBM3"),
        ("mixed-devices", "NVML lists 1 x NVIDIA H100 80GB HBM3, 1 x NVIDIA A100-SXM4-80GB"),
        ("lost-device", "NVML lists 7 x NVIDIA H200"),
        ("v100", None),
        ("nvml-missing", None),
        ("driver-not-loaded", None),
        ("mixed-drivers", None),
    ],
)
def test_matches_what_vime_can_use(name: str, reason: str | None) -> None:
    with installed(load_profile(name)) as library:
        started = time.monotonic()
        match = probe.matches(ProbeContext({"CUDA_VISIBLE_DEVICES": ""}))
        assert time.monotonic() - started < 1.0
        assert (match.reason if match else None) == reason
        assert match is None or (match.platform, match.specificity) == ("cuda", 10)
        assert library is None or library.started == 0


def test_a_recording_matches_without_the_library(facts_of: Facts) -> None:
    recording = facts_of("h200x2-vm")
    with installed(load_profile("nvml-missing")):
        match = probe.matches(ProbeContext({}, recording))
        assert match is not None
        assert match.reason == "NVML lists 2 x NVIDIA H200"
        assert probe.matches(ProbeContext({}, {"hostname": "laptop"})) is None


def test_facts_are_json_and_the_same_twice(facts_of: Facts) -> None:
    facts = facts_of("gb200-tray")
    assert json.loads(json.dumps(facts)) == facts == facts_of("gb200-tray")


def test_nvml_is_shut_down_as_often_as_it_was_started() -> None:
    with installed(load_profile("h200x8")) as library:
        assert library is not None
        probe.read_machine()
        assert (library.calls.count("nvmlInitWithFlags"), library.calls.count("nvmlShutdown"), library.unknown) == (1, 1, [])


def test_masks_do_not_hide_devices_from_the_inventory(facts_of: Facts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert len(facts_of("h200x8")["devices"]) == 8


def test_a_single_hopper_in_a_virtual_machine(facts_of: Facts) -> None:
    facts = facts_of("h200-vm")
    assert {k: v for k, v in facts.items() if k != "host"} == {
        "schema": 1,
        "driver": "580.159.04",
        "cuda_driver": [13, 0],
        "nvml": "13.580.159.04",
        "p2p_nvlink": [[None]],
        "p2p_read": [[None]],
        "imex_channels": None,
        "devices": [
            {
                "index": 0,
                "name": "NVIDIA H200",
                "uuid": "GPU-00000000-1111-2222-3333-444444444444",
                "capability": [9, 0],
                "memory_bytes": 150754820096,
                "pci_bus": "0000:00:06.0",
                "numa_node": 0,
                "memory_numa_node": None,
                "mig": {"current": False, "pending": False},
                "pcie": {"generation": 5, "width": 16, "max_generation": 5, "max_width": 16},
                "nvlinks": None,
                "fabric": {
                    "state": 0,
                    "status": 0,
                    "cluster_uuid": "0" * 32,
                    "clique": 0,
                    "health_mask": 0,
                    "health_summary": 0,
                },
                "c2c": {"enabled": False, "links": None},
                "addressing_mode": 0,
                "platform_info": None,
                "persistence": None,
                "health": "ok",
            }
        ],
    }


def test_two_hoppers_reach_each_other_over_eighteen_links(facts_of: Facts) -> None:
    facts = facts_of("h200x2-vm")
    assert facts["p2p_nvlink"] == facts["p2p_read"] == [[None, True], [True, None]]
    assert [d["nvlinks"] for d in facts["devices"]] == [{"active": 18, "inactive": 0, "version": 6}] * 2
    assert [(d["fabric"]["state"], d["fabric"]["cluster_uuid"]) for d in facts["devices"]] == [(3, "0" * 32)] * 2


def test_a_tray_tells_its_fabric_place_and_memory(facts_of: Facts) -> None:
    facts = facts_of("gb200-tray")
    third = facts["devices"][2]
    assert facts["imex_channels"] == ["channel0"]
    assert third["fabric"] == {
        "state": 3,
        "status": 0,
        "cluster_uuid": "5c1a903e77424b0d9f216a88d40b13ee",
        "clique": 32766,
        "health_mask": 0x11AA,
        "health_summary": 1,
    }
    assert third["platform_info"] == {
        "chassis_serial": "1820000000001",
        "slot": 7,
        "tray": 6,
        "host_id": 1,
        "module_id": 3,
    }
    assert (third["c2c"], third["addressing_mode"], third["pcie"]) == ({"enabled": True, "links": 2}, 2, None)
    assert (third["numa_node"], third["memory_numa_node"]) == (1, 18)


def test_a_broken_fabric_is_told_as_it_is(facts_of: Facts) -> None:
    facts = facts_of("gb200-broken-fabric")
    states = [(d["fabric"]["state"], d["fabric"]["health_mask"], d["fabric"]["health_summary"]) for d in facts["devices"]]
    assert states == [(3, 0x11AA, 1), (2, 0x11AA, 1), (3, 0x11A9, 2), (3, 0x11AA, 1)]
    assert facts["imex_channels"] == []
    assert {d["health"] for d in facts["devices"]} == {"ok"}


UNSUPPORTED = {
    "CpuAffinity": "numa_node",
    "NumaNodeId": "memory_numa_node",
    "MigMode": "mig",
    "NvLink": "nvlinks",
    "FabricV": "fabric",
    "C2cModeInfoV": "c2c",
    "AddressingMode": "addressing_mode",
    "PlatformInfo": "platform_info",
    "PersistenceMode": "persistence",
}


@pytest.mark.parametrize("error", ["NOT_SUPPORTED", "FUNCTION_NOT_FOUND", "NO_PERMISSION", "ARGUMENT_VERSION_MISMATCH"])
@pytest.mark.parametrize(("question", "fact"), UNSUPPORTED.items())
def test_an_unsupported_question_is_unknown_and_no_fault(facts_of: Facts, question: str, fact: str, error: str) -> None:
    devices = load_profile("gb200-tray")["devices"]
    devices[1][question] = f"ERR {error}"
    found = facts_of("gb200-tray", devices=devices)["devices"]
    assert (found[1][fact], found[1]["health"]) == (None, "ok")
    assert found[0][fact] is not None


@pytest.mark.parametrize("question", [*(q for q in UNSUPPORTED if q != "NumaNodeId"), "MemoryInfo", "UUID", "Name"])
def test_any_other_error_is_the_devices_health(facts_of: Facts, question: str) -> None:
    devices = load_profile("gb200-tray")["devices"]
    devices[1][question] = "ERR GPU_IS_LOST"
    found = facts_of("gb200-tray", devices=devices)["devices"]
    assert "GPU is lost" in found[1]["health"]
    assert found[0]["health"] == "ok"


def test_a_lost_device_keeps_its_number_and_a_name_of_its_own(facts_of: Facts) -> None:
    lost = facts_of("lost-device")["devices"][3]
    assert (lost["index"], lost["uuid"], lost["memory_bytes"]) == (3, "unreadable-3", 0)
    assert lost["health"] == "nvmlDeviceGetHandleByIndex: GPU is lost"


def test_functions_missing_from_pynvml_are_unknown(facts_of: Facts, monkeypatch: pytest.MonkeyPatch) -> None:
    import pynvml

    for name in ("nvmlDeviceGetAddressingMode", "c_nvmlPlatformInfo_v2_t", "c_nvmlGpuFabricInfo_v3_t"):
        monkeypatch.delattr(pynvml, name)
    found = facts_of("gb200-tray")["devices"][0]
    assert (found["addressing_mode"], found["platform_info"], found["health"]) == (None, None, "ok")
    assert (found["fabric"]["state"], found["fabric"]["health_mask"], found["fabric"]["health_summary"]) == (3, 0x11AA, None)


def test_an_older_driver_is_asked_for_the_older_structure(facts_of: Facts) -> None:
    devices = load_profile("gb200-tray")["devices"]
    for device in devices:
        device["FabricV"]["version"] = 0x02000024
    found = facts_of("gb200-tray", devices=devices)["devices"][0]["fabric"]
    assert (found["clique"], found["health_mask"], found["health_summary"]) == (32766, 0x11AA, None)


@pytest.mark.parametrize(
    ("affinity", "pci_numa", "expected"),
    [
        ([0, 2**64 - 1], {}, 1),
        ([2**64 - 1, 2**64 - 1], {}, None),
        ([2**64 - 1, 2**64 - 1], {"0000:1B:00.0": 1}, 1),
        ([0, 0], {"0000:1B:00.0": 0}, 0),
        ([0, 0], {}, None),
    ],
    ids=["near one node", "near both", "near both, the bus knows", "near none, the bus knows", "nobody knows"],
)
def test_memory_node_from_processors_then_from_the_bus(
    facts_of: Facts, affinity: list[int], pci_numa: dict[str, int], expected: int | None
) -> None:
    devices = load_profile("h200x8")["devices"]
    devices[0]["CpuAffinity"] = affinity
    assert facts_of("h200x8", devices=devices, pci_numa=pci_numa)["devices"][0]["numa_node"] == expected


@pytest.mark.parametrize(("status", "expected"), [(0, True), (5, False), (4, False), (6, None), ("ERR NOT_SUPPORTED", None)])
def test_peer_paths_are_yes_no_or_unknown(facts_of: Facts, status: int | str, expected: bool | None) -> None:
    facts = facts_of("h200x2-vm", p2p={"nvlink": status, "read": 0})
    assert facts["p2p_nvlink"] == [[None, expected], [expected, None]]
    assert facts["p2p_read"] == [[None, True], [True, None]]


@pytest.mark.parametrize(
    ("name", "what", "fix"),
    [
        ("nvml-missing", "NVML Shared Library Not Found", "--gpus all"),
        ("driver-not-loaded", "Driver Not Loaded", "modprobe nvidia"),
        ("mixed-drivers", "version mismatch", "reboot"),
    ],
)
def test_a_library_that_does_not_start_names_the_next_step(facts_of: Facts, name: str, what: str, fix: str) -> None:
    with pytest.raises(PluginError, match=what) as caught:
        facts_of(name)
    assert fix in str(caught.value.fix)


def test_no_device_at_all_is_an_error(facts_of: Facts) -> None:
    with pytest.raises(PluginError, match="lists no GPU") as caught:
        facts_of("h200-vm", devices=[])
    assert caught.value.where == "h200-vm"


def test_pynvml_that_cannot_be_imported_is_an_error_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(PluginError, match="pynvml cannot be imported") as caught:
        probe.read_machine()
    assert "nvidia-ml-py" in str(caught.value.fix)
