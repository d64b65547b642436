"""What an A1 adds to a host: memory that leaves and comes back whole, bounds, a mask, a driver that can fail."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from acme_accelerator import doctor, driver, inventory, process
from acme_accelerator.parking import AcmeMemory, Parked
from acme_accelerator.runtime import AcmeRuntime
from acme_accelerator.testing import table
from vime.errors import MemoryStateError, PluginError
from vime.facts.diagnosis import DoctorContext
from vime.facts.memory import Tag
from vime.memory.storages import bytes_of


def parked(tensor: torch.Tensor) -> AcmeMemory:
    memory = AcmeMemory()
    memory.region(Tag.OPTIMIZER, lambda: [tensor])
    memory.pause([Tag.OPTIMIZER])
    return memory


def test_memory_is_free_while_it_is_parked_and_whole_afterwards() -> None:
    tensor = torch.arange(1000, dtype=torch.float32)
    memory = parked(tensor)
    assert tensor.untyped_storage().nbytes() == 0
    assert memory.host_bytes() == {Tag.OPTIMIZER: 4000}
    memory.resume([Tag.OPTIMIZER])
    assert torch.equal(tensor, torch.arange(1000, dtype=torch.float32))
    assert memory.host_bytes() == {Tag.OPTIMIZER: 0}


def test_bytes_that_change_while_parked_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[Parked] = []
    keep = AcmeMemory.keep
    monkeypatch.setattr(AcmeMemory, "keep", lambda self, storage: copies.append(keep(self, storage)) or copies[-1])
    memory = parked(torch.ones(100))
    bytes_of(copies[0].storage)[17] = 1
    with pytest.raises(MemoryStateError, match="400 parked bytes changed"):
        memory.resume([Tag.OPTIMIZER])


@pytest.mark.parametrize(
    ("mask", "allowed"), [(None, [0, 1]), ("0,1", [0, 1]), ("1,0", [0, 1]), ("1", [0, 1]), ("", [])], ids=str
)
def test_devices_that_the_node_has_not_or_the_mask_hides_cannot_be_chosen(
    mask: str | None, allowed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(process.MASK, raising=False)
    if mask is not None:
        monkeypatch.setenv(process.MASK, mask)
    runtime = AcmeRuntime(threads=1, memory_bytes=2**40, num_devices=2, mask=process.MASK)
    for index in allowed:
        runtime.set_device(index)
    for index in {-1, 0, 1, 2} - set(allowed):
        with pytest.raises(PluginError, match=f"device {index} of 2 was asked for"):
            runtime.set_device(index)


def test_memory_is_that_of_the_device_not_of_the_machine() -> None:
    memory = AcmeRuntime(threads=1, memory_bytes=2**40, num_devices=1, mask=process.MASK).memory()
    assert memory["total"] == 2**40
    assert memory["free"] == 2**40 - memory["allocated"] < 2**40


def facts(name: str) -> dict[str, object]:
    return inventory.read_machine({driver.TABLE_VARIABLE: str(table(name))})


def test_a_device_with_a_fault_is_listed_with_it_and_found_by_the_doctor() -> None:
    node = inventory.from_facts(facts("a1x2-fault"))
    assert [device.health for device in node.devices] == ["ok", "uncorrectable memory errors"]
    found = {check.id: check for check in doctor.checks(DoctorContext(node, {process.MASK: "0"}))}
    assert [str(found[f"acme.{name}"].severity) for name in ("driver", "devices", "mask")] == ["ok", "error", "warning"]
    assert "ACME-A1-0004" in found["acme.devices"].finding


@pytest.mark.parametrize(("version", "severity"), [("3.0", "ok"), ("10.1", "ok"), ("2.9", "error"), ("next", "error")])
def test_driver_versions_are_compared_as_versions(version: str, severity: str, tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.write_text(json.dumps({"driver": version, "devices": []}))
    node = inventory.from_facts(inventory.read_machine({driver.TABLE_VARIABLE: str(path)}))
    checks = {check.id: check for check in doctor.checks(DoctorContext(node, {}))}
    assert str(checks["acme.driver"].severity) == severity


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({}, "has no ACME driver"),
        ({driver.TABLE_VARIABLE: str(table("broken"))}, "holds no device table: KeyError"),
        ({driver.TABLE_VARIABLE: os.devnull + "/x"}, "cannot open"),
    ],
)
def test_a_driver_that_cannot_be_read_says_why(env: dict[str, str], words: str) -> None:
    with pytest.raises(PluginError, match=words):
        inventory.read_machine(env)
