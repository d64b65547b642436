"""The trainer's side: its runtime and what megatron-core needs here. Code is named, never imported."""

from __future__ import annotations

from vime.facts.inventory import NodeInventory, near_cpus
from vime.facts.model import ModelShape
from vime.facts.process import Factory, MegatronAdaptation, Override, RoleRequest, TrainerRuntime
from vime_rocm.devices import GFX942, GFX950
from vime_rocm.process import FNUZ, arches

FP8_RECIPE = {GFX942: FNUZ, GFX950: "mxfp8"}

_COMMON = {
    "use_cpu_initialization": Override(True, "weights drawn on the host are the same for every tensor-parallel size"),
    "gradient_accumulation_fusion": Override(False, "it needs a compiled extension of Apex, which is not part of this stack"),
}
_PLAIN = {
    "apply_rope_fusion": Override(False, "megatron-core takes its fused rotary embedding from Transformer Engine"),
    "masked_softmax_fusion": Override(False, "its kernel is a compiled extension that is not built here"),
    "persist_layer_norm": Override(False, "the persistent kernel comes from Apex"),
}
_MOE_PLAIN = {"moe_permute_fusion": Override(False, "the fused permutation comes from Transformer Engine")}
_LIMITS = {
    "asynchronous checkpoints": "megatron-core's asynchronous writer does not work on HIP without a changed writer, which is "
    "not here: a save ends before the next step begins",
    "converting checkpoints": "is done on the host only",
}


def runtime(request: RoleRequest) -> TrainerRuntime:
    """The factory that prepares a trainer rank."""
    options = {"threads": request.threads, "numa_cpus": near_cpus(_nodes(request))}
    why = "torch calls HIP devices cuda; the runtime makes sure that this torch was built for HIP"
    return TrainerRuntime(Factory("vime_rocm.runtime:RocmRuntime", options), device_type="cuda", why=why)


def _nodes(request: RoleRequest) -> list[NodeInventory]:
    return [request.inventories[node] for node in sorted({slot.node for slot in request.placement.slots})]


def adaptation(request: RoleRequest, model: ModelShape) -> MegatronAdaptation:
    """Transformer Engine where the trainer's interpreter has it, else the core's pieces in torch.

    The optimizer stays megatron-core's own, which falls back to torch's.
    """
    engine = "transformer-engine" in request.software
    overrides = dict(_COMMON)
    if not engine:
        overrides |= _PLAIN
        if model.experts:
            overrides |= _MOE_PLAIN
    found = {arch for node in request.inventories for arch in arches(node)}
    recipes = {FP8_RECIPE.get(arch or "") for arch in found}
    return MegatronAdaptation(
        norm=None if engine else Factory("vime.trainer.megatron.attention:RmsNorm"),
        core_attention=None if engine else Factory("vime.trainer.megatron.varlen:VarlenCoreAttention"),
        transformer_engine=engine,
        overrides=overrides,
        async_save=False,
        fp8_recipe=recipes.pop() if len(recipes) == 1 else None,
        limits=_LIMITS,
    )
