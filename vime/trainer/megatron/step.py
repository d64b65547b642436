"""Forward and backward over a step's micro-batches, and the numbers that come out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from vime.algorithms.base import Algorithm, LossSums, TokenBatch
from vime.errors import TrainerError
from vime.trainer.megatron.logprobs import Head, HeadScores, score_rows
from vime.trainer.megatron.model import Model
from vime.trainer.megatron.packing import ALIGNMENT, Pack, PackShape, Targets, make_pack
from vime.trainer.megatron.parallel import Axes

Job = tuple[Pack, "MicroBatch | None"]


@dataclass(frozen=True)
class MicroBatch:
    """A micro-batch's targets; `old_log_probs` [targets] where the algorithm recomputes them, on the last stage."""

    targets: Targets
    old_log_probs: Tensor | None = None


class Passes:
    """Runs packs through the pipeline schedule of megatron-core."""

    def __init__(
        self, model: Model, wrapped: Any, *, axes: Axes, algorithm: Algorithm, temperature: float, chunk_rows: int
    ) -> None:
        self._model, self._wrapped, self._axes = model, wrapped, axes
        self._algorithm = algorithm
        self._temperature, self._chunk_rows = temperature, chunk_rows
        self._shape = PackShape(ALIGNMENT * axes.tp_size, model.shape.vocab, next(model.bare.parameters()).device)

    def train(self, jobs: Sequence[tuple[Pack, MicroBatch]]) -> list[LossSums]:
        """Forward and backward; gradients end up reduced over all ranks. Sums of each micro-batch on the last stage."""
        self._wrapped.train()
        return self._run(jobs, self._train_step, forward_only=False)

    @torch.no_grad()
    def score(self, packs: Sequence[Pack], *, temperature: float, greedy: bool = False) -> list[HeadScores]:
        """Forward alone. HeadScores of each pack on the last stage, nothing elsewhere."""
        self._wrapped.eval()
        todo = [*packs, *[make_pack([], [], self._shape)] * self._missing(len(packs))]

        def forward_step(jobs: Iterator[Job], module: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
            pack, _ = next(jobs)
            output = self._forward(module, pack)

            def finish(hidden: Tensor) -> tuple[Tensor, Tensor, HeadScores]:
                scores = self._scores(hidden, pack, temperature=temperature, greedy=greedy)
                return hidden.new_zeros(()), torch.zeros((), dtype=torch.int, device=hidden.device), scores

            return output, finish

        return self._run([(pack, None) for pack in todo], forward_step, forward_only=True)[: len(packs)]

    def _missing(self, packs: int) -> int:
        """Packs of padding that this rank adds where others have more: a layer of experts takes all ranks at once."""
        if not self._model.shape.experts or self._axes.dp_size == 1:
            return 0
        most = torch.tensor(packs)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self._axes.dp_group)
        return int(most) - packs

    def _train_step(self, jobs: Iterator[Any], module: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
        pack, micro_batch = next(jobs)
        output = self._forward(module, pack)

        def finish(hidden: Tensor) -> tuple[Tensor, Tensor, LossSums]:
            sums = self._loss(self._scores(hidden, pack, temperature=self._temperature), micro_batch)
            return sums.loss, torch.zeros((), dtype=torch.int, device=sums.loss.device), sums

        return output, finish

    def _forward(self, module: Any, pack: Pack) -> Tensor:
        if self._model.select is not None:
            self._model.select.rows = pack.rows
        options: dict[str, Any] = {"fp32_output": False} if self._model.config.bf16 else {}
        return module(pack.ids, pack.positions, None, packed_seq_params=pack.params, **options)

    def _scores(self, hidden: Tensor, pack: Pack, *, temperature: float, greedy: bool = False) -> HeadScores:
        """hidden [1, targets, hidden] of the rows that predict the pack's targets."""
        head = Head(
            self._model.head_weight,
            vocab=self._model.shape.vocab,
            temperature=temperature,
            chunk_rows=self._chunk_rows,
            group=self._axes.tp_group,
        )
        return score_rows(hidden.view(-1, hidden.shape[-1]), pack.targets, head, greedy=greedy)

    def _loss(self, scores: HeadScores, micro_batch: MicroBatch) -> LossSums:
        targets = micro_batch.targets
        old = targets.rollout_log_probs if micro_batch.old_log_probs is None else micro_batch.old_log_probs
        return self._algorithm.loss(
            TokenBatch(
                log_probs=scores.log_probs,
                entropy=scores.entropy if self._algorithm.needs_entropy_gradient else scores.entropy.detach(),
                old_log_probs=old,
                rollout_log_probs=targets.rollout_log_probs,
                advantages=targets.advantages,
                mask=targets.mask,
                weights=targets.weights,
            )
        )

    def _run(self, jobs: Sequence[Any], forward_step: Callable[..., Any], *, forward_only: bool) -> list[Any]:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        if not jobs:
            return []
        results = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(jobs),
            model=[self._wrapped],
            num_microbatches=len(jobs),
            seq_length=max(pack.ids.shape[1] for pack, _ in jobs),
            micro_batch_size=1,
            forward_only=forward_only,
        )
        return results if self._axes.is_last_stage else []


