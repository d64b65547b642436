"""Processors of slots."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from vime.facts.inventory import Device, NodeInventory
from vime.facts.process import Parallel, RoleKind, RolePlacement, RoleRequest, Slot
from vime.platforms.cpu import affinity, process


def request(*, slots: int, cpus: int, mine: tuple[int, ...], shared_with: tuple[str, ...] = ()) -> RoleRequest:
    devices = tuple(Device(i, f"host:{i}", "slot", 1 << 30) for i in range(slots))
    node = NodeInventory("host", "cpu", "x86_64", devices, cpus, 1 << 34, virtual=True)
    placement = RolePlacement("actor", tuple(Slot(0, i) for i in mine))
    capabilities = process.CAPABILITIES
    return RoleRequest("actor", RoleKind.TRAINER, placement, (node,), capabilities, Parallel(), "float32", shared_with)


@pytest.mark.parametrize(
    ("slots", "cpus", "mine", "expected"),
    [(2, 2, (1,), (1,)), (2, 8, (1,), (4, 5, 6, 7)), (4, 8, (0, 2), (0, 1, 4, 5)), (1, 2, (0,), ()), (3, 2, (2,), ())],
)
def test_slots_divide_the_processors(slots: int, cpus: int, mine: tuple[int, ...], expected: tuple[int, ...]) -> None:
    assert affinity.share(request(slots=slots, cpus=cpus, mine=mine)) == expected


def test_time_shared_slots_are_not_bound() -> None:
    assert affinity.share(request(slots=2, cpus=2, mine=(0,), shared_with=("rollout",))) == ()


def test_the_rule_reaches_the_environment() -> None:
    rules = process.environment(request(slots=2, cpus=2, mine=(1,)))
    assert rules[affinity.VARIABLE].value == "1"
    assert affinity.VARIABLE not in process.environment(replace(request(slots=3, cpus=2, mine=(1,))))


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system has no processor affinity")
def test_binding_is_applied_once_and_inherited() -> None:
    allowed = sorted(os.sched_getaffinity(0))
    code = (
        "import os, subprocess, sys; from vime.platforms.cpu import affinity; affinity.bind(); affinity.bind();"
        "print(sorted(os.sched_getaffinity(0)), os.environ.get('VIME_HOST_CPUS'))"
    )
    env = {**os.environ, affinity.VARIABLE: f"{len(allowed) - 1},999"}
    done = subprocess.run([sys.executable, "-c", code], env=env, check=True, capture_output=True, text=True)
    assert done.stdout.strip() == f"{[allowed[-1]]} None"
