"""What a mixture of experts adds to a model: settings, refusals and the marks of its parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from vime.errors import ConfigError, TrainerError
from vime.facts.model import ModelShape
from vime.facts.process import Parallel

_NO_AUXILIARY_LOSS = "the loss carries its denominators already, and an auxiliary loss would not be divided by them"

UNSUPPORTED = {
    "moe_router_load_balancing_type": _NO_AUXILIARY_LOSS,
    "moe_aux_loss_coeff": _NO_AUXILIARY_LOSS,
    "moe_z_loss_coeff": _NO_AUXILIARY_LOSS,
    "moe_grouped_gemm": "grouped experts keep their weights under names that no table maps",
}
"""Keys that trainer.megatron may not set, and why."""


def expert_values(shape: ModelShape, parallel: Parallel) -> dict[str, Any]:
    """Settings that megatron-core needs beside experts: it trains them under tp only with sequence parallelism."""
    return {"sequence_parallel": True} if shape.experts and parallel.tp > 1 else {}


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


def mark_expert(param: Tensor) -> None:
    """Let gradients and optimizer state of an expert go over the ranks that hold the same expert, whatever ep is.

    megatron-core does so only where ep is above 1. Always, it is right too where etp differs from tp (every rank then
    brings other tokens), and a checkpoint has the same parts for every ep.
    """
    param.allreduce = False  # type: ignore[attr-defined]
