"""The trainer's side: runtime, layer pieces, process groups. Code is named here, never imported.

The A1 computes with CPU tensors, so megatron-core needs what it needs on a host. A plugin for real hardware names its own
kernels, or leaves the pieces out where megatron-core's serve.
"""

from __future__ import annotations

from acme_accelerator.process import MASK
from vime.facts.collectives import CollectiveSpec, GroupRequest
from vime.facts.model import ModelShape
from vime.facts.process import Factory, MegatronAdaptation, Override, RoleRequest, TrainerRuntime

_NO_KERNEL = "its fused kernel exists for other devices only"

OVERRIDES = {
    "use_cpu_initialization": Override(True, "weights drawn on the host are the same for every tensor-parallel size"),
    "gradient_accumulation_fusion": Override(False, "megatron-core refuses it without its compiled extension"),
    "apply_rope_fusion": Override(False, "megatron-core refuses it without Transformer Engine"),
    "masked_softmax_fusion": Override(False, _NO_KERNEL),
    "bias_activation_fusion": Override(False, "it needs a compiler at run time"),
    "bias_dropout_fusion": Override(False, "it needs a compiler at run time"),
    "persist_layer_norm": Override(False, _NO_KERNEL),
}
MOE_OVERRIDES = {"moe_permute_fusion": Override(False, _NO_KERNEL)}


def runtime(request: RoleRequest) -> TrainerRuntime:
    """The bootstrap, with everything that it must know of the node in its options: it asks no driver."""
    devices = request.inventories[0].devices
    options = {
        "threads": request.threads,
        "memory_bytes": min(device.memory_bytes for device in devices),
        "num_devices": len(devices),
        "mask": MASK,
    }
    bootstrap = Factory("acme_accelerator.runtime:AcmeRuntime", options)
    return TrainerRuntime(bootstrap, device_type="cpu", why="an A1 holds CPU tensors")


def adaptation(model: ModelShape) -> MegatronAdaptation:
    """Layer pieces and optimizer in plain torch, and the settings that the device rules out."""
    return MegatronAdaptation(
        norm=Factory("vime.trainer.megatron.attention:RmsNorm"),
        core_attention=Factory("vime.platforms.cpu.attention:HostCoreAttention"),
        optimizer=Factory("vime.platforms.cpu.fused_adam:HostFusedAdam"),
        overrides=OVERRIDES | MOE_OVERRIDES if model.experts else OVERRIDES,
    )


def collective(group: GroupRequest) -> CollectiveSpec:
    """gloo for every purpose. A trainer's peers may be busy for minutes, an engine's handshake may not."""
    return CollectiveSpec(
        backend="gloo",
        timeout_s=120.0 if group.purpose == "weight_sync" else 600.0,
        reduce_ops=("sum", "avg", "max", "min", "product"),
    )
