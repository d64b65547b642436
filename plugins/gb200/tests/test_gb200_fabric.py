"""The acceptance rule, one row per term. Masks are written by hand from NVML's constants."""

from __future__ import annotations

from typing import Any

import pytest

from vime.facts.inventory import Tri
from vime_gb200 import fabric

UUID = "5c1a903e77424b0d9f216a88d40b13ee"
HEALTHY = 0x11AA
"""Partition assigned 1, configuration right 1, four answers `false` (binary 10)."""


def device(index: int = 0, **fabric_facts: Any) -> dict[str, Any]:
    facts = {
        "state": 3,
        "status": 0,
        "cluster_uuid": UUID,
        "clique": 7,
        "health_mask": HEALTHY,
        "health_summary": 1,
        **fabric_facts,
    }
    return {"index": index, "capability": [10, 0], "c2c": {"enabled": True, "links": 2}, "fabric": facts}


def tray(**fabric_facts: Any) -> list[dict[str, Any]]:
    return [device(index, **(fabric_facts if index == 2 else {})) for index in range(4)]


def test_a_tray_in_order_is_usable_and_says_what_is_proved_later() -> None:
    domain = fabric.judge(tray(), ["channel0"])
    assert (domain.usable, domain.id, domain.clique) == (Tri.YES, "5c1a903e-7742-4b0d-9f21-6a88d40b13ee", "7")
    assert "proved when a group connects" in domain.reason


@pytest.mark.parametrize(
    ("change", "usable", "reason"),
    [
        ({"state": 0}, Tri.NO, "device 2: fabric registration is not supported, not completed"),
        ({"state": 1}, Tri.NO, "device 2: fabric registration is not started, not completed"),
        ({"state": 2}, Tri.NO, "device 2: fabric registration is in progress, not completed"),
        ({"state": None}, Tri.UNKNOWN, "device 2: fabric registration is unknown, not completed"),
        ({"status": 999}, Tri.NO, "device 2: fabric registration ended with status 999"),
        ({"status": None}, Tri.UNKNOWN, "device 2: the driver does not tell the status"),
        ({"cluster_uuid": "0" * 32}, Tri.NO, "device 2: the cluster UUID is zero"),
        ({"cluster_uuid": None}, Tri.UNKNOWN, "device 2: the driver does not tell the cluster UUID"),
        ({"clique": 0}, Tri.NO, "device 2: the clique is 0"),
        ({"clique": None}, Tri.UNKNOWN, "device 2: the driver does not tell the clique"),
        ({"health_mask": None, "health_summary": None}, Tri.UNKNOWN, "device 2: the driver does not tell its health"),
        ({"health_mask": 0, "health_summary": 0}, Tri.UNKNOWN, "device 2: the driver does not tell its health"),
        ({"health_mask": 0x11A9, "health_summary": 3}, Tri.UNKNOWN, "device 2: its bandwidth is degraded"),
        ({"health_mask": 0x11A9, "health_summary": 2}, Tri.NO, "device 2: the driver calls it unhealthy"),
        ({"health_mask": 0x119A}, Tri.NO, "device 2: a route is unhealthy"),
        ({"health_mask": 0x13AA}, Tri.NO, "device 2: its configuration is wrong (chassis serial number)"),
        ({"health_mask": 0x21AA}, Tri.NO, "device 2: no fabric partition is assigned to it"),
    ],
)
def test_one_term_on_one_device_decides(change: dict[str, Any], usable: Tri, reason: str) -> None:
    domain = fabric.judge(tray(**change), ["channel0"])
    assert domain.usable is usable
    assert reason in domain.reason


@pytest.mark.parametrize(
    ("channels", "usable", "reason"),
    [
        ([], Tri.NO, "there is no IMEX channel, without which no memory is exported to another tray"),
        (None, Tri.UNKNOWN, "IMEX channels could not be looked for"),
    ],
)
def test_a_tray_exports_through_a_channel(channels: list[str] | None, usable: Tri, reason: str) -> None:
    domain = fabric.judge(tray(), channels)
    assert (domain.usable, domain.reason) == (usable, reason)


