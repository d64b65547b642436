"""How vLLM is launched on a host, and what its sleep does there."""

from __future__ import annotations

from typing import Any

from vime.facts.memory import EngineSleep, Tag, TagSemantics
from vime.facts.process import EnvMode, EnvValue, RoleRequest, VllmDefaults

LAUNCH = "vllm.entrypoints.launchers.api_server.entry"
"""The server's module: the `vllm` command of the host wheel looks up a distribution of another name and ends."""

ARGS: dict[str, Any] = {
    "enforce_eager": True,
    "enable_scale_out": True,
    "enable_prompt_tokens_details": True,
    "disable_log_stats": True,
    "disable_uvicorn_access_log": True,
    "block_size": 32,
    "kv_cache_memory_bytes": 64 * 2**20,
    "max_num_seqs": 256,
    "max_num_batched_tokens": 4096,
}
"""Eager with a small, fixed cache starts in seconds. Small blocks, because a short answer takes a whole one; a budget that
256 short prompts of one step do not exceed."""

_KEPT = "vLLM's host worker only pauses: nothing is freed, nothing is lost"

SLEEP = EngineSleep(
    level=0,
    tags={
        Tag.ENGINE_WEIGHTS: TagSemantics(frees=False, preserves=True, why=_KEPT),
        Tag.KV: TagSemantics(frees=False, preserves=True, why=_KEPT),
        Tag.GRAPHS: TagSemantics(frees=False, preserves=True, why="a host captures no graphs"),
    },
    why="vLLM refuses its sleep mode on a host; trainer and engine stay resident side by side",
)


def defaults(request: RoleRequest) -> VllmDefaults:
    """Arguments and environment below the user's own."""
    return VllmDefaults(
        args=ARGS,
        env=_environment(request),
        launch=LAUNCH,
        entry_points=("vime", "vime_cpu"),
        expected_platform="vllm.platforms.cpu.CpuPlatform",
    )


def _environment(request: RoleRequest) -> dict[str, EnvValue]:
    if request.parallel.tp * request.parallel.pp > 1:
        binding = "automatic binding wants a NUMA node for every tensor-parallel worker and fails on ordinary machines"
    else:
        binding = "automatic binding reserves a core and pins the rest; two processes on few cores are better left alone"
    return {
        "VLLM_SERVER_DEV_MODE": EnvValue("1", "pause, resume and weight updates are routes of this mode", EnvMode.REQUIRE),
        "VLLM_CPU_OMP_THREADS_BIND": EnvValue("nobind", binding),
        "VLLM_ENABLE_V1_MULTIPROCESSING": EnvValue("0", "keeps a single worker inside the engine core: one process less"),
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": EnvValue("3600", "idle control connections must outlive an evaluation"),
        "VLLM_MLA_DISABLE": EnvValue(
            "1", "a host's kernel for latent attention takes ranks of 512 and 64 alone, and neither shares nor splits prompts"
        ),
        "VLLM_NO_USAGE_STATS": EnvValue("1", "a training run reports nothing to third parties"),
        "HF_HUB_OFFLINE": EnvValue("1", "the model is a local folder; a name must not start a download"),
    }
