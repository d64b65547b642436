"""What the platform finds: probe, inventory, recordings, nominal racks. Through the lineage, on the fake NVML."""

from __future__ import annotations

import json
from typing import Any

import pytest

import vime_cuda.plugin
import vime_gb200.plugin
from vime.errors import PluginError
from vime.facts.diagnosis import Match, ProbeContext
from vime.facts.inventory import NodeInventory, Tri
from vime.platforms.lineage import Platform
from vime.topology.model import Pool
from vime.topology.profiles import nominal_nodes
from vime.topology.rules import PoolNodes, check_hardware
from vime.yamltree import Where, from_value
from vime_cuda.testing import fake_nvml
from vime_gb200.testing import machines

DOMAIN = "5c1a903e-7742-4b0d-9f21-6a88d40b13ee"


@pytest.fixture(scope="module")
def gb200() -> Platform:
    return Platform.of(vime_cuda.plugin, vime_gb200.plugin)


@pytest.fixture(scope="module")
def cuda() -> Platform:
    return Platform.of(vime_cuda.plugin)


def read(platform: Platform, change: machines.Change = machines.as_is, *, profile: str = "gb200-tray") -> NodeInventory:
    with machines.tray(profile, change) as env:
        return platform.inventory(ProbeContext(env))


# ---- probe


@pytest.mark.parametrize(
    ("profile", "matches"),
    [
        ("gb200-tray", True),
        ("gb300-tray", True),
        ("gb200-broken-fabric", True),
        ("hopper-claims-fabric", False),
        ("gh200", False),
        ("b200x8", False),
        ("h200x8", False),
        ("nvml-missing", False),
    ],
)
def test_the_probe_outweighs_cuda_on_trays_only(gb200: Platform, profile: str, matches: bool) -> None:
    with fake_nvml.machine(profile) as env:
        found = {match.platform: match.specificity for match in gb200.probe(ProbeContext(env))}
    assert ("gb200" in found) is matches
    if matches:
        assert found == {"cuda": 10, "gb200": 20}


def test_the_probe_reads_recordings(gb200: Platform) -> None:
    with machines.tray("gb200-tray") as env:
        fixture = gb200.fixture(ProbeContext(env))
    assert fixture is not None
    assert gb200.probe(ProbeContext({}, recording=fixture.data))[-1] == Match(
        "gb200", 20, "4 devices of sm100 on Grace; fabric usable: yes"
    )


# ---- inventory


def test_a_tray_has_a_domain_and_a_grace_for_every_device(gb200: Platform) -> None:
    node = read(gb200)
    assert (node.platform, node.arch, len(node.devices)) == ("gb200", "aarch64", 4)
    assert node.fabric is not None
    assert (node.fabric.id, node.fabric.clique, node.fabric.usable) == (DOMAIN, "32766", Tri.YES)
    assert [device.numa_node for device in node.devices] == [0, 0, 1, 1]
    assert [(home.index, home.cpus[0], home.cpus[-1]) for home in node.numa] == [(0, 0, 71), (1, 72, 143)]


def test_device_memory_is_not_counted_as_host_memory(gb200: Platform) -> None:
    def all_nodes(profile: dict[str, Any]) -> None:
        profile["host"]["memory_bytes"] = sum(node["memory_bytes"] for node in profile["host"]["numa"])

    assert read(gb200, all_nodes).memory_bytes == 2 * 515396075520
    assert read(gb200, machines.device_memory_apart).memory_bytes == 2 * 515396075520


def test_a_container_limit_stays_the_smaller_one(gb200: Platform) -> None:
    def limited(profile: dict[str, Any]) -> None:
        profile["host"]["memory_bytes"] = 64 * 2**30

    assert read(gb200, limited).memory_bytes == 64 * 2**30


