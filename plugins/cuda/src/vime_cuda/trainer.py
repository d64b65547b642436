"""The trainer's side: runtime, layer pieces, optimizer. Code is named here, never imported."""

from __future__ import annotations

from vime.facts.inventory import NodeInventory
from vime.facts.model import ModelShape
from vime.facts.process import Factory, MegatronAdaptation, Override, RoleRequest, TrainerRuntime
from vime_cuda.inventory import oldest_arch
from vime_cuda.process import fp8_recipes

TRANSFORMER_ENGINE = "transformer-engine"

_EXTENSION = "megatron-core refuses it without apex's or Transformer Engine's compiled extension"
_NEEDS_TE = "megatron-core refuses it without Transformer Engine"

OVERRIDES = {
    "gradient_accumulation_fusion": Override(False, _EXTENSION),
    "apply_rope_fusion": Override(False, _NEEDS_TE),
    "masked_softmax_fusion": Override(False, "packed attention has its own softmax, and the fused one is a compiled extension"),
    "persist_layer_norm": Override(False, "its kernel is apex's"),
}
"""Off where Transformer Engine is absent."""

MOE_OVERRIDES = {
    "moe_permute_fusion": Override(False, _NEEDS_TE),
    "moe_router_fusion": Override(False, _NEEDS_TE),
}

_LIMITS = {
    "asynchronous checkpoints": "off: a background writer would read device storages that parking may have emptied",
    "context parallelism without Transformer Engine": "refused: packed attention does not split sequences",
}


def runtime(request: RoleRequest) -> TrainerRuntime:
    """The factory that prepares torch's device for megatron-core."""
    options = {
        "threads": request.threads,
        "deterministic": request.deterministic,
        "numa_cpus": near_cpus(request.inventories),
    }
    why = "chooses the device, its generators and its arithmetic settings before megatron-core is imported"
    return TrainerRuntime(Factory("vime_cuda.runtime:CudaRuntime", options), device_type="cuda", why=why)


def near_cpus(inventories: tuple[NodeInventory, ...]) -> tuple[tuple[int, ...], ...]:
    """For each device of a node, in NVML's order, the processors of its memory node, so that pinned memory lies next to it.

    Empty where there is one memory node, a device's is unknown, or the role's nodes differ: the runtime has one answer for
    all of them.
    """
    layouts = {tuple(_cpus_of(node, device.numa_node) for device in node.devices) for node in inventories}
    layout = layouts.pop() if len(layouts) == 1 else ()
    populated = max((sum(1 for home in node.numa if home.cpus) for node in inventories), default=0)
    return layout if populated > 1 and all(layout) else ()


def _cpus_of(node: NodeInventory, index: int | None) -> tuple[int, ...]:
    return next((home.cpus for home in node.numa if home.index == index), ())


def adaptation(request: RoleRequest, model: ModelShape) -> MegatronAdaptation:
    """Transformer Engine's pieces where it is installed, else plain torch ones and torch's fused Adam."""
    arch = oldest_arch(device for node in request.inventories for device in node.devices)
    recipe = next(iter(fp8_recipes(arch)), None)
    if TRANSFORMER_ENGINE in request.software:
        return MegatronAdaptation(transformer_engine=True, fp8_recipe=recipe, async_save=False, limits=_LIMITS)
    limits = dict(_LIMITS)
    if recipe is not None:
        limits["fp8 training without Transformer Engine"] = "impossible: megatron-core has no other scaled 8-bit layers"
    return MegatronAdaptation(
        norm=Factory("vime.trainer.megatron.attention:RmsNorm"),
        core_attention=Factory("vime.trainer.megatron.varlen:VarlenCoreAttention"),
        optimizer=Factory("vime_cuda.fused_adam:FusedAdam"),
        overrides=OVERRIDES | MOE_OVERRIDES if model.experts else OVERRIDES,
        async_save=False,
        fp8_recipe=recipe,
        limits=limits,
    )
