"""What a host can do and the environment of its processes."""

from __future__ import annotations

from vime.facts.capabilities import Capabilities
from vime.facts.process import EnvMode, EnvValue, RoleKind, RoleRequest
from vime.platforms.cpu import affinity

CAPABILITIES = Capabilities(
    device_type="cpu",
    dtypes=("float32", "bfloat16", "float16"),
    default_dtype="float32",
    collectives=("gloo",),
    deterministic=("trainer", "engine"),
    virtual_devices=True,
    engine_frees_memory=False,
    absent={
        "engine_frees_memory": "vLLM's host worker answers sleep and wake-up but keeps its weights and cache",
        "fp8_recipes": "neither trainer nor engine has scaled 8-bit kernels on a host",
        "ipc": "a host has no device memory to open; processes of one node share files in memory instead (host_shm)",
        "graphs": "there is no device graph to capture",
        "batch_invariant": "vLLM's batch-invariant kernels do not run on a host; with float32 repeats are bit-equal anyway",
    },
)


def environment(request: RoleRequest) -> dict[str, EnvValue]:
    """Environment rules for one process of a role."""
    threads = str(request.threads)
    rules = {
        "OMP_NUM_THREADS": EnvValue(threads, "the role's share of the host's processors"),
        "MKL_NUM_THREADS": EnvValue(threads, "the role's share of the host's processors"),
        "TOKENIZERS_PARALLELISM": EnvValue("false", "tokenizer threads do not survive the forks of engine and graders"),
    }
    if processors := affinity.share(request):
        rules[affinity.VARIABLE] = EnvValue(",".join(map(str, processors)), "every slot has processors of its own")
    if request.kind is RoleKind.ENGINE:
        rules["TORCHDYNAMO_DISABLE"] = EnvValue(
            "1", "the first log-prob request would compile kernels for many seconds and need a C++ compiler", EnvMode.REQUIRE
        )
        rules["VLLM_BATCH_INVARIANT"] = EnvValue("1", CAPABILITIES.absent["batch_invariant"], EnvMode.FORBID)
    else:
        rules["TORCHDYNAMO_DISABLE"] = EnvValue("1", "megatron-core's small fusions would be compiled by a C++ compiler")
    return rules
