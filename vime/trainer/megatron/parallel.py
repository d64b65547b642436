"""Process group, parallel axes and random state of a trainer rank."""

from __future__ import annotations

import ipaddress
import os
import random
from dataclasses import dataclass
from datetime import timedelta
from types import ModuleType
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from vime.errors import TrainerError
from vime.trainer.runtime import BindsSockets, DeviceRuntime
from vime.trainer.setup import TrainerSetup
from vime.weights.hosts import own_address


@dataclass(frozen=True)
class Axes:
    """This rank's place in the mesh and the process groups of its axes.

    Inside a pipeline stage the ranks are laid out twice: as tp x cp x dp for dense parameters, and as etp x ep x what is left
    for experts, each axis before it varying faster. Ranks of one context-parallel group hold parts of the same sequences and
    compute the same loss, so whatever is summed over samples is summed over `dp_group`, which leaves them out.
    """

    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    dp_rank: int
    dp_size: int
    cp_rank: int
    cp_size: int
    vpp_size: int
    tp_group: Any
    pp_group: Any
    dp_group: Any
    cp_group: Any
    ep_rank: int
    ep_size: int
    etp_rank: int
    etp_size: int
    ep_group: Any
    etp_group: Any

    @property
    def is_first_stage(self) -> bool:
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.pp_size - 1

    @property
    def is_writer(self) -> bool:
        """One rank of each pipeline stage speaks for its weights."""
        return self.tp_rank == 0 and self.dp_rank == 0 and self.cp_rank == 0

    @property
    def last_stage_rank(self) -> int:
        """Global rank of this pipeline's last stage."""
        return dist.get_process_group_ranks(self.pp_group)[-1]


def check_parallel(setup: TrainerSetup) -> None:
    """Raise TrainerError when the axes do not make up the world or are not supported."""
    parallel = setup.parallel
    if parallel.devices != setup.world:
        raise TrainerError(
            f"tp {parallel.tp} x pp {parallel.pp} x cp {parallel.cp} x dp {parallel.dp} is {parallel.devices}, "
            f"but the role has {setup.world} ranks",
            fix="make the product of the axes equal to the number of devices",
        )
    if parallel.vpp > 1 and parallel.pp == 1:
        raise TrainerError(f"vpp {parallel.vpp} cuts pipeline stages, but pp is 1", fix="remove vpp, or use pp 2 or more")
    stage, experts = parallel.tp * parallel.cp * parallel.dp, parallel.ep * parallel.etp
    if stage % experts:
        raise TrainerError(
            f"ep {parallel.ep} x etp {parallel.etp} is {experts}, which does not divide tp {parallel.tp} x cp {parallel.cp} x "
            f"dp {parallel.dp} = {stage} ranks of a pipeline stage",
            fix=f"choose ep and etp whose product divides {stage}",
        )
    if parallel.etp > 1 and (parallel.ep > 1 or parallel.etp != parallel.tp):
        raise TrainerError(
            f"etp {parallel.etp} with ep {parallel.ep} and tp {parallel.tp}: the ranks of an expert would gather unequal "
            "numbers of tokens, which not every collective backend can",
            fix="set etp to 1, or etp to tp and ep to 1",
        )


def start_process_group(setup: TrainerSetup, runtime: DeviceRuntime) -> None:
    """Join the role's process group. A world of one needs no port.

    The group is not bound to the device: a bound one makes the communicators of all of megatron-core's groups at once, with
    their buffers on the device, instead of those that are used. Raises TrainerError for a backend that cannot reduce what
    lies on the host.
    """
    timeout = timedelta(seconds=setup.collective.timeout_s)
    _choose_interface("127.0.0.1" if setup.world == 1 else setup.master_address, runtime)
    if setup.world == 1:
        dist.init_process_group(setup.collective.backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)
    else:
        dist.init_process_group(
            setup.collective.backend,
            init_method=f"tcp://{_bracketed(setup.master_address)}:{setup.master_port}",
            rank=setup.rank,
            world_size=setup.world,
            timeout=timeout,
        )
    devices = {str(device) for device in dist.group.WORLD._device_types} if dist.group.WORLD else set()
    if "cpu" not in devices:
        dist.destroy_process_group()
        raise TrainerError(
            f"the trainer's collective backend {setup.collective.backend} does not take host tensors",
            fix="name a host backend beside the device's in vime_collective, as in cpu:gloo,DEVICE:BACKEND",
        )


