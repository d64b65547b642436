"""The device's own code with the vendor's functions injected: the logic runs here, the vendor's calls have not run at all."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from vime.errors import MemoryStateError, TrainerError, WeightSyncError
from vime.facts.memory import Tag
from vime.trainer.runtime import BindsSockets
from vime_ascend import bootstrap, runtime
from vime_ascend.attention import NpuCoreAttention
from vime_ascend.device_export import FIELDS, NpuExporter, boot_id, from_json, to_json
from vime_ascend.device_memory import NpuMemory


class Device:
    """A device module over host memory that counts what it is asked."""

    def __init__(self, current: int = 0) -> None:
        self.calls: list[str] = []
        self._current = current

    def current_device(self) -> int:
        return self._current

    def synchronize(self) -> None:
        self.calls.append("synchronize")

    def empty_cache(self) -> None:
        self.calls.append("empty_cache")


# ---- bootstrap


class Packages:
    """Imports by name; MindSpeed's adaptor records the settings and the command line that it saw."""

    def __init__(self, missing: Sequence[str] = ()) -> None:
        self.imported: list[str] = []
        self.settings: list[dict[str, Any]] = []
        self.command_lines: list[list[str]] = []
        self._missing = missing

    def __call__(self, name: str) -> ModuleType:
        if name in self._missing:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        self.imported.append(name)
        self.command_lines.append(list(sys.argv))
        module: Any = ModuleType(name)
        if name == "mindspeed.megatron_adaptor" and "repatch" not in self._missing:
            module.repatch = self.settings.append
        return module


def test_the_order_is_torch_npu_then_mindspeed_then_its_settings() -> None:
    packages = Packages()
    done = bootstrap.run({"use_flash_attn": True}, importer=packages, loaded=["torch", "vime"])
    assert done == ("torch_npu", "mindspeed.megatron_adaptor", "mindspeed.megatron_adaptor.repatch")
    assert packages.imported == ["torch_npu", "mindspeed.megatron_adaptor", "mindspeed.megatron_adaptor"]
    assert packages.settings == [{"use_flash_attn": True}]


def test_every_step_says_why_and_what_to_do() -> None:
    assert all(step.why and step.fix for step in bootstrap.STEPS)


def test_mindspeed_sees_no_command_line_and_ours_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["worker.py", "--node-ip-address=10.0.0.1"])
    packages = Packages()
    bootstrap.run(importer=packages, loaded=[])
    assert packages.command_lines == [["worker.py"]] * 3
    assert sys.argv == ["worker.py", "--node-ip-address=10.0.0.1"]


@pytest.mark.parametrize("early", ["megatron", "megatron.core.parallel_state"])
def test_megatron_first_is_refused_before_anything_is_imported(early: str) -> None:
    packages = Packages()
    with pytest.raises(TrainerError, match=f"imported already .{early}") as caught:
        bootstrap.run(importer=packages, loaded=["torch", early])
    assert packages.imported == []
    assert caught.value.fix


def test_a_package_that_only_begins_like_megatron_is_no_hindrance() -> None:
    assert len(bootstrap.run(importer=Packages(), loaded=["megatron_bridge"])) == 3


@pytest.mark.parametrize(
    ("missing", "named"),
    [
        ("torch_npu", "torch_npu failed"),
        ("mindspeed.megatron_adaptor", "mindspeed.megatron_adaptor failed"),
        ("repatch", "mindspeed.megatron_adaptor.repatch failed"),
    ],
)
def test_a_step_that_fails_is_named_with_its_fix(missing: str, named: str) -> None:
    with pytest.raises(TrainerError, match=named) as caught:
        bootstrap.run(importer=Packages([missing]), loaded=[])
    assert caught.value.fix


def test_the_runtime_bootstraps_before_it_asks_torch_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    class Available:
        @staticmethod
        def is_available() -> bool:
            return True

    monkeypatch.setattr(bootstrap, "run", lambda: order.append("bootstrap"))
    monkeypatch.setattr(runtime.NpuRuntime, "load_device", lambda self: order.append(self.device_type) or Available)
    runtime.NpuRuntime(threads=torch.get_num_threads())
    assert order == ["bootstrap", "npu"]


@pytest.mark.parametrize(("chosen", "used"), [(None, "=lo"), ("eth1", "eth1")])
def test_hccl_stays_on_the_interface_it_is_given_unless_the_user_chose_one(
    monkeypatch: pytest.MonkeyPatch, chosen: str | None, used: str
) -> None:
    monkeypatch.setattr(os, "environ", {} if chosen is None else {"HCCL_SOCKET_IFNAME": chosen})
    made = object.__new__(runtime.NpuRuntime)
    assert isinstance(made, BindsSockets)
    made.bind_sockets("lo")
    assert os.environ["HCCL_SOCKET_IFNAME"] == used