def finalize_unscaled(model: list[Any], num_tokens: Tensor | None = None, **options: Any) -> None:
    """Reduce gradients over all ranks; losses carry their global denominators already, so nothing is scaled."""
    from megatron.core.distributed import finalize_model_grads

    finalize_model_grads(model, None, **options)


@dataclass(frozen=True)
class Totals:
    """A whole update's numbers, the same on every rank."""

    weighted: Mapping[str, float]
    token_means: Mapping[str, float]
    token_maxima: Mapping[str, float]
    tokens: int


def reduce_sums(parts: Sequence[LossSums], *, axes: Axes, like: LossSums) -> Totals:
    """Add up micro-batches and data-parallel ranks in float64 and bring the result to every pipeline stage.

    The sums leave the device in one copy and are reduced between hosts: not every device's collectives take float64.
    `like` gives the names, which a stage without a loss does not see. Raises TrainerError on every rank when the loss is
    not finite.
    """
    weighted, token_sums, maxima = tuple(like.weighted), tuple(like.token_sums), tuple(like.token_maxima)
    width = 1 + len(weighted) + len(token_sums)
    sums, highest = torch.zeros(width, dtype=torch.float64), torch.zeros(len(maxima), dtype=torch.float64)
    for row in torch.stack([_row(part, like) for part in parts]).cpu() if parts else ():
        sums += row[:width]
        highest = torch.maximum(highest, row[width:])
    if dist.get_world_size(axes.dp_group) > 1:
        dist.all_reduce(sums, group=axes.dp_group)
        if maxima:
            dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=axes.dp_group)
    if axes.pp_size > 1:
        packed = torch.cat([sums, highest])
        dist.broadcast(packed, src=axes.last_stage_rank, group=axes.pp_group)
        sums, highest = packed[:width], packed[width:]
    tokens, *values = sums.tolist()
    totals = Totals(
        weighted=dict(zip(weighted, values[: len(weighted)], strict=True)),
        token_means={n: v / max(tokens, 1.0) for n, v in zip(token_sums, values[len(weighted) :], strict=True)},
        token_maxima=dict(zip(maxima, highest.tolist(), strict=True)),
        tokens=int(tokens),
    )
    if not all(math.isfinite(value) for value in totals.weighted.values()):
        raise TrainerError(
            f"the loss is {dict(totals.weighted)}; no weight was changed", fix="check log-probs and rewards for NaN"
        )
    return totals


def _row(part: LossSums, like: LossSums) -> Tensor:
    """A micro-batch's numbers [tokens, weighted, token sums, maxima] in the order of `like`."""
    values = [part.tokens, *(part.weighted[n] for n in like.weighted), *(part.token_sums[n] for n in like.token_sums)]
    return torch.stack([value.double() for value in (*values, *(part.token_maxima[n] for n in like.token_maxima))])
