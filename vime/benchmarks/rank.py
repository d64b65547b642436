"""One trainer rank on one device through a platform's own factories, without Ray."""

from __future__ import annotations

import gc
import json
import os
import resource
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vime.config.schema import OptimizerSection, SftSection, TrainerSection
from vime.facts.capabilities import Capabilities
from vime.facts.collectives import GroupRequest
from vime.facts.diagnosis import ProbeContext
from vime.facts.inventory import NodeInventory
from vime.facts.process import Parallel, RoleKind, RolePlacement, RoleRequest, Slot
from vime.models.registry import family_of
from vime.planning.env import merge_env
from vime.platforms.discovery import PluginPolicy, discover
from vime.platforms.lineage import Platform
from vime.trainer.setup import TrainerSetup


@dataclass(frozen=True)
class Asked:
    """A platform here and the request of a trainer rank on its first device."""

    platform: Platform
    inventory: NodeInventory
    capabilities: Capabilities
    request: RoleRequest


def ask_platform(name: str, *, dtype: str | None = None, threads: int = 1) -> Asked:
    """Discover a platform and this machine. Raises PluginError where either is not there."""
    platform = discover(PluginPolicy.read(platform=name)).platform(name)
    inventory = platform.inventory(ProbeContext(dict(os.environ)))
    capabilities = platform.capabilities(inventory)
    request = RoleRequest(
        role="actor",
        kind=RoleKind.TRAINER,
        placement=RolePlacement("actor", (Slot(0, 0),)),
        inventories=(inventory,),
        capabilities=capabilities,
        parallel=Parallel(),
        dtype=dtype or capabilities.default_dtype,
        shared_with=("rollout",),
        residency="park",
        software=inventory.software.get("trainer", {}),
        threads=threads,
    )
    return Asked(platform, inventory, capabilities, request)


def apply_environment(asked: Asked) -> dict[str, str]:
    """Put the platform's variables in place, which must happen before torch is loaded; returns them."""
    env, _ = merge_env([asked.platform.process_env(asked.request)], {}, process="trainer", inherited=os.environ)
    os.environ.update(env)
    return dict(env)


def rank_setup(asked: Asked, model: Path, *, tokens: int, chunk: int, megatron: Mapping[str, Any]) -> TrainerSetup:
    """A rank on its own: supervised rows, weights from nowhere, what can leave the device parked as the platform says."""
    shape = family_of(config := json.loads((model / "config.json").read_text())).shape(config)
    request, platform = asked.request, asked.platform
    return TrainerSetup(
        model_path=model,
        dtype=request.dtype,
        parallel=Parallel(),
        rank=0,
        world=1,
        local_rank=0,
        master_address="127.0.0.1",
        master_port=0,
        seed=1,
        num_steps=1000,
        temperature=1.0,
        algorithm=SftSection(),
        trainer=TrainerSection(
            optimizer=OptimizerSection(lr=1e-5),
            max_tokens_per_micro_batch=tokens,
            log_prob_chunk_tokens=chunk,
            megatron=dict(megatron),
        ),
        runtime=platform.trainer_runtime(request),
        adaptation=platform.megatron_adapt(request, shape),
        collective=platform.collective(request, GroupRequest("trainer", 1)),
        memory=platform.memory_backend(request),
        from_scratch_seed=7,
        node_device=0,
    )


def build_worker(setup: TrainerSetup, *, in_place: bool) -> Any:
    """A rank; `in_place` draws the weights on the device, which is faster than drawing billions on the host."""
    from vime.trainer.megatron.worker import MegatronWorker

    if not in_place:
        return MegatronWorker(setup)

    class InPlace(MegatronWorker):
        def _load_weights(self) -> None:
            for param in self._model.bare.parameters():
                if param.dim() > 1:
                    param.data.normal_(0.0, 0.02)
                else:
                    param.data.fill_(1.0)

    return InPlace(setup)


class Device:
    """What is asked of a device beside its runtime: peak memory, and how fast it multiplies."""

    def __init__(self, device_type: str) -> None:
        import torch

        self.type = device_type
        self.module: Any = None if device_type == "cpu" else torch.get_device_module(device_type)

    def synchronize(self) -> None:
        if self.module is not None:
            self.module.synchronize()

    def collect(self) -> None:
        """Give back what nothing refers to any more."""
        gc.collect()
        if self.module is not None:
            self.module.empty_cache()

    def forget_peak(self) -> None:
        if self.module is not None:
            self.module.reset_peak_memory_stats()

    def peak_bytes(self) -> int:
        """Of torch's tensors since `forget_peak`; on a host the largest resident size of the process."""
        if self.module is None:
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return self.module.max_memory_allocated()

    def allocated_bytes(self) -> int:
        return 0 if self.module is None else self.module.memory_allocated()

    def timed(self, work: Callable[[], Any]) -> float:
        """Seconds until the device is done."""
        self.synchronize()
        start = time.perf_counter()
        work()
        self.synchronize()
        return time.perf_counter() - start

    def product_tflops(self, dtype: Any, size: int) -> dict[str, Any]:
        """A square product of random matrices: 2 size^3 operations over the median of ten."""
        import torch

        a, b = (torch.randn(size, size, device=self.type).to(dtype) for _ in range(2))
        spans = [self.timed(lambda: a @ b) for _ in range(13)][3:]
        return {"size": size, "dtype": str(dtype), "tflops": 2 * size**3 / statistics.median(spans) / 1e12}