# ---- memory


def memory_with(tensor: Tensor, *, pluggable: bool = False) -> tuple[NpuMemory, Device]:
    device = Device()
    memory = NpuMemory(pluggable, device=device, pin=False)
    memory.region(Tag.PARAMS, lambda: [tensor])
    return memory, device


def test_parking_waits_for_the_copies_and_gives_the_cache_back() -> None:
    tensor = torch.arange(6, dtype=torch.float32)
    memory, device = memory_with(tensor)
    memory.pause([Tag.PARAMS])
    assert device.calls == ["synchronize", "empty_cache"]
    assert memory.device_bytes()[Tag.PARAMS] == 0
    assert memory.host_bytes()[Tag.PARAMS] == 24
    memory.resume([Tag.PARAMS])
    assert tensor.tolist() == [0, 1, 2, 3, 4, 5]
    assert device.calls == ["synchronize", "empty_cache", "synchronize"]


def test_under_a_pluggable_allocator_the_cache_is_left_alone() -> None:
    memory, device = memory_with(torch.ones(3), pluggable=True)
    memory.pause([Tag.PARAMS])
    assert device.calls == ["synchronize"]


def test_discarded_memory_comes_back_as_zeros_and_wrong_transitions_change_nothing() -> None:
    tensor = torch.ones(3)
    memory, _ = memory_with(tensor)
    memory.discard([Tag.PARAMS])
    with pytest.raises(MemoryStateError):
        memory.pause([Tag.PARAMS])
    memory.resume([Tag.PARAMS])
    assert tensor.tolist() == [0, 0, 0]


# ---- sharing of device memory


class Sharing:
    """torch_npu's two functions over host memory of one process: handles are bytes, opening counts."""

    def __init__(self) -> None:
        self.storages: dict[bytes, torch.UntypedStorage] = {}
        self.opened: list[tuple[int, bytes]] = []

    def share(self, storage: torch.UntypedStorage) -> tuple[Any, ...]:
        handle = b"\x00\xffmemory-%d" % len(self.storages)
        self.storages[handle] = storage
        return (5, handle, storage.nbytes(), 0, b"counter\xfe", 8, b"", False)

    def rebuild(self, device: int, handle: bytes, size: int, offset: int, *rest: Any) -> torch.UntypedStorage:
        assert (size, offset, rest) == (self.storages[handle].nbytes(), 0, (b"counter\xfe", 8, b"", False))
        self.opened.append((device, handle))
        return self.storages[handle]


class HostExporter(NpuExporter):
    device_type = "cpu"


def exporter(sharing: Sharing, *, device: Device, node: str = "boot-1") -> NpuExporter:
    return HostExporter("vime-run", share=sharing.share, rebuild=sharing.rebuild, device=device, node=node)


def test_a_buffer_opens_on_the_readers_own_device_through_json() -> None:
    sharing, sender_device = Sharing(), Device(current=5)
    sender, reader = exporter(sharing, device=sender_device), exporter(sharing, device=Device(current=2))
    buffer = sender.allocate(16)
    buffer.copy_(torch.arange(16, dtype=torch.uint8))
    sender.synchronize()
    handle = json.loads(json.dumps(sender.export(buffer)))
    opened = reader.open(handle)
    assert opened.tolist() == list(range(16))
    assert sharing.opened == [(2, b"\x00\xffmemory-0")]
    assert sender_device.calls == ["synchronize"]
    buffer.fill_(7)
    assert opened.tolist() == [7] * 16


def test_processes_on_one_chip_know_it_by_one_name_whatever_they_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "6,7")
    first, second = (exporter(Sharing(), device=Device(current=n)).identity() for n in (0, 1))
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "7")
    assert exporter(Sharing(), device=Device(current=0)).identity() == second != first
    assert exporter(Sharing(), device=Device(current=0), node="boot-2").identity() != second
    monkeypatch.delenv("ASCEND_RT_VISIBLE_DEVICES")
    assert exporter(Sharing(), device=Device(current=7)).identity() == second


def test_a_handle_is_opened_once_until_the_half_closes() -> None:
    sharing = Sharing()
    sender, reader = exporter(sharing, device=Device()), exporter(sharing, device=Device())
    handle = sender.export(sender.allocate(4))
    reader.open(handle)
    reader.open(handle)
    assert len(sharing.opened) == 1
    reader.close()
    reader.open(handle)
    assert len(sharing.opened) == 2


def test_a_part_of_a_storage_opens_as_that_part() -> None:
    sharing = Sharing()
    sender, reader = exporter(sharing, device=Device()), exporter(sharing, device=Device())
    whole = torch.arange(10, dtype=torch.uint8)
    assert reader.open(sender.export(whole[4:7])).tolist() == [4, 5, 6]


