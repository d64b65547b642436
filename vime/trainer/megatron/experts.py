"""What a mixture of experts adds to a model: settings, refusals and the marks of its parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from vime.errors import ConfigError, TrainerError
from vime.facts.model import ModelShape
from vime.facts.process import Parallel
from vime.models.base import Family
from vime.trainer.megatron.parallel import Axes

if TYPE_CHECKING:
    from vime.trainer.megatron.packing import Pack

UNSUPPORTED = {
    "moe_grouped_gemm": "grouped experts keep their weights under names that no table maps",
    "moe_enable_routing_replay": "trainer.routing_replay says which experts the passes of an update take",
    "mtp_num_layers": "layers for multi-token prediction are not trained: they go from model.path to every export as they are",
    "mtp_loss_scaling_factor": "layers for multi-token prediction are not trained",
}
"""Keys that trainer.megatron may not set, and why."""

BALANCE = ("none", "aux_loss")
"""What `moe_router_load_balancing_type` may say; others route differently from the engine, or take a pack for a sequence."""


def expert_values(shape: ModelShape, parallel: Parallel) -> dict[str, Any]:
    """Settings that megatron-core needs beside experts: it trains them under tp only with sequence parallelism."""
    return {"sequence_parallel": True} if shape.experts and parallel.tp > 1 else {}


def balance_values(section: Mapping[str, Any]) -> dict[str, Any]:
    """The kind of balance that a coefficient in `trainer.megatron` implies."""
    asked = bool(section.get("moe_aux_loss_coeff")) and "moe_router_load_balancing_type" not in section
    return {"moe_router_load_balancing_type": "aux_loss"} if asked else {}


def check_experts(shape: ModelShape, parallel: Parallel, values: Mapping[str, Any]) -> None:
    """Raise TrainerError when the experts do not divide into the layout, ConfigError for settings that cannot train them."""
    if not shape.experts:
        for axis, size in (("ep", parallel.ep), ("etp", parallel.etp)):
            if size > 1:
                raise TrainerError(f"{axis} {size}, but the model has no experts", fix=f"set {axis} to 1")
        return
    for axis, size, what, total in (
        ("ep", parallel.ep, "experts", shape.experts),
        ("etp", parallel.etp, "columns of an expert", shape.expert_ffn),
    ):
        if total % size:
            raise TrainerError(f"{total} {what} do not divide into {axis} {size}", fix=f"choose an {axis} that divides {total}")
    kind = values.get("moe_router_load_balancing_type", "none")
    if kind not in BALANCE:
        raise ConfigError(
            f"trainer.megatron.moe_router_load_balancing_type {kind!r}: packs hold many sequences, and the engine routes by "
            "the highest scores",
            fix=f"set one of {', '.join(BALANCE)}",
        )
    if values.get("moe_token_dispatcher_type") == "allgather" and parallel.ep * parallel.etp > 1:
        raise ConfigError(
            "trainer.megatron.moe_token_dispatcher_type allgather needs as many tokens on every rank, which packs do not have",
            fix="remove the key (alltoall)",
        )
    if parallel.tp > 1 and not values.get("sequence_parallel"):
        raise ConfigError(
            "trainer.megatron.sequence_parallel is off, but megatron-core trains experts under tp only with it",
            fix="remove the key, or set tp to 1",
        )


# ---- auxiliary losses


class _Share:
    """What one token counts in an auxiliary loss: megatron-core leaves the division by the batch's tokens to us."""

    per_token = 1.0


def use_token_shares() -> None:
    """Let megatron-core scale auxiliary losses by `weigh_auxiliary_losses`. Repeating it does nothing."""
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    found: Any = MoEAuxLossAutoScaler.set_loss_scale
    if hasattr(found, "original"):
        return

    def set_loss_scale(scale: Tensor) -> None:
        found(scale * _Share.per_token)

    set_loss_scale.original = found  # type: ignore[attr-defined]
    MoEAuxLossAutoScaler.set_loss_scale = staticmethod(set_loss_scale)


def weigh_auxiliary_losses(config: Any, packs: Sequence[Pack], axes: Axes) -> None:
    """Make the auxiliary losses of an update a mean over its tokens, those that pad a pack included.

    Every micro-batch's loss counts by its tokens, over all data-parallel ranks; a collective over them.
    """
    if not config.num_moe_experts or not (config.moe_aux_loss_coeff or config.moe_z_loss_coeff):
        return
    rows = sum(pack.ids.shape[1] for pack in packs) / (axes.tp_size if config.sequence_parallel else 1)
    total = torch.tensor(rows, dtype=torch.float64)
    dist.all_reduce(total, group=axes.dp_group)
    _Share.per_token = 1.0 / max(float(total), 1.0)


# ---- parameters


def freeze_routers(bare: Any, family: Family) -> None:
    """Train no router. Raises ConfigError for a dense model."""
    if not any(row.is_router for row in family.table.rows):
        raise ConfigError(f"trainer.freeze_router: {family.name} has no router", fix="remove the key")
    for name, param in bare.named_parameters():
        if family.table.to_hf(name)[0].is_router:
            param.requires_grad_(False)


def mark_expert(param: Tensor) -> None:
    """Let gradients and optimizer state of an expert go over the ranks that hold the same expert, whatever ep is.

    megatron-core does so only where ep is above 1. Always, it is right too where etp differs from tp (every rank then
    brings other tokens), and a checkpoint has the same parts for every ep.
    """
    param.allreduce = False  # type: ignore[attr-defined]