def start_model_parallel(setup: TrainerSetup) -> Axes:
    """Create the groups of every axis and read this rank's place."""
    from megatron.core import parallel_state

    parallel = setup.parallel
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tp,
        pipeline_model_parallel_size=parallel.pp,
        virtual_pipeline_model_parallel_size=parallel.vpp if parallel.vpp > 1 else None,
        context_parallel_size=parallel.cp,
        expert_model_parallel_size=parallel.ep,
        expert_tensor_parallel_size=parallel.etp,
        distributed_timeout_minutes=max(1, round(setup.collective.timeout_s / 60)),
    )
    etp_group: Any = parallel_state.get_expert_tensor_parallel_group()
    return Axes(
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        tp_size=parallel.tp,
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        pp_size=parallel.pp,
        dp_rank=parallel_state.get_data_parallel_rank(),
        dp_size=parallel.dp,
        cp_rank=parallel_state.get_context_parallel_rank(),
        cp_size=parallel.cp,
        vpp_size=parallel.vpp,
        tp_group=parallel_state.get_tensor_model_parallel_group(),
        pp_group=parallel_state.get_pipeline_model_parallel_group(),
        dp_group=parallel_state.get_data_parallel_group(),
        cp_group=parallel_state.get_context_parallel_group(),
        ep_rank=parallel_state.get_expert_model_parallel_rank(),
        ep_size=parallel.ep,
        etp_rank=etp_group.rank(),
        etp_size=parallel.etp,
        ep_group=parallel_state.get_expert_model_parallel_group(),
        etp_group=etp_group,
    )


def stop_process_group() -> None:
    """Leave every group; a process that ends without it may abort."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


def seed_everything(seed: int, runtime: DeviceRuntime) -> None:
    """Seed Python, torch, the device and megatron-core's trackers."""
    random.seed(seed)
    torch.manual_seed(seed)
    runtime.seed(seed)
    _named(_random_module(), "model_parallel_", "_manual_seed")(seed)


def random_state(runtime: DeviceRuntime) -> dict[str, Any]:
    """Every generator of this rank; picklable."""
    return {
        "python": random.getstate(),
        "torch": torch.get_rng_state(),
        "device": runtime.rng_state(),
        "trackers": _tracker().get_states(),
    }


def set_random_state(state: dict[str, Any], runtime: DeviceRuntime) -> None:
    """Inverse of `random_state`."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    runtime.set_rng_state(state["device"])
    _tracker().set_states(state["trackers"])


def _random_module() -> ModuleType:
    from megatron.core.tensor_parallel import random as module

    return module


def _named(module: ModuleType, prefix: str, suffix: str) -> Any:
    """The function whose middle part names the accelerator that megatron-core was written for."""
    for name, value in vars(module).items():
        if name.startswith(prefix) and name.endswith(suffix) and callable(value):
            return value
    raise TrainerError(f"{module.__name__} has no {prefix}*{suffix}", fix="install a supported megatron-core (0.16 to 0.19)")


def _tracker() -> Any:
    return _named(_random_module(), "get_", "_rng_tracker")()


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address and not address.startswith("[") else address


def _choose_interface(address: str, runtime: DeviceRuntime) -> None:
    """Host collectives go by the interface that leads to the first rank; those of a single machine stay off its network."""
    own = own_address(address)
    try:
        loopback = ipaddress.ip_address(own.strip("[]")).is_loopback
    except ValueError:
        return
    for interface, addresses in psutil.net_if_addrs().items():
        if any(a.address == own or (loopback and a.address == "127.0.0.1") for a in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
            if loopback and isinstance(runtime, BindsSockets):
                runtime.bind_sockets(interface)