def test_another_nodes_buffer_is_refused() -> None:
    sharing = Sharing()
    handle = exporter(sharing, device=Device()).export(torch.zeros(4, dtype=torch.uint8))
    with pytest.raises(WeightSyncError, match="of another node"):
        exporter(sharing, device=Device(), node="boot-2").open(handle)
    assert sharing.opened == []


def test_fields_travel_without_the_senders_device_and_an_unknown_form_is_refused() -> None:
    fields = (5, b"\x00\xff", 16, 0, b"c", 8, b"", False)
    assert dict(zip(FIELDS, from_json(to_json(fields)), strict=True)) == {
        **dict(zip(FIELDS, fields, strict=True)),
        "device": None,
    }
    with pytest.raises(WeightSyncError, match="as 7 fields, 8 are known"):
        to_json(fields[:-1])


def test_the_boot_id_is_the_same_for_every_process_of_a_node() -> None:
    assert boot_id() == boot_id() != ""


def test_the_exporter_without_the_vendors_package_says_which_is_missing() -> None:
    if importlib.util.find_spec("torch_npu"):
        pytest.skip("torch_npu is installed here")
    with pytest.raises(ImportError, match="torch_npu"):
        NpuExporter("vime-run")


# ---- attention


def reference(query: Tensor, key: Tensor, value: Tensor, heads: int, **told: Any) -> tuple[Tensor, ...]:
    """What the vendor documents of the fused kernel in layout TND with sparse mode 3, in plain torch."""
    assert (told["input_layout"], told["sparse_mode"], told["keep_prob"]) == ("TND", 3, 1.0)
    ends, mask = told["actual_seq_qlen"], told["atten_mask"]
    assert told["actual_seq_kvlen"] == ends
    assert mask.shape == (2048, 2048)
    assert heads == query.shape[1]
    outputs = []
    for start, end in itertools.pairwise([0, *ends]):
        length, groups = end - start, heads // key.shape[1]
        k, v = (x[start:end].repeat_interleave(groups, dim=1) for x in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query[start:end], k) * told["scale"]
        scores = scores.masked_fill(mask[:length, :length], float("-inf"))
        outputs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v))
    return torch.cat(outputs), torch.empty(0)


class ReferenceAttention(NpuCoreAttention):
    kernel = staticmethod(reference)


def attention(kind: Callable[..., NpuCoreAttention] = ReferenceAttention, *, cp: int = 1) -> NpuCoreAttention:
    return kind(SimpleNamespace(context_parallel_size=cp, kv_channels=4), 1, None, "self")


def test_attention_of_a_pack_is_that_of_its_segments_forward_and_backward() -> None:
    generator = torch.Generator().manual_seed(3)
    shape = (7, 4, 4), (7, 2, 4), (7, 2, 4)
    query, key, value = (torch.randn(s, generator=generator, dtype=torch.float64, requires_grad=True) for s in shape)
    packed = SimpleNamespace(cu_seqlens_q=torch.tensor([0, 3, 3, 7]))
    out = attention()(query, key, value, None, packed_seq_params=packed)
    assert out.shape == (7, 16)
    assert packed.segment_ends == [3, 7]

    expected = []
    for rows in (slice(0, 3), slice(3, 7)):
        q, k, v = (x[rows].transpose(0, 1).unsqueeze(0) for x in (query, key, value))
        one = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.5, enable_gqa=True)
        expected.append(one.squeeze(0).transpose(0, 1).reshape(-1, 16))
    whole = torch.cat(expected)
    torch.testing.assert_close(out, whole)
    weight = torch.randn(7, 16, generator=generator, dtype=torch.float64)
    mine = torch.autograd.grad((out * weight).sum(), (query, key, value))
    theirs = torch.autograd.grad((whole * weight).sum(), (query, key, value))
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b)


def test_layers_share_what_was_read_of_a_pack() -> None:
    packed = SimpleNamespace(cu_seqlens_q=torch.tensor([0, 2]))
    inputs = [torch.zeros(2, 1, 4) for _ in range(3)]
    attention()(*inputs, None, packed_seq_params=packed)
    ends, mask = packed.segment_ends, packed.causal_mask
    attention()(*inputs, None, packed_seq_params=packed)
    assert packed.segment_ends is ends
    assert packed.causal_mask is mask


def test_attention_refuses_split_and_unpacked_sequences() -> None:
    with pytest.raises(TrainerError, match="does not split"):
        attention(cp=2)
    with pytest.raises(TrainerError, match="packed sequences"):
        attention()(torch.zeros(2, 1, 4), torch.zeros(2, 1, 4), torch.zeros(2, 1, 4))
