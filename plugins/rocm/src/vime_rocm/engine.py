"""How vLLM is launched here, and what its sleep does."""

from __future__ import annotations

from typing import Any

from vime.facts.memory import EngineSleep, Tag, TagSemantics
from vime.facts.process import EnvMode, EnvValue, RoleRequest, VllmDefaults
from vime_rocm import allocator

PLATFORM = "vllm.platforms.rocm.RocmPlatform"
CHUNK_VARIABLE = "VLLM_ROCM_SLEEP_MEM_CHUNK_SIZE"

_BEHIND_ROUTER: dict[str, Any] = {
    "enable_prompt_tokens_details": True,
    "disable_log_stats": True,
    "disable_uvicorn_access_log": True,
}
_PARKED_SHARE, _RESIDENT_SHARE = 0.6, 0.4
"""Of a shared device. A parked trainer leaves its context and RCCL's buffers behind, a resident one keeps everything."""

_GRAPHS = TagSemantics(frees=False, preserves=True, why="captured graphs keep their addresses and stay")


def defaults(request: RoleRequest) -> VllmDefaults:
    """Arguments and environment below the user's own."""
    args = dict(_BEHIND_ROUTER)
    if request.shared_with:
        args["gpu_memory_utilization"] = _PARKED_SHARE if request.residency == "park" else _RESIDENT_SHARE
    return VllmDefaults(
        args=args,
        env={
            "VLLM_SERVER_DEV_MODE": EnvValue("1", "pause, resume and weight updates are routes of this mode", EnvMode.REQUIRE),
            "VLLM_WORKER_MULTIPROC_METHOD": EnvValue("spawn", "a forked child cannot use a device that its parent has opened"),
            "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": EnvValue("3600", "idle control connections must outlive an evaluation"),
            "VLLM_NO_USAGE_STATS": EnvValue("1", "a training run reports nothing to third parties"),
            "HF_HUB_OFFLINE": EnvValue("1", "the model is a local folder; a name must not start a download"),
        },
        entry_points=("vime",),
        expected_platform=PLATFORM,
    )


def sleep(request: RoleRequest) -> EngineSleep:
    """Level 2 where the engine parks, a pause where it stays.

    Level 2 keeps no copy of the weights on the host: the next update sends all of them before the cache wakes.
    """
    if request.residency != "park":
        kept = TagSemantics(frees=False, preserves=True, why="the engine keeps its memory and is only paused")
        return EngineSleep(0, {Tag.ENGINE_WEIGHTS: kept, Tag.KV: kept, Tag.GRAPHS: _GRAPHS}, why=kept.why)
    zeroed = "woken memory is zeroed, because older drivers may hand back pages with somebody's content"
    segments = "segments that grow do not work with the pool that sleeps: memory would not come back"
    rules = {name: EnvValue(allocator.SEGMENTS, segments, EnvMode.WITHOUT) for name in allocator.VARIABLES}
    chunks = "MiB of one physical allocation: the sleep pool is mapped piece by piece, so that all of it can be given back"
    return EngineSleep(
        level=2,
        tags={
            Tag.ENGINE_WEIGHTS: TagSemantics(True, False, f"dropped, and sent anew by the next update; {zeroed}"),
            Tag.KV: TagSemantics(True, False, f"dropped; {zeroed}"),
            Tag.GRAPHS: _GRAPHS,
            Tag.COMMUNICATORS: TagSemantics(False, True, "RCCL's buffers are outside the pool that sleeps"),
        },
        backend="cumem",
        args={"enable_sleep_mode": True},
        env={**rules, CHUNK_VARIABLE: EnvValue("256", chunks)},
        why="weights need no copy on the host, since every turn of the engine begins with an update",
    )
