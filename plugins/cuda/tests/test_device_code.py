"""What runs in trainer and engine processes on a GPU, as far as it can be seen without one."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from vime.errors import TrainerError, WeightSyncError
from vime.memory.storages import StorageMemory
from vime.trainer.device_runtime import TorchDeviceRuntime
from vime.trainer.runtime import BindsSockets
from vime_cuda.device_export import (
    FIELDS,
    CudaExporter,
    from_json,
    ordinal_of,
    refuse_expandable,
    refuse_expandable_handle,
    to_json,
)
from vime_cuda.device_memory import DeviceMemory
from vime_cuda.fused_adam import FusedAdam
from vime_cuda.runtime import CudaRuntime, require_reproducible_workspace

# ---- Adam

OPTIONS = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8}


def walk(optimizer, params, steps=5):
    """Gradients that depend on the place, with one parameter left out of the second step."""
    for k in range(1, steps + 1):
        for index, param in enumerate(params):
            param.grad = None if (k, index) == (2, 1) else torch.sin(param.detach() * (k + index))
        optimizer.step()


def start():
    return [torch.linspace(-1, 1, n).reshape(shape).requires_grad_() for n, shape in ((7, (7,)), (12, (3, 4)), (1, ()))]


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("decoupled", [True, False])
def test_adam_takes_the_steps_of_torchs_own(decay, decoupled):
    """Every parameter in each step: a parameter without a gradient counts steps of its own in torch, of the group here."""
    ours, theirs = start(), start()
    plain = torch.optim.AdamW if decoupled else torch.optim.Adam
    a = FusedAdam(ours, weight_decay=decay, adam_w_mode=decoupled, **OPTIONS)
    b = plain(theirs, weight_decay=decay, foreach=False, **OPTIONS)
    for k in range(1, 6):
        for params in (ours, theirs):
            for index, param in enumerate(params):
                param.grad = torch.sin(param.detach() * (k + index))
        a.step()
        b.step()
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(a.state[mine]["exp_avg"], b.state[other]["exp_avg"], rtol=1e-6, atol=1e-8)
        torch.testing.assert_close(a.state[mine]["exp_avg_sq"], b.state[other]["exp_avg_sq"], rtol=1e-6, atol=1e-8)


def test_adam_keeps_the_layout_that_checkpoints_of_the_distributed_optimizer_know():
    params = start()
    optimizer = FusedAdam(params, **OPTIONS)
    walk(optimizer, params)
    assert optimizer.param_groups[0]["step"] == 5
    assert type(optimizer.param_groups[0]["step"]) is int
    for param in params:
        assert set(optimizer.state[param]) == {"exp_avg", "exp_avg_sq"}
        assert all(t.dtype == torch.float32 and t.shape == param.shape for t in optimizer.state[param].values())


def test_adam_goes_on_from_restored_state_bit_for_bit():
    one, two = start(), start()
    whole = FusedAdam(one, **OPTIONS)
    walk(whole, one, steps=4)
    half = FusedAdam(two, **OPTIONS)
    walk(half, two, steps=4)
    again = FusedAdam(two, **OPTIONS)
    again.load_state_dict(half.state_dict())
    for optimizer, params in ((whole, one), (again, two)):
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_adam_refuses_what_its_kernel_does_not_have():
    with pytest.raises(TrainerError, match="bias"):
        FusedAdam(start(), bias_correction=False)
    half = torch.ones(2, dtype=torch.bfloat16, requires_grad=True)
    half.grad = torch.ones_like(half)
    with pytest.raises(TrainerError, match=r"float32 tensors, got torch\.bfloat16"):
        FusedAdam([half]).step()


# ---- runtime


def test_a_process_without_a_gpu_is_told_so():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(TrainerError, match="sees no cuda device"):
        CudaRuntime()


@pytest.mark.parametrize(
    ("given", "kept"), [({}, ":4096:8"), ({"CUBLAS_WORKSPACE_CONFIG": ":16:8"}, ":16:8"), ({"OTHER": "1"}, ":4096:8")]
)
def test_determinism_needs_a_reproducible_workspace(given, kept):
    environment = dict(given)
    require_reproducible_workspace(environment)
    assert environment == {**given, "CUBLAS_WORKSPACE_CONFIG": kept}


def test_another_workspace_is_refused_not_replaced():
    environment = {"CUBLAS_WORKSPACE_CONFIG": ":0:0"}
    with pytest.raises(TrainerError, match="CUBLAS_WORKSPACE_CONFIG=:0:0"):
        require_reproducible_workspace(environment)
    assert environment == {"CUBLAS_WORKSPACE_CONFIG": ":0:0"}


PROCESS = """
import os, torch
from vime_cuda.runtime import CudaRuntime

