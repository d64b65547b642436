"""How vLLM is launched on NVIDIA GPUs, and what its sleep does there."""

from __future__ import annotations

from typing import Any

from vime.facts.memory import EngineSleep, Tag, TagSemantics
from vime.facts.process import EnvMode, EnvValue, RoleRequest, VllmDefaults

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""torch reads both names, the older one in every release."""

_ARGS: dict[str, Any] = {
    "enable_prompt_tokens_details": True,
    "disable_log_stats": True,
    "disable_uvicorn_access_log": True,
}
_ALONE = 0.9
"""Of a device that the engine has to itself. On a shared one the plan bounds the cache in bytes, from what is left there."""


def defaults(request: RoleRequest) -> VllmDefaults:
    """Arguments and environment below the user's own. The server is the one of the installed release."""
    alone = {} if request.shared_with else {"gpu_memory_utilization": _ALONE}
    return VllmDefaults(
        args={**_ARGS, **alone},
        env=_environment(),
        entry_points=("vime",),
        expected_platform="vllm.platforms.cuda.CudaPlatform",
    )


def _environment() -> dict[str, EnvValue]:
    return {
        "VLLM_SERVER_DEV_MODE": EnvValue("1", "pause, resume and weight updates are routes of this mode", EnvMode.REQUIRE),
        "VLLM_WORKER_MULTIPROC_METHOD": EnvValue("spawn", "a forked child cannot use a device that its parent has opened"),
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": EnvValue("3600", "idle control connections must outlive an evaluation"),
        "VLLM_NO_USAGE_STATS": EnvValue("1", "a training run reports nothing to third parties"),
        "HF_HUB_OFFLINE": EnvValue("1", "the model is a local folder; a name must not start a download"),
    }


_POOLED = "vLLM's sleep pool gives the device memory back"
_BESIDE = "communicators live outside the sleep pool: their buffers stay on the device"

RESIDENT = EngineSleep(
    level=0,
    tags={
        tag: TagSemantics(frees=False, preserves=True, why="the engine is only paused and keeps its devices")
        for tag in (Tag.ENGINE_WEIGHTS, Tag.KV, Tag.GRAPHS, Tag.COMMUNICATORS)
    },
    why="the engine keeps its memory beside the trainer's; its sleep pool would only cost start-up time",
)

ASLEEP = EngineSleep(
    level=2,
    backend="cumem",
    tags={
        Tag.ENGINE_WEIGHTS: TagSemantics(
            frees=True, preserves=False, why=f"{_POOLED}; the weights are dropped, and the update that follows sends them all"
        ),
        Tag.KV: TagSemantics(frees=True, preserves=False, why=f"{_POOLED}; cached prefixes of old weights have no use"),
        Tag.GRAPHS: TagSemantics(frees=False, preserves=True, why="captured graphs stay valid: addresses do not change"),
        Tag.COMMUNICATORS: TagSemantics(frees=False, preserves=True, why=_BESIDE),
    },
    args={"enable_sleep_mode": True},
    env={
        **{
            name: EnvValue(
                "expandable_segments", "the sleep pool cannot release memory in expandable segments", EnvMode.WITHOUT
            )
            for name in ALLOCATOR_VARIABLES
        },
        "NCCL_GRAPH_REGISTER": EnvValue("0", "buffers that captured graphs register pin pool memory, which then cannot leave"),
    },
    why="level 2 copies nothing to the host: the trainer has the newest weights, and every wake-up is followed by an update",
)


def sleep(request: RoleRequest) -> EngineSleep:
    """Level 2 where the devices are parked for the trainer, level 0 where the engine keeps them."""
    return ASLEEP if request.residency == "park" else RESIDENT
