"""The accelerator's runtime over a device that keeps its own books."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from vime.errors import TrainerError
from vime.trainer.device_runtime import TorchDeviceRuntime, bind_numa


class Device:
    """What torch offers of a device type: as many devices as asked for, each with a generator and an allocator."""

    def __init__(self, count):
        self.generators = [torch.Generator() for _ in range(count)]
        self.current = 0
        self.cached = 70

    def is_available(self):
        return bool(self.generators)

    def device_count(self):
        return len(self.generators)

    def set_device(self, index):
        assert index < len(self.generators)
        self.current = index

    def manual_seed_all(self, seed):
        for generator in self.generators:
            generator.manual_seed(seed)

    def get_rng_state(self):
        return self.generators[self.current].get_state()

    def set_rng_state(self, state):
        self.generators[self.current].set_state(state)

    def mem_get_info(self):
        return 1000 - 30 - self.cached, 1000

    def memory_allocated(self):
        return 30

    def memory_reserved(self):
        return 30 + self.cached

    def empty_cache(self):
        self.cached = 0

    def draw(self):
        return torch.rand(2, generator=self.generators[self.current]).tolist()


def runtime_over(device, **options):
    class Runtime(TorchDeviceRuntime):
        def load_device(self):
            return device

    return Runtime("paper", **options)


@pytest.mark.parametrize(("visible", "local_index", "used"), [(4, 2, 2), (4, 0, 0), (1, 0, 0), (1, 3, 0)])
def test_a_process_that_sees_one_device_alone_uses_that_one(visible, local_index, used):
    device = Device(visible)
    runtime_over(device).set_device(local_index)
    assert device.current == used


def test_a_device_that_the_process_does_not_see_is_an_error():
    with pytest.raises(TrainerError, match="sees 2 devices and is to use number 2"):
        runtime_over(Device(2)).set_device(2)
    with pytest.raises(TrainerError, match="sees no paper device"):
        runtime_over(Device(0))
    with pytest.raises(TrainerError, match="knows no device type paper"):
        TorchDeviceRuntime("paper")


def test_every_device_is_seeded_and_the_current_ones_state_is_kept():
    device = Device(2)
    runtime = runtime_over(device)
    runtime.seed(5)
    runtime.set_device(1)
    state = runtime.rng_state()
    first = device.draw()
    runtime.set_rng_state(state)
    assert device.draw() == first
    device.current = 0
    assert device.draw() == first


def test_memory_is_told_in_bytes_and_the_cache_can_be_emptied():
    runtime = runtime_over(Device(1))
    assert runtime.memory() == {"allocated": 30, "reserved": 100, "free": 900, "total": 1000}
    runtime.empty_cache()
    assert runtime.memory() == {"allocated": 30, "reserved": 30, "free": 970, "total": 1000}


def in_a_process(code):
    """Affinity stays with a process, so it is set in one of its own."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60, cwd=Path(__file__).parents[3]
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one processor alone leaves nothing to choose")
def test_the_process_is_bound_to_the_processors_next_to_its_device():
    """By the device's place on the node: a process that is shown one device counts it as number 0."""
    low, high, *_ = sorted(os.sched_getaffinity(0))
    code = f"""
import os
from tests.unit.trainer.test_device_runtime import Device, runtime_over
runtime = runtime_over(Device(1), numa_cpus=[[{low}], [{high}, 100000]])
runtime.set_device(0)
print(len(os.sched_getaffinity(0)) > 1)
runtime.bind_host(1)
print(*os.sched_getaffinity(0))
"""
    assert in_a_process(code) == ["True", str(high)]


def test_processors_that_a_container_does_not_have_change_nothing():
    before = os.sched_getaffinity(0)
    assert bind_numa([100000]) == tuple(sorted(before))
    assert os.sched_getaffinity(0) == before