class Device:
    def is_available(self):
        return True

class Runtime(CudaRuntime):
    def load_device(self):
        return Device()

for options in ({}, {"tf32": True}, {"deterministic": True}):
    Runtime(threads=1, **options)
    print(torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled(),
          os.environ.get("CUBLAS_WORKSPACE_CONFIG"), torch.get_num_threads())
"""


def test_precision_and_determinism_hold_for_the_process():
    """In a process of its own, since these settings stay."""
    environment = {k: v for k, v in os.environ.items() if k != "CUBLAS_WORKSPACE_CONFIG"}
    done = subprocess.run(
        [sys.executable, "-c", PROCESS], capture_output=True, text=True, check=False, timeout=60, env=environment
    )
    assert done.stdout.splitlines() == ["highest False None 1", "high False None 1", "highest True :4096:8 1"], done.stderr


def test_the_pieces_derive_from_the_neutral_ones():
    assert issubclass(CudaRuntime, TorchDeviceRuntime)
    assert issubclass(DeviceMemory, StorageMemory)


# ---- export

SHARED = (
    3,
    b"\x02c" + bytes(range(64)),
    4096,
    512,
    b"/torch_4242_1_0",
    7,
    bytes(range(200, 256)),
    True,
)
"""What `_share_cuda_` gave for a buffer on ordinal 3 of the exporter; the bytes are made up, their kinds are not."""


def test_a_handle_survives_json_and_takes_the_importers_ordinal():
    handle = json.loads(json.dumps(to_json(SHARED)))
    assert "device" not in handle
    assert from_json(handle, device=0) == [0, *SHARED[1:]]


def test_fields_that_torch_does_not_have_are_not_guessed():
    with pytest.raises(ValueError, match="zip"):
        to_json(SHARED[:-1])
    assert len(FIELDS) == len(SHARED)


def test_devices_are_found_by_uuid():
    assert ordinal_of("b", ["a", "b"]) == 1
    with pytest.raises(WeightSyncError, match="GPU c, which this engine worker does not see; it sees a, b"):
        ordinal_of("c", ["a", "b"])


@pytest.mark.parametrize("variable", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
@pytest.mark.parametrize(
    ("value", "is_refused"),
    [
        ("expandable_segments:True", True),
        ("max_split_size_mb:64, expandable_segments:true", True),
        ("expandable_segments:False", False),
        ("max_split_size_mb:64", False),
        ("", False),
    ],
)
def test_expandable_segments_are_refused_before_memory_is_taken(variable, value, is_refused):
    if is_refused:
        with pytest.raises(WeightSyncError, match=f"{variable} turns expandable segments on"):
            refuse_expandable({variable: value})
    else:
        refuse_expandable({variable: value})


def test_expandable_segments_are_refused_by_the_handle_too():
    refuse_expandable_handle(SHARED[1])
    refuse_expandable_handle(b"\x02e" + bytes(62))  # A bare handle of 64 bytes, where any byte may be anything.
    with pytest.raises(WeightSyncError, match="expandable segment"):
        refuse_expandable_handle(b"\x02e" + bytes(100))


def test_torch_still_has_the_calls():
    """By name: a release without them must show here and not on a GPU."""
    assert callable(torch.UntypedStorage._share_cuda_)
    assert callable(torch.UntypedStorage._new_shared_cuda)


def test_the_host_copy_falls_back_to_pageable_memory():
    if torch.cuda.is_available():
        pytest.skip("memory can be page-locked here")
    assert CudaExporter(name="vime-x").host(10).numel() == 10


@pytest.mark.parametrize(("chosen", "used"), [(None, "lo0"), ("eth1", "eth1")])
def test_nccl_stays_on_the_interface_it_is_given_unless_the_user_chose_one(monkeypatch, chosen, used):
    monkeypatch.setattr(os, "environ", {} if chosen is None else {"NCCL_SOCKET_IFNAME": chosen})
    runtime = object.__new__(CudaRuntime)
    assert isinstance(runtime, BindsSockets)
    runtime.bind_sockets("lo0")
    assert os.environ["NCCL_SOCKET_IFNAME"] == used
