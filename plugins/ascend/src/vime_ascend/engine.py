"""How vLLM is launched on this hardware, and what its sleep does there."""

from __future__ import annotations

from typing import Any

from vime.facts.memory import EngineSleep, Tag, TagSemantics
from vime.facts.process import EnvMode, EnvValue, RoleRequest, VllmDefaults

PLATFORM_PLUGIN = "ascend"
GENERAL_PLUGINS = ("ascend_kv_connector", "ascend_model_loader", "ascend_service_profiling", "ascend_model")
"""What vllm-ascend registers. VLLM_PLUGINS filters every group by name: without `ascend_kv_connector` its weight-transfer
engines are missing, without `ascend_model` its models."""

EXPECTED_PLATFORM = "vllm_ascend.platform.NPUPlatform"

ADDITIONAL_CONFIG: dict[str, Any] = {"weight_nz_mode": 0}
"""Keeps weights in ND layout: waking with another layout is refused. vllm-ascend's `rl_config` would set the same and the
routes that vime asks for itself, but it also takes `expandable_segments` out of the allocator's variable, where False has to
be said."""

ALLOCATOR = "PYTORCH_NPU_ALLOC_CONF"

_RELEASED = "vllm-ascend's allocator unmaps the memory"
_GRAPHS = "captured graphs stay; rl_config.sleep_mode_extra_cleanup would drop them and capture anew on waking"
_GROUPS = "HCCL groups and their buffers stay; rl_config.sleep_mode_extra_cleanup would destroy and rebuild them"
_LEVEL_1 = (
    "level 1 keeps a copy of the weights on the host. Level 2 would save it, but two faults of vllm-ascend are known there: "
    "expert weights transposed once on waking and once more on loading, and a stale dispatcher tensor under expert "
    "parallelism, which gives fluent wrong text. The request does not say whether the model has experts"
)


def defaults(request: RoleRequest) -> VllmDefaults:
    """Arguments and environment below the user's own. A user's `additional_config` replaces the one given here."""
    return VllmDefaults(
        args={"additional_config": ADDITIONAL_CONFIG, "enable_prompt_tokens_details": True, "disable_uvicorn_access_log": True},
        env={
            "VLLM_SERVER_DEV_MODE": EnvValue("1", "pause, resume and weight updates are routes of this mode", EnvMode.REQUIRE),
            "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": EnvValue("3600", "idle control connections must outlive an evaluation"),
            "VLLM_NO_USAGE_STATS": EnvValue("1", "a training run reports nothing to third parties"),
            "HF_HUB_OFFLINE": EnvValue("1", "the model is a local folder; a name must not start a download"),
        },
        entry_points=(PLATFORM_PLUGIN, *GENERAL_PLUGINS, "vime"),
        expected_platform=EXPECTED_PLATFORM,
    )


def sleep(request: RoleRequest) -> EngineSleep:
    """Level 1 where the engine has to leave its chips between turns; otherwise it is paused and nothing moves."""
    if request.residency != "park":
        kept = TagSemantics(frees=False, preserves=True, why="the engine does not leave its chips: it is paused only")
        return EngineSleep(0, dict.fromkeys((Tag.ENGINE_WEIGHTS, Tag.KV, Tag.GRAPHS, Tag.COMMUNICATORS), kept), why=kept.why)
    return EngineSleep(
        level=1,
        tags={
            Tag.ENGINE_WEIGHTS: TagSemantics(
                frees=True, preserves=True, why=f"{_RELEASED}; a copy is kept in pinned host memory"
            ),
            Tag.KV: TagSemantics(frees=True, preserves=False, why=f"{_RELEASED}; the cache's content is lost"),
            Tag.GRAPHS: TagSemantics(frees=False, preserves=True, why=_GRAPHS),
            Tag.COMMUNICATORS: TagSemantics(frees=False, preserves=True, why=_GROUPS),
        },
        # vllm-ascend's worker sleeps by its own allocator and ignores vLLM's choice of a backend.
        backend=None,
        args={"enable_sleep_mode": True},
        env={
            ALLOCATOR: EnvValue(
                "expandable_segments:False",
                "the sleeping engine's allocator refuses expandable segments; images switch them on, and leaving the option "
                "out or the variable empty leaves them on",
                EnvMode.OPTION,
            )
        },
        why=_LEVEL_1,
    )
