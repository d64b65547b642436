"""The trainer's side: runtime, layer pieces, process groups. Code is named here, never imported."""

from __future__ import annotations

from vime.facts.collectives import CollectiveSpec, GroupRequest
from vime.facts.inventory import NodeInventory, near_cpus
from vime.facts.model import ModelShape
from vime.facts.process import Factory, MegatronAdaptation, Override, RoleRequest, TrainerRuntime

_NO_KERNEL = "its fused kernel is compiled for another vendor's device"

OVERRIDES = {
    "gradient_accumulation_fusion": Override(False, "megatron-core refuses it without its compiled extension"),
    "apply_rope_fusion": Override(False, "megatron-core refuses it without Transformer Engine"),
    "masked_softmax_fusion": Override(False, _NO_KERNEL),
    "bias_activation_fusion": Override(False, "it is compiled by torch's inductor, whose output for this device is untried"),
    "bias_dropout_fusion": Override(False, "it is compiled by torch's inductor, whose output for this device is untried"),
    "persist_layer_norm": Override(False, _NO_KERNEL),
}
MOE_OVERRIDES = {"moe_permute_fusion": Override(False, "megatron-core takes this fusion from Transformer Engine")}

LIMITS = {
    "fp8": "there is no 8-bit float matmul before Ascend 950: fp8 settings are refused",
    "context parallel": "attention of packed sequences is not split over ranks: cp must be 1",
    "no fused Adam": "megatron-core uses torch's AdamW, which launches more kernels a step",
    "asynchronous checkpoint": "a persistent writer process would initialise the runtime a second time: async_save stays off",
    "MindSpeed newer than its megatron_adaptor": "its module for bootstrapping has moved: see vime_ascend.bootstrap",
}

COLLECTIVE_LIMITS = {
    "every communicator": "takes 2 x HCCL_BUFFSIZE of device memory, which torch's memory counters do not show",
    "two ranks of one group on one chip": "not possible: HCCL wants a chip for every rank of a communicator",
    "average": "not claimed: take the sum and divide",
    "engine asleep with sleep_mode_extra_cleanup": "vllm-ascend destroys the engine's groups and builds them anew on waking",
}


def runtime(request: RoleRequest) -> TrainerRuntime:
    """The factory that brings torch_npu and MindSpeed in before megatron-core."""
    options = {"threads": request.threads, "deterministic": request.deterministic, "numa_cpus": near_cpus(_nodes(request))}
    bootstrap = Factory("vime_ascend.runtime:NpuRuntime", options)
    return TrainerRuntime(bootstrap, device_type="npu", why="MindSpeed must change megatron-core before anything imports it")


def _nodes(request: RoleRequest) -> list[NodeInventory]:
    return [request.inventories[node] for node in sorted({slot.node for slot in request.placement.slots})]


def adaptation(model: ModelShape) -> MegatronAdaptation:
    """Layer pieces over torch_npu's kernels, and the settings that the hardware rules out."""
    return MegatronAdaptation(
        norm=Factory("vime.trainer.megatron.attention:RmsNorm"),
        core_attention=Factory("vime_ascend.attention:NpuCoreAttention"),
        overrides=OVERRIDES | MOE_OVERRIDES if model.experts else OVERRIDES,
        limits=LIMITS,
    )


def collective(group: GroupRequest) -> CollectiveSpec:
    """HCCL between chips, gloo between hosts. vLLM's platform class for this hardware names no backend, so vime does."""
    weights = group.purpose == "weight_sync"
    return CollectiveSpec(
        backend="hccl" if weights else "cpu:gloo,npu:hccl",
        timeout_s=300.0 if weights else 1800.0,
        reduce_ops=("sum", "max", "min", "product"),
        limits=COLLECTIVE_LIMITS,
    )
