"""The stand-in that megatron-core sees, and that nobody else does."""

from __future__ import annotations

import sys
import types

import pytest
import torch

from vime.platforms.cpu import host_facade


@pytest.fixture
def megatron_module():
    """A module as megatron-core's loader would leave it."""
    host_facade.install()
    module = types.ModuleType("megatron.core.example")
    module.__dict__["torch"] = torch
    host_facade._adapt(module)
    exec(
        "def make(**k): return torch.zeros(2, **k)\n"
        "def name(t): return t.type()\n"
        "def move(t): return t.cuda(non_blocking=True)\n"
        "def device(): return torch.cuda.current_device()\n",
        module.__dict__,
    )
    return module


@pytest.mark.parametrize("device", ["cuda", "cuda:1", 0, torch.device("cuda", 1), "cpu"])
def test_factories_place_tensors_on_the_host(megatron_module, device):
    assert megatron_module.make(device=device, pin_memory=True).device.type == "cpu"


def test_megatron_sees_an_accelerator_and_everyone_else_a_host(megatron_module):
    tensor = torch.zeros(1)
    assert megatron_module.name(tensor) == "torch.cuda.FloatTensor"
    assert tensor.type() == "torch.FloatTensor"
    assert megatron_module.move(tensor) is tensor
    assert tensor.type(torch.float64).dtype == torch.float64
    if not torch.cuda.is_available():
        with pytest.raises((AssertionError, RuntimeError)):
            tensor.cuda()
        with pytest.raises((AssertionError, RuntimeError)):
            torch.zeros(1, device="cuda")


def test_the_device_is_the_host(megatron_module):
    stand_in = megatron_module.torch
    assert megatron_module.device() == torch.device("cpu")
    assert stand_in.device("cuda:3") == torch.device("cpu")
    assert stand_in.device("meta") == torch.device("meta")
    assert isinstance(torch.device("cpu"), stand_in.device)
    assert stand_in.Tensor is torch.Tensor
    assert not stand_in.cuda.is_available()


def test_device_random_state_is_the_hosts(megatron_module):
    device = megatron_module.torch.cuda
    device.manual_seed(5)
    state = device.get_rng_state()
    first = torch.rand(3)
    device.set_rng_state(state)
    assert torch.equal(torch.rand(3), first)


def test_streams_and_events_do_nothing_but_exist(megatron_module):
    device = megatron_module.torch.cuda
    with device.stream(device.Stream()):
        event = device.current_stream().record_event()
    assert event.query()
    with device.nvtx.range("x"):
        pass


def test_installing_twice_adds_one_finder():
    host_facade.install()
    host_facade.install()
    assert sum(isinstance(f, host_facade._Finder) for f in sys.meta_path) == 1


def test_other_packages_are_not_adapted():
    assert host_facade._Finder().find_spec("json", None) is None
    assert not host_facade._is_ours("megatron.corex")
