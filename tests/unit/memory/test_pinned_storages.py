"""Parking on an accelerator, over a device that keeps a log of what it is told."""

import contextlib
import warnings
from types import SimpleNamespace

import psutil
import pytest
import torch

from vime.errors import MemoryStateError
from vime.facts.memory import Tag
from vime.memory.pinned import BlockPool, PinnedStorageMemory


class Stream:
    def __init__(self, device):
        self._device = device

    def wait_stream(self, other):
        self._device.log.append("wait")

    def synchronize(self):
        self._device.log.append("synchronize")


class Device:
    """Copies on its streams are done at once, which is one of the orders that an accelerator may choose."""

    def __init__(self):
        self.log = []

    def Stream(self):
        return Stream(self)

    def current_stream(self):
        return "current"

    @contextlib.contextmanager
    def stream(self, stream):
        yield

    def empty_cache(self):
        self.log.append("empty_cache")


class PaperMemory(PinnedStorageMemory):
    """On the host, with pageable blocks."""

    def load_device(self, device_type):
        return Device()

    def host_blocks(self, block_bytes):
        return BlockPool(block_bytes, page_locked=False)


@pytest.fixture
def parked():
    """Parameters as views of one buffer, and optimizer state of several storages; blocks of 1 KiB."""
    buffer = torch.arange(1000.0)
    tensors = {Tag.PARAMS: [buffer[:10], buffer[10:]], Tag.OPTIMIZER: [torch.full((n,), float(n)) for n in (3, 700, 1)]}
    memory = PaperMemory("paper", block_bytes=1024)
    for tag, own in tensors.items():
        memory.region(tag, lambda own=own: own)
    return memory, tensors


def contents(tensors):
    return {tag: [t.tolist() for t in own] for tag, own in tensors.items()}


def test_content_survives_and_blocks_are_used_again(parked):
    memory, tensors = parked
    before = contents(tensors)
    held = []
    for _ in range(3):
        memory.pause([Tag.OPTIMIZER])
        memory.pause([Tag.PARAMS])
        assert memory.device_bytes() == {Tag.PARAMS: 0, Tag.OPTIMIZER: 0}
        assert memory.host_bytes() == {Tag.PARAMS: 4000, Tag.OPTIMIZER: 2816}
        memory.resume([Tag.PARAMS])
        memory.resume([Tag.OPTIMIZER])
        assert contents(tensors) == before
        assert memory.host_bytes() == {Tag.PARAMS: 0, Tag.OPTIMIZER: 0}
        held.append(memory.held_bytes)
        tensors[Tag.PARAMS][1][0] += 1.0
        before = contents(tensors)
    # 4000 + 512 + 2816 bytes (small storages take 512) are more than 7 blocks of 1024 and no more than 8.
    assert held == [8 * 1024] * 3


def test_a_call_waits_once_and_frees_after_that(parked):
    memory, _ = parked
    memory.pause([Tag.OPTIMIZER, Tag.PARAMS])
    log = memory._device.log
    assert log == [*["wait"] * 4, "synchronize", "empty_cache"]
    log.clear()
    memory.resume([Tag.OPTIMIZER, Tag.PARAMS])
    assert log == [*["wait"] * 4, "synchronize"]


def test_discarded_content_comes_back_as_zeros_and_takes_no_block(parked):
    memory, tensors = parked
    memory.discard([Tag.OPTIMIZER])
    assert memory.held_bytes == 0
    memory.resume([Tag.OPTIMIZER])
    assert [t.tolist() for t in tensors[Tag.OPTIMIZER]] == [[0.0] * 3, [0.0] * 700, [0.0]]


def test_a_host_without_memory_leaves_everything_on_the_device(parked, monkeypatch):
    memory, tensors = parked
    before = contents(tensors)
    memory.pause([Tag.OPTIMIZER])
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=100))
    with pytest.raises(MemoryStateError, match=r"host has 100 bytes left, parking needs 1024 more"):
        memory.pause([Tag.PARAMS])
    assert memory.device_bytes()[Tag.PARAMS] == 4000
    memory.resume([Tag.OPTIMIZER])
    assert contents(tensors) == before
    monkeypatch.undo()
    memory.pause([Tag.PARAMS])
    memory.resume([Tag.PARAMS])
    assert contents(tensors) == before


def test_a_device_without_memory_keeps_everything_on_the_host(parked, monkeypatch):
    """The second storage finds no room; the first, already back, leaves again and nothing is lost."""
    memory, tensors = parked
    before = contents(tensors)
    memory.pause([Tag.OPTIMIZER])
    storages = [t.untyped_storage() for t in tensors[Tag.OPTIMIZER]]
    resize = torch.UntypedStorage.resize_

    def full(storage, nbytes):
        if nbytes and storage._cdata == storages[1]._cdata:
            raise torch.OutOfMemoryError("device is full")
        return resize(storage, nbytes)

    monkeypatch.setattr(torch.UntypedStorage, "resize_", full)
    with pytest.raises(MemoryStateError, match="cannot resume: device is full; everything is where it was"):
        memory.resume([Tag.OPTIMIZER])
    assert memory.device_bytes()[Tag.OPTIMIZER] == 0
    monkeypatch.undo()
    memory.resume([Tag.OPTIMIZER])
    assert contents(tensors) == before


@pytest.mark.skipif(torch.accelerator.is_available(), reason="memory can be page-locked here")
def test_without_page_locked_memory_pageable_memory_serves_with_one_warning():
    pool = BlockPool(512)
    with pytest.warns(UserWarning, match="pageable memory") as caught:
        pool.take(100)
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert pool.take(2000).nbytes() == 2000


def test_parcels_never_overlap_and_a_returned_block_is_found():
    pool = BlockPool(1024, page_locked=False)
    first, second = pool.take(1500), pool.take(600)
    for value, parcel in enumerate((first, second), 1):
        for piece in parcel.pieces:
            piece.fill_(value)
    assert {v for piece in first.pieces for v in piece.tolist()} == {1}
    assert {v for piece in second.pieces for v in piece.tolist()} == {2}
    assert pool.nbytes == 3 * 1024
    pool.give_back(first)
    assert pool.take(1024).nbytes() == 1024
    assert pool.nbytes == 3 * 1024