@pytest.mark.parametrize(
    ("change", "usable", "reason"),
    [
        (machines.no_channel, Tri.NO, "there is no IMEX channel"),
        (machines.two_cliques, Tri.NO, f"different domains ({DOMAIN}.1, {DOMAIN}.32766)"),
        (machines.no_fabric_functions, Tri.UNKNOWN, "every device: the driver gives no fabric information"),
        (machines.lost_device, Tri.UNKNOWN, "device 3: the driver gives no fabric information"),
        (machines.two_devices, Tri.YES, "registration completed"),
    ],
)
def test_the_verdict_names_what_failed(gb200: Platform, change: machines.Change, usable: Tri, reason: str) -> None:
    fabric = read(gb200, change).fabric
    assert fabric is not None
    assert fabric.usable is usable
    assert reason in fabric.reason


def test_a_broken_fabric_names_every_failed_term(gb200: Platform) -> None:
    fabric = read(gb200, profile="gb200-broken-fabric").fabric
    assert fabric is not None
    assert fabric.usable is Tri.NO
    for term in ("device 1: fabric registration is in progress", "device 2: its bandwidth is degraded", "no IMEX channel"):
        assert term in fabric.reason


def test_a_device_whose_grace_is_not_told_has_no_memory_node(gb200: Platform) -> None:
    def silent(profile: dict[str, Any]) -> None:
        del profile["devices"][0]["CpuAffinity"]
        profile["pci_numa"] = {"0008:01:00.0": 2}  # the device's own memory node

    assert [device.numa_node for device in read(gb200, silent).devices] == [None, 0, 1, 1]


@pytest.mark.parametrize("profile", ["hopper-claims-fabric", "b200x8", "gh200"])
def test_other_machines_are_refused_with_the_platform_to_use(gb200: Platform, profile: str) -> None:
    with fake_nvml.machine(profile) as env, pytest.raises(PluginError, match="no Grace-Blackwell tray") as caught:
        gb200.inventory(ProbeContext(env))
    assert caught.value.fix == "use --platform cuda"


def test_an_unknown_chip_to_chip_link_is_left_to_the_user(gb200: Platform) -> None:
    def untold(profile: dict[str, Any]) -> None:
        profile["absent"] = ["nvmlDeviceGetC2cModeInfoV"]

    with machines.tray("gb200-tray", untold) as env:
        ctx = ProbeContext(env)
        assert [match.platform for match in gb200.probe(ctx)] == ["cuda"]
        assert gb200.inventory(ctx).platform == "gb200"


def test_a_recording_replays_under_its_own_name(gb200: Platform) -> None:
    with machines.tray("gb200-broken-fabric") as env:
        ctx = ProbeContext(env)
        fixture, live = gb200.fixture(ctx), gb200.inventory(ctx)
    assert fixture is not None
    assert (fixture.platform, fixture.origin) == ("gb200", "synthetic")
    assert gb200.inventory(ProbeContext({}, recording=json.loads(json.dumps(fixture.data)))) == live


def test_a_recording_of_cuda_leaves_numactl_unknown(cuda: Platform, gb200: Platform) -> None:
    with machines.tray("gb200-tray") as env:
        fixture = cuda.fixture(ProbeContext(env))
    assert fixture is not None
    assert gb200.inventory(ProbeContext({}, recording=fixture.data)).vendor["numactl"] is None


# ---- profiles


def test_nominal_racks() -> None:
    found = {p.name: p for p in vime_gb200.plugin.vime_profiles()}
    assert {name: (p.devices_per_node, p.domain_devices, p.numa_nodes, p.arch) for name, p in found.items()} == {
        "gb200": (4, 72, 2, "aarch64"),
        "gb300": (4, 72, 2, "aarch64"),
    }
    assert (found["gb200"].memory_bytes, found["gb200"].device_arch) == (186_000_000_000, "sm100")
    assert (found["gb300"].memory_bytes, found["gb300"].device_arch) == (277_000_000_000, "sm103")


def test_eight_devices_a_node_is_a_mistake() -> None:
    tree = from_value({}, Where("test", 0))
    pool = Pool(platform="gb200", nodes=1, devices_per_node=8)
    profile = next(iter(vime_gb200.plugin.vime_profiles()))
    nodes = nominal_nodes("rack", pool, profile, demand=8, tree=tree)
    (error,) = check_hardware(PoolNodes("rack", pool, nodes, profile), (), tree)
    assert "E211" in error.what
    assert "expected 4, you wrote 8" in error.what
