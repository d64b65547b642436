"""The trainer's side of a host: runtime, layer pieces, process groups, memory. Code is named here, never imported."""

from __future__ import annotations

from vime.facts.collectives import CollectiveSpec, GroupRequest
from vime.facts.memory import MemoryBackend, Tag, TagSemantics
from vime.facts.model import ModelShape
from vime.facts.process import Factory, MegatronAdaptation, Override, RoleRequest, TrainerRuntime

_NO_KERNEL = "its fused kernel exists for accelerators only"
_PARKED = "the storages are emptied and their bytes kept aside: the slot is free, the machine holds them still"

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

MEMORY = MemoryBackend(
    factory=Factory("vime.memory.storages:StorageMemory"),
    tags={
        Tag.PARAMS: TagSemantics(frees=True, preserves=True, why=_PARKED),
        Tag.GRADS: TagSemantics(frees=True, preserves=True, why=_PARKED),
        Tag.OPTIMIZER: TagSemantics(frees=True, preserves=True, why=_PARKED),
        Tag.ACTIVATIONS: TagSemantics(frees=False, preserves=True, why="they are gone when the step ends"),
        Tag.COMMUNICATORS: TagSemantics(frees=False, preserves=True, why="host process groups hold sockets, no device memory"),
    },
    exclusions=("asynchronous checkpoints by a persistent writer, which may alias parked storages",),
)


def runtime(request: RoleRequest) -> TrainerRuntime:
    """The factory that makes megatron-core run on the host."""
    options = {"threads": request.threads, "deterministic": request.deterministic}
    bootstrap = Factory("vime.platforms.cpu.trainer_runtime:HostRuntime", options)
    return TrainerRuntime(bootstrap, device_type="cpu", why="megatron-core names an accelerator where it means its device")


def adaptation(model: ModelShape) -> MegatronAdaptation:
    """Layer pieces and optimizer in plain torch, and the settings that a host rules out."""
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
        limits={"process ends without destroying its groups": "the interpreter may abort at exit"},
    )
