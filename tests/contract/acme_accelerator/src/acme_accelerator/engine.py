"""How vLLM is launched: on its CPU platform, with vime's plugins and the one that mends vLLM on a host."""

from __future__ import annotations

from typing import Any

from vime.facts.process import EnvMode, EnvValue, RoleRequest, VllmDefaults

ARGS: dict[str, Any] = {
    "enforce_eager": True,
    "enable_prompt_tokens_details": True,
    "disable_log_stats": True,
    "disable_uvicorn_access_log": True,
    "block_size": 32,
    "kv_cache_memory_bytes": 64 * 2**20,
    "max_num_seqs": 256,
    "max_num_batched_tokens": 4096,
}
"""Below the user's `rollout.vllm` section, which wins."""

ENV = {
    "VLLM_SERVER_DEV_MODE": EnvValue("1", "pause, resume and weight updates are routes of this mode", EnvMode.REQUIRE),
    "VLLM_CPU_OMP_THREADS_BIND": EnvValue("nobind", "trainer and engine of one device compute on the same processors"),
    "VLLM_ENABLE_V1_MULTIPROCESSING": EnvValue("0", "keeps a single worker inside the engine core: one process less"),
    "HF_HUB_OFFLINE": EnvValue("1", "the model is a local folder; a name must not start a download"),
}


def defaults(request: RoleRequest) -> VllmDefaults:
    """`expected_platform` is what vLLM must resolve: it swallows the errors of plugins, and the engine then refuses."""
    return VllmDefaults(
        args=ARGS,
        env=ENV,
        entry_points=("vime", "vime_cpu"),
        expected_platform="vllm.platforms.cpu.CpuPlatform",
    )
