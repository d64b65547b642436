"""The collective transport over backends that register themselves with torch.distributed."""

import threading

import pytest
import torch
import torch.distributed as dist

from vime.errors import WeightSyncError
from vime.weights.manifest import build_manifest
from vime.weights.transports.collective import CollectiveEngine, CollectiveTrainer

calls = []


def plain(store, rank, size, timeout):
    calls.append(("plain", rank, size))
    return dist.ProcessGroupGloo(store, rank, size, timeout)


def extended(options, backend_options):
    calls.append(("extended", options.group_rank, options.group_size))
    assert backend_options is None
    return dist.ProcessGroupGloo(options.store, options.group_rank, options.group_size, options.timeout)


@pytest.fixture(autouse=True)
def backends():
    calls.clear()
    for name, creator, is_extended in (("vimeplain", plain, False), ("vimeextended", extended, True)):
        if name not in dist.Backend.backend_list:
            dist.Backend.register_backend(name, creator, extended_api=is_extended, devices=["cpu"])


def make_half(**options):
    weights = {"a": torch.arange(6.0), "b": torch.arange(4).bfloat16()}
    manifest = build_manifest((name, str(t.dtype).removeprefix("torch."), t.shape) for name, t in weights.items())
    return weights, CollectiveTrainer(manifest=manifest, bucket_bytes=10, timeout_s=20, **options)


@pytest.mark.parametrize("backend", ["plain", "extended"])
def test_a_registered_backend_carries_the_weights_beside_the_default_group(backend):
    weights, half = make_half(backend=f"vime{backend}", device="cpu")
    offer = half.init_info(1)
    received = {}

    def work():
        engine = CollectiveEngine()
        engine.connect({**offer["info"], "manifest": offer["manifest"], "rank_offset": 0, "worker_rank": 0})
        received.update(engine.receive({}))

    thread = threading.Thread(target=work)
    thread.start()
    half.connect()
    half.stream(weights.items())
    thread.join(20)
    assert received.keys() == weights.keys()
    assert all(torch.equal(received[name], weights[name]) for name in weights)
    assert sorted(calls) == [(backend, 0, 2), (backend, 1, 2)]
    assert not dist.is_initialized()
    half.close()


def test_the_engines_learn_backend_and_device_from_the_trainer():
    _, half = make_half(backend="vimeplain", device="cpu")
    info = half.init_info(1)["info"]
    assert (info["backend"], info["device"]) == ("vimeplain", "cpu")
    _, default = make_half()
    info = default.init_info(1)["info"]
    assert (info["backend"], info["device"]) == ("gloo", "cpu")


def test_a_backend_that_this_torch_lacks_is_named():
    _, half = make_half(backend="carrier")
    half.init_info(0)
    with pytest.raises(WeightSyncError, match="no backend carrier"):
        half.connect()