def test_no_outweighs_unknown_and_every_failed_term_is_named() -> None:
    domain = fabric.judge(tray(clique=None, status=15), None)
    assert domain.usable is Tri.NO
    assert domain.reason == (
        "device 2: fabric registration ended with status 15; device 2: the driver does not tell the clique; "
        "IMEX channels could not be looked for"
    )


def test_a_term_that_fails_everywhere_is_told_once() -> None:
    devices = [{**device(index), "fabric": None} for index in range(4)]
    domain = fabric.judge(devices, ["channel0"])
    assert (domain.usable, domain.id, domain.clique) == (Tri.UNKNOWN, "unknown", "unknown")
    assert domain.reason == "every device: the driver gives no fabric information"


@pytest.mark.parametrize("change", [{"clique": 8}, {"cluster_uuid": "1" * 32}])
def test_all_devices_of_a_tray_are_in_one_domain(change: dict[str, Any]) -> None:
    domain = fabric.judge(tray(**change), ["channel0"])
    assert domain.usable is Tri.NO
    assert "the devices of this tray are in different domains" in domain.reason


def test_two_racks_of_one_cluster_are_two_domains() -> None:
    here = fabric.judge([device(i) for i in range(4)], ["channel0"])
    there = fabric.judge([device(i, clique=8) for i in range(4)], ["channel0"])
    assert here.id == there.id
    assert (here.usable, there.usable) == (Tri.YES, Tri.YES)
    assert (here.id, here.clique) != (there.id, there.clique)


@pytest.mark.parametrize(
    ("mask", "summary", "complaints"),
    [
        (0xAA, 0, []),
        (0xAA, 1, []),
        (HEALTHY, 1, []),
        (0x00, 1, []),
        (0xA9, 0, ["its bandwidth is degraded"]),
        (0xA6, 0, ["its routes are being recovered"]),
        (0x9A, 0, ["a route is unhealthy"]),
        (0x6A, 0, ["it recovers from an access time-out"]),
        (0x55, 0, ["bandwidth", "recovered", "unhealthy", "time-out"]),
        (0x1AA, 0, []),
        (0x2AA, 0, ["system GUID"]),
        (0x5AA, 0, ["too few NVLinks"]),
        (0xFAA, 0, ["code 15"]),
        (0x10AA, 0, []),
        (0x20AA, 0, ["no fabric partition"]),
        (0xAA, 3, ["capacity limited"]),
    ],
)
def test_health_is_decoded_field_by_field(mask: int, summary: int, complaints: list[str]) -> None:
    terms = fabric.health_terms(mask, summary)
    if not complaints:
        assert [term.holds for term in terms] == [Tri.YES]
        return
    assert len(terms) == len(complaints)
    for term, words in zip(terms, complaints, strict=True):
        assert words in term.text
        assert term.holds is not Tri.YES


BLACKWELL = {"capability": [10, 0], "c2c": {"enabled": True}}
NAMED = {"name": "NVIDIA GB200"}


@pytest.mark.parametrize(
    ("host", "devices", "answer"),
    [
        ("aarch64", [BLACKWELL] * 4, Tri.YES),
        ("aarch64", [{**BLACKWELL, "capability": [10, 3]}] * 4, Tri.YES),
        ("aarch64", [BLACKWELL, {"capability": None}], Tri.YES),
        ("aarch64", [{**BLACKWELL, "c2c": None}] * 4, Tri.UNKNOWN),
        ("aarch64", [{**BLACKWELL, "c2c": {"enabled": False}}] * 4, Tri.NO),
        ("aarch64", [{**BLACKWELL, **NAMED, "capability": [9, 0]}], Tri.NO),
        ("aarch64", [{**BLACKWELL, "capability": [12, 1]}], Tri.NO),
        ("aarch64", [BLACKWELL, {**BLACKWELL, "capability": [9, 0]}], Tri.NO),
        ("aarch64", [{"capability": None, **NAMED}], Tri.NO),
        ("aarch64", [], Tri.NO),
        ("x86_64", [{**BLACKWELL, **NAMED}] * 8, Tri.NO),
    ],
)
def test_hardware_decides_and_no_name_does(host: str, devices: list[dict[str, Any]], answer: Tri) -> None:
    assert fabric.is_grace_blackwell(host, devices) is answer
