"""From what amdsmi says to an inventory."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections import Counter
from typing import Any

import pytest

from vime.errors import PluginError
from vime.facts.diagnosis import Match, ProbeContext
from vime.facts.inventory import NodeInventory
from vime_rocm import inventory, probe
from vime_rocm.devices import kind_named, profiles
from vime_rocm.testing.fake_amdsmi import installed, load_profile

GIB, MIB = 2**30, 2**20


def of(profile: str | dict[str, Any]) -> NodeInventory:
    with installed(profile) as env:
        return inventory.inventory(ProbeContext(env))


def matched(profile: str) -> Match | None:
    with installed(profile) as env:
        return probe.matches(ProbeContext(env))


@pytest.mark.parametrize(
    ("profile", "name", "arch", "memory", "link"),
    [
        ("mi300x8", "AMD Instinct MI300X", "gfx942", 192 * GIB - 16 * MIB, 64e9),
        ("mi325x8", "AMD Instinct MI325X", "gfx942", 256 * GIB - 16 * MIB, 64e9),
        ("mi355x8", "AMD Instinct MI355X", "gfx950", 288 * GIB - 16 * MIB, 76.8e9),
    ],
)
def test_a_node_of_whole_chips(profile: str, name: str, arch: str, memory: int, link: float) -> None:
    node = of(profile)
    assert [d.index for d in node.devices] == list(range(8))
    assert {(d.name, d.arch, d.memory_bytes, d.partition, d.health) for d in node.devices} == {(name, arch, memory, None, "ok")}
    assert [d.numa_node for d in node.devices] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert len({d.uuid for d in node.devices}) == 8
    assert Counter((li.kind, li.bytes_per_s) for li in node.links) == {("xgmi", link): 56}
    assert (node.driver, node.vendor["runtime"], node.arch, node.cpus) == ("6.14.14", "7.0.2", "x86_64", 16)


def test_partitions_are_listed_as_what_they_are() -> None:
    node = of("mi300x8-cpx")
    assert len(node.devices) == len({d.uuid for d in node.devices}) == 64
    assert all(d.partition and "CPX" in d.partition and "NPS4" in d.partition for d in node.devices)
    # amdsmi gives every partition the chip's memory: 8 x that would be more than there is.
    assert sum(d.memory_bytes for d in node.devices) == 8 * (192 * GIB - 16 * MIB)
    kinds = Counter(link.kind for link in node.links)
    assert kinds == {"internal": 8 * 8 * 7, "xgmi": 64 * 56}


def test_devices_are_numbered_as_hip_numbers_them() -> None:
    node = of("mi300x8-sick")
    assert [d.pci_bus for d in node.devices[:3]] == ["0000:15:00.0", "0000:05:00.0", "0000:25:00.0"]
    assert [d.index for d in node.devices] == list(range(8))


def test_a_device_that_cannot_be_read_is_listed_and_unhealthy() -> None:
    node = of("mi300x8-sick")
    assert [d.index for d in node.devices if d.health != "ok"] == [3]
    assert "amdsmi_get_gpu_memory_total: AMDSMI_STATUS_DRM_ERROR" in node.devices[3].health
    assert node.devices[3].memory_bytes == 192 * GIB


def test_unanswered_questions_stay_unknown() -> None:
    sick = of("mi300x8-sick")
    assert sick.vendor["devices"][4]["compute_partition"] is None
    assert sick.devices[4].partition is None
    assert sick.devices[4].health == "ok"
    assert sick.devices[7].numa_node is None
    old = of("mi300x1-old-amdsmi")
    assert old.vendor["runtime"] is None
    assert old.vendor["devices"][0]["hip_id"] is None
    assert old.devices[0].index == 0


def test_a_pair_whose_memory_is_not_accessible_has_no_link() -> None:
    pairs = {(link.source, link.target) for link in of("mi300x8-sick").links}
    assert len(pairs) == 54
    assert not pairs & {(5, 6), (6, 5)}


def test_a_path_of_several_hops_has_no_known_rate() -> None:
    machine = load_profile("mi300x8") | {"links": {"xgmi": False}}
    assert {(link.kind, link.bytes_per_s) for link in of(machine).links} == {("pcie", None)}


@pytest.mark.parametrize("profile", ["mi300x8", "mi300x8-cpx", "mi300x8-masks", "mi355x8", "mi300x1-old-amdsmi"])
def test_the_probe_knows_its_hardware(profile: str) -> None:
    match = matched(profile)
    assert match is not None
    assert (match.platform, match.specificity) == ("rocm", 10)


@pytest.mark.parametrize("profile", ["radeon", "driver-not-loaded", "amdsmi-import-error"])
def test_the_probe_says_no_elsewhere(profile: str) -> None:
    assert matched(profile) is None


def test_the_probe_opens_and_closes_the_library() -> None:
    with installed("mi300x8") as env:
        probe.matches(ProbeContext(env))
        calls = sys.modules["amdsmi"].calls
        assert (calls[0], calls[-1]) == ("amdsmi_init", "amdsmi_shut_down")
        assert set(calls[1:-1]) == {"amdsmi_get_processor_handles", "amdsmi_get_gpu_asic_info"}


def test_masks_hide_nothing_from_the_inventory() -> None:
    assert len(of("mi300x8-masks").devices) == 8


@pytest.mark.parametrize(
    ("profile", "what", "fix"),
    [
        ("amdsmi-import-error", "KeyError: 'libamd_smi.so'", "amd-smi-lib"),
        ("driver-not-loaded", "DRIVER_NOT_LOADED", "modprobe amdgpu"),
    ],
)
def test_an_unreadable_machine_is_an_error_with_the_next_step(
    profile: str, what: str, fix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(PluginError) as raised:
        of(profile)
    assert what in raised.value.what
    assert fix in (raised.value.fix or "")
    assert capsys.readouterr().out == ""


def test_a_machine_without_gpus_is_an_error() -> None:
    with pytest.raises(PluginError, match="lists no GPU"):
        of(load_profile("mi300x8") | {"devices": []})


def test_another_product_is_listed_and_refused() -> None:
    (device,) = of("radeon").devices
    assert device.health == "architecture gfx1100 is not one of gfx942, gfx950"


@pytest.mark.parametrize("profile", ["mi300x8", "mi300x8-cpx", "mi300x8-sick"])
def test_a_recording_replays_to_the_same_inventory(profile: str) -> None:
    with installed(profile) as env:
        recorded = inventory.fixture(ProbeContext(env))
    assert (recorded.platform, recorded.origin) == ("rocm", "synthetic")
    data = json.loads(json.dumps(recorded.data))
    ctx = ProbeContext({}, recording=data)
    assert inventory.inventory(ctx) == of(profile)
    assert probe.matches(ctx) is not None
    assert inventory.fixture(ctx).data == data


@pytest.mark.parametrize("data", [{}, {"host": {}, "devices": []}, {"cpus": [0], "hostname": "x"}])
def test_another_platforms_recording_is_refused(data: dict[str, Any]) -> None:
    with pytest.raises(PluginError, match="not one of the rocm platform"):
        inventory.inventory(ProbeContext({}, recording=data))
    assert probe.matches(ProbeContext({}, recording=data)) is None


@pytest.mark.parametrize(
    ("name", "kind"),
    [("mi300x", "mi300x"), ("AMD Instinct MI300X", "mi300x"), ("MI325X-O", "mi325x"), ("MI300XYZ", None), ("MI300A", None)],
)
def test_products_are_known_by_whole_words(name: str, kind: str | None) -> None:
    found = kind_named(name)
    assert (found.name if found else None) == kind


def test_nominal_devices() -> None:
    found = {p.name: (p.memory_bytes // GIB, p.device_arch, p.devices_per_node, p.numa_nodes) for p in profiles()}
    assert found == {
        "mi300x": (192, "gfx942", 8, 2),
        "mi325x": (256, "gfx942", 8, 2),
        "mi355x": (288, "gfx950", 8, 2),
    }
    assert all(p.domain_devices == 8 and dataclasses.asdict(p)["arch"] == "x86_64" for p in profiles())


def test_tmpfs_is_read_from_the_mounts() -> None:
    text = "overlay / overlay rw 0 0\ntmpfs /dev/shm tmpfs rw 0 0\ntmpfs /run tmpfs rw 0 0\nbad\n"
    assert probe.parse_tmpfs(text) == ["/dev/shm", "/run"]
