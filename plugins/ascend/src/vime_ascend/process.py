"""What the chips can do, how their processes name them, and the environment of those processes."""

from __future__ import annotations

from vime.facts.bindings import RayBinding
from vime.facts.capabilities import Capabilities
from vime.facts.inventory import NodeInventory
from vime.facts.process import EnvMode, EnvValue, RoleKind, RoleRequest
from vime_ascend.chips import generation_of_device

VISIBLE = "ASCEND_RT_VISIBLE_DEVICES"
"""Lists a node's devices; torch counts from 0 within that list."""
NOSET = f"RAY_EXPERIMENTAL_NOSET_{VISIBLE}"

HCCL_BUFFER_MIB = 200
"""HCCL's own default. Every communicator takes two of them from the device's memory."""

CONNECT_TIMEOUT_S = 1800
EXEC_TIMEOUT_S = 3600

ABSENT = {
    "fp8_recipes": "Atlas A2 and A3 have no 8-bit float matmul; MXFP8 starts with Ascend 950",
    "deterministic": "HCCL and kernels can be asked for repeatable results, but nobody has compared two runs of vime here",
    "peer_copy": "no transport of vime writes into another chip's memory",
}


def capabilities(inventory: NodeInventory) -> Capabilities:
    """The same for both generations: what differs is in the inventory."""
    return Capabilities(
        device_type="npu",
        dtypes=("bfloat16", "float16", "float32"),
        default_dtype="bfloat16",
        ipc=("npu_storage",),
        collectives=("hccl", "gloo"),
        absent=ABSENT,
    )


def binding(inventory: NodeInventory) -> RayBinding:
    """Ray's names. A mask lists the node's logical ids; every process counts its own devices from 0."""
    generation = next((g for device in inventory.devices if (g := generation_of_device(device))), None)
    labels = {"ray.io/accelerator-type": generation.arch} if generation else {}
    if inventory.fabric is not None and inventory.vendor:
        labels["vime/super-pod"] = inventory.fabric.clique
    return RayBinding(resource="NPU", visible_env=(VISIBLE,), noset_env=(NOSET,), labels=labels, id_kind="index")


def environment(request: RoleRequest) -> dict[str, EnvValue]:
    """Environment rules of one process. What the user or the image sets wins, except where a run would be wrong."""
    rules = {
        "HCCL_CONNECT_TIMEOUT": EnvValue(
            str(CONNECT_TIMEOUT_S), "ranks that still load a model miss the default of 120 s (allowed: 120 to 7200)"
        ),
        "HCCL_EXEC_TIMEOUT": EnvValue(
            str(EXEC_TIMEOUT_S), "a rank that writes a checkpoint keeps the others waiting past the default of 1836 s"
        ),
        "HCCL_BUFFSIZE": EnvValue(
            str(HCCL_BUFFER_MIB),
            f"MiB; a communicator takes two of them ({2 * HCCL_BUFFER_MIB} MiB) of the device's memory, outside torch's sight",
        ),
        "CUDA_DEVICE_MAX_CONNECTIONS": EnvValue(
            "1", "megatron-core's tensor parallelism relies on the order of launches, under this name on every device"
        ),
        "TOKENIZERS_PARALLELISM": EnvValue("false", "tokenizer threads do not survive the forks of engine and graders"),
        "OMP_NUM_THREADS": EnvValue(str(request.threads), "the role's share of the host's processors"),
    }
    if request.deterministic:
        rules["HCCL_DETERMINISTIC"] = EnvValue("true", "the run asks for repeatable results: reductions keep one order")
    if request.shared_with:
        shared = f"{request.role} and {', '.join(request.shared_with)} use the same chips"
        rules["HCCL_HOST_SOCKET_PORT_RANGE"] = EnvValue("60000-60050", f"{shared}: each needs a listening port of its own")
        rules["HCCL_NPU_SOCKET_PORT_RANGE"] = EnvValue(
            "61000-61050", f"{shared}: on the chip's network, too, the single default port (16666) holds one process"
        )
    return rules | (_engine() if request.kind is RoleKind.ENGINE else _trainer())


def _trainer() -> dict[str, EnvValue]:
    return {"TASK_QUEUE_ENABLE": EnvValue("2", "two-stage dispatch hides the host's share of large training steps")}


def _engine() -> dict[str, EnvValue]:
    return {
        "TASK_QUEUE_ENABLE": EnvValue(
            "1", "decoding launches small kernels, for which one stage is quicker and captures graphs"
        ),
        "VLLM_ASCEND_ENABLE_NZ": EnvValue(
            "0",
            "updated weights arrive in ND layout: vllm-ascend refuses to wake or update weights that it keeps in FRACTAL_NZ",
            EnvMode.REQUIRE,
        ),
        "VLLM_WORKER_MULTIPROC_METHOD": EnvValue(
            "spawn", "a forked worker inherits a runtime that can be initialised once only"
        ),
    }
