"""Device code, with HIP's part played by stand-ins that keep its rules."""

from __future__ import annotations

import json
import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vime.errors import TrainerError, WeightSyncError
from vime.memory.pinned import PinnedStorageMemory
from vime.trainer.runtime import BindsHost, BindsSockets
from vime_rocm.device_export import HipExporter
from vime_rocm.device_memory import RocmMemory
from vime_rocm.runtime import RocmRuntime

# ---- export


class Node:
    """Device memory of a node: what HIP keeps behind a handle."""

    def __init__(self) -> None:
        self.exported: dict[tuple[str, int], torch.UntypedStorage] = {}


class Process(HipExporter):
    """A process that sees some devices of a node, in an order of its own. HIP resolves the number in a handle here."""

    def __init__(self, node: Node, visible: list[str]) -> None:
        self._node, self._visible = node, visible
        self.opens = 0
        super().__init__()

    def load_device(self) -> Any:
        return SimpleNamespace(
            current_device=lambda: 0,
            device_count=lambda: len(self._visible),
            get_device_properties=lambda number: SimpleNamespace(uuid=self._visible[number]),
        )

    def empty(self, nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8)

    def share(self, storage: torch.UntypedStorage) -> tuple[Any, ...]:
        number = len(self._node.exported)
        self._node.exported[self._visible[0], number] = storage
        return 0, number.to_bytes(64, "little"), storage.nbytes(), 0, b"counter", 0, b"\x00event", True

    def rebuild(self, *values: Any) -> torch.UntypedStorage:
        device, handle = values[:2]
        self.opens += 1
        key = self._visible[device], int.from_bytes(handle, "little")
        if key not in self._node.exported:
            raise RuntimeError("hipErrorInvalidValue")
        return self._node.exported[key]


def test_both_sides_with_the_exporters_device_first_share_bytes() -> None:
    node = Node()
    trainer, engine = Process(node, ["b", "a", "c"]), Process(node, ["b", "c", "a"])
    assert trainer.identity() == engine.identity() != Process(node, ["a", "b", "c"]).identity()
    buffer = trainer.allocate(16)
    handle = json.loads(json.dumps(trainer.export(buffer)))
    opened = engine.open(handle)
    buffer.copy_(torch.arange(16, dtype=torch.uint8))
    assert opened.tolist() == list(range(16))
    assert engine.open(handle).data_ptr() == opened.data_ptr()
    assert engine.opens == 1


def test_a_part_of_a_storage_is_opened_as_that_part() -> None:
    node = Node()
    trainer, engine = Process(node, ["a"]), Process(node, ["a"])
    part = trainer.allocate(16)[4:8]
    opened = engine.open(trainer.export(part))
    part.fill_(7)
    assert opened.tolist() == [7, 7, 7, 7]


@pytest.mark.parametrize("visible", [["b", "a"], ["b"], []])
def test_another_device_under_the_number_is_refused(visible: list[str]) -> None:
    node = Node()
    trainer, engine = Process(node, ["a", "b"]), Process(node, visible)
    handle = trainer.export(trainer.allocate(4))
    with pytest.raises(WeightSyncError) as raised:
        engine.open(handle)
    assert "device a as its number 0" in raised.value.what
    assert "HIP_VISIBLE_DEVICES" in (raised.value.fix or "")
    assert engine.opens == 0


def test_what_hip_refuses_is_an_error_with_a_way_out() -> None:
    node = Node()
    trainer, engine = Process(node, ["a"]), Process(node, ["a"])
    handle = trainer.export(trainer.allocate(4))
    node.exported.clear()
    with pytest.raises(WeightSyncError, match="hipErrorInvalidValue"):
        engine.open(handle)


def test_memory_that_cannot_be_exported_is_not_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_HIP_ALLOC_CONF", "max_split_size_mb:128, expandable_segments:True")
    with pytest.raises(WeightSyncError, match="PYTORCH_HIP_ALLOC_CONF turns expandable segments on"):
        Process(Node(), ["a"]).allocate(4)
    monkeypatch.setenv("PYTORCH_HIP_ALLOC_CONF", "expandable_segments:False")
    assert Process(Node(), ["a"]).allocate(4).numel() == 4


# ---- runtime and memory


class Devices:
    """torch's module of a device, as far as a runtime looks at it."""

    def __init__(self, count: int) -> None:
        self._count = count
        self.current: int | None = None

    def is_available(self) -> bool:
        return self._count > 0

    def device_count(self) -> int:
        return self._count

    def set_device(self, index: int) -> None:
        self.current = index


class Runtime(RocmRuntime):
    def __init__(self, devices: Devices, hip: str | None = "7.0.5", **options: Any) -> None:
        self._devices, self._hip = devices, hip
        super().__init__(**options)

    def load_device(self) -> Any:
        return self._devices

    def hip_version(self) -> str | None:
        return self._hip


def test_a_ranks_device_is_the_first_that_it_sees() -> None:
    devices = Devices(8)
    Runtime(devices).set_device(0)
    assert devices.current == 0


@pytest.mark.parametrize(("node_device", "bound"), [(5, True), (4, False), (9, False)])
def test_a_rank_is_bound_to_the_processors_of_its_device_whatever_the_mask(
    node_device: int, bound: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[set[int]] = []
    one = min(os.sched_getaffinity(0))
    monkeypatch.setattr(os, "sched_setaffinity", lambda _pid, cpus: asked.append(set(cpus)))
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "5,0,1")
    runtime = Runtime(Devices(8), numa_cpus=((),) * 5 + ((one,),))
    assert isinstance(runtime, BindsHost)
    runtime.bind_host(node_device)
    assert asked == ([{one}] if bound else [])


@pytest.mark.parametrize(("chosen", "used"), [(None, "lo0"), ("eth1", "eth1")])
def test_rccl_stays_on_the_interface_it_is_given_unless_the_user_chose_one(
    monkeypatch: pytest.MonkeyPatch, chosen: str | None, used: str
) -> None:
    monkeypatch.setattr(os, "environ", {} if chosen is None else {"NCCL_SOCKET_IFNAME": chosen})
    runtime = object.__new__(RocmRuntime)
    assert isinstance(runtime, BindsSockets)
    runtime.bind_sockets("lo0")
    assert os.environ["NCCL_SOCKET_IFNAME"] == used


def test_another_torch_is_refused_before_its_devices_are_used() -> None:
    with pytest.raises(TrainerError, match="not built for HIP"):
        Runtime(Devices(8), hip=None)
    with pytest.raises(TrainerError, match="not built for HIP"):
        RocmRuntime()
    with pytest.raises(TrainerError, match="sees no cuda device"):
        Runtime(Devices(0))


def test_memory_parks_what_torch_calls_cuda() -> None:
    loaded: list[str] = []

    class Memory(RocmMemory):
        def load_device(self, device_type: str) -> Any:
            loaded.append(device_type)
            return SimpleNamespace()

    assert isinstance(Memory(block_bytes=4096), PinnedStorageMemory)
    assert loaded == ["cuda"]
