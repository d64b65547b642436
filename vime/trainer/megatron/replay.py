"""Expert choices of megatron-core's routers: recorded in one pass, prescribed in another.

A router's choice is replaced where megatron-core offers it (`router_replay` of a router), with an object of our own for each
router: the one of megatron-core keeps a global list over all models and a global action, which cannot tell a forward pass
from one that is repeated in the backward pass. Weights are gathered from the scores of all experts, so that a prescribed
expert outside of the router's own choice has a weight and the router a gradient.

Ids are [rows, layers, top_k]: rows are those that the routers of this rank see (its part of the sequence), layers those with
experts among this rank's, in order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from vime.errors import TrainerError


class RouterChoice:
    """What one router chooses: its own experts, or those of a target. Stands in for megatron-core's `RouterReplay`.

    A forward pass in training without gradients is one that the backward pass repeats (recompute); its target is kept until
    then. Both orders are those of the micro-batches, also when passes of several micro-batches interleave, so a queue is
    enough. A router is either always repeated or never. Once a pass in training had a target, those after it need one too.
    """

    def __init__(self, router: Any) -> None:
        self._router = router
        self.target: Tensor | None = None
        self.real: Tensor | None = None
        self.recorded: list[Tensor] | None = None
        self.differing: list[Tensor] = []
        self._again: deque[Tensor] = deque()
        self._needed = False

    def clear(self) -> None:
        """Forget targets, and what was counted."""
        self.target = self.real = self.recorded = None
        self.differing = []
        self._again.clear()
        self._needed = False

    @property
    def left(self) -> int:
        """Targets of passes that were not repeated."""
        return len(self._again)

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None, default: Callable[..., Any]
    ) -> tuple[Tensor, Tensor]:
        """Scores and ids [rows, topk] of the experts chosen from `scores` [rows, experts]; called by megatron-core."""
        if self.target is None and not self._needed:
            values, ids = default(scores, topk, num_groups=num_groups, group_topk=group_topk)
            if self.recorded is not None:
                self.recorded.append(ids.detach())
            return values, ids
        ids, first = self._next()
        if ids.shape != (len(scores), topk):
            raise TrainerError(
                f"expert ids of shape {tuple(ids.shape)} for {len(scores)} tokens and {topk} experts each",
                where=f"layer {self._router.layer_number}",
            )
        ids = ids.long()
        if first and self._router.training:
            with torch.no_grad():
                _, own = default(scores, topk, num_groups=num_groups, group_topk=group_topk)
                self._compare(own, ids)
        return scores.gather(1, ids), ids

    def _next(self) -> tuple[Tensor, bool]:
        """The ids of this pass, and whether it is its micro-batch's first."""
        training, with_gradient = self._router.training, torch.is_grad_enabled()
        if training and with_gradient and self._again:
            return self._again.popleft(), False
        if self.target is None:
            raise TrainerError("a pass without expert ids", where=f"layer {self._router.layer_number}")
        if training and not with_gradient:
            self._again.append(self.target)
        self._needed |= training
        return self.target, True

    def _compare(self, own: Tensor, ids: Tensor) -> None:
        differs = (own.sort(dim=-1).values != ids.sort(dim=-1).values).any(dim=-1)
        real = torch.ones_like(differs) if self.real is None else self.real
        self.differing.append(torch.stack([(differs & real).sum(), real.sum()]))


def routers_of(bare: Any) -> list[Any]:
    """The routers of a model's part, in the order of their layers; layers without experts have none."""
    from megatron.core.transformer.moe.router import TopKRouter

    return sorted((m for m in bare.modules() if isinstance(m, TopKRouter)), key=lambda m: int(m.layer_number or 0))


def id_type(experts: int) -> torch.dtype:
    """The smallest type that tells so many experts apart and that every device can index."""
    return torch.uint8 if experts <= 256 else torch.int16


class RoutingReplay:
    """The routers of a model's part on this rank."""

    def __init__(self, bare: Any) -> None:
        """Raises TrainerError when there is no router here, or when routers are fused (those ask nobody)."""
        routers = routers_of(bare)
        if not routers:
            raise TrainerError("no layer of this stage has experts", fix="replay routers of stages that have some")
        if routers[0].config.moe_router_fusion:
            raise TrainerError(
                "fused routers cannot be given expert ids", fix="set trainer.megatron.moe_router_fusion to false"
            )
        self.layers = tuple(int(router.layer_number or 0) - 1 for router in routers)
        """Numbers of these layers in the whole model, counted from 0."""
        self.dtype = id_type(int(routers[0].config.num_moe_experts))
        self._choices = [RouterChoice(router) for router in routers]
        for router, choice in zip(routers, self._choices, strict=True):
            router.router_replay = choice  # type: ignore[assignment]

    @contextmanager
    def recording(self) -> Iterator[list[Tensor]]:
        """Routers choose for themselves. The list has, afterwards, each pass's ids [rows, layers, top_k] on the host."""
        passes: list[Tensor] = []
        self.clear()
        for choice in self._choices:
            choice.recorded = []
        try:
            yield passes
            for layers in zip(*(choice.recorded or () for choice in self._choices), strict=True):
                passes.append(torch.stack(layers, dim=1).to(self.dtype).cpu())
        finally:
            self.clear()

    def prescribe(self, ids: Tensor, *, real: Tensor | None = None) -> None:
        """Give forward passes, until `release`, their experts `ids` [rows, layers, top_k].

        In training, rows that are `real` [rows] are counted. Raises TrainerError for another number of layers than are here.
        """
        if ids.shape[1] != len(self._choices):
            raise TrainerError(
                f"expert ids of {ids.shape[1]} layers, but {len(self._choices)} are here", where="routing replay"
            )
        device = next(self._choices[0]._router.parameters()).device
        placed, counted = ids.to(device), None if real is None else real.to(device)
        for choice, layer in zip(self._choices, placed.unbind(1), strict=True):
            choice.target, choice.real = layer, counted

    def release(self) -> None:
        """Prescribe nothing to further passes; the backward pass still repeats what was."""
        for choice in self._choices:
            choice.target = choice.real = None

    def clear(self) -> None:
        """Let routers choose for themselves again."""
        for choice in self._choices:
            choice.clear()

    def finish(self) -> tuple[int, int]:
        """Rows, over all layers here, whose own experts differ from the prescribed ones, and all rows. Clears.

        Raises TrainerError when passes that should have been repeated were not.
        """
        left = sum(choice.left for choice in self._choices)
        counts = [pair for choice in self._choices for pair in choice.differing]
        self.clear()
        if left:
            raise TrainerError(f"{left} passes through routers were not repeated in the backward pass", where="routing replay")
        if not counts:
            return 0, 0
        differing, rows = torch.stack(counts).sum(0).tolist()
        return int(differing), int(rows)


def sequence_part(ids: Tensor, *, rank: int, size: int) -> Tensor:
    """The rows that a rank sees under sequence parallelism: an equal part of `ids`. Raises TrainerError for a remainder."""
    if len(ids) % size:
        raise TrainerError(f"{len(ids)} rows do not divide into {size} parts of a sequence", where="routing replay")
    return ids.chunk(size)[rank]


def stage_part(ids: Tensor, *, here: Sequence[int], moe_layers: Sequence[int]) -> Tensor:
    """The layers of this stage. `here` and `moe_layers` number layers of the whole model; `ids` has all of `moe_layers`."""
    return ids[:, [moe_layers.index(layer) for layer in here]]
