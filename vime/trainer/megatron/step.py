"""Forward and backward over a step's micro-batches, and the numbers that come out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from vime.algorithms.base import Algorithm, LossSums, TokenBatch
from vime.errors import TrainerError
from vime.trainer.megatron.logprobs import HeadScores
from vime.trainer.megatron.model import Model
from vime.trainer.megatron.packing import Pack, Targets
from vime.trainer.megatron.parallel import Axes
from vime.trainer.megatron.pipeline import Scoring
from vime.trainer.megatron.replayed import OwnChoice
from vime.trainer.megatron.wrapping import Wrapped


@dataclass(frozen=True)
class MicroBatch:
    """A micro-batch's targets; `old_log_probs` [targets] on the last stage where they come from a pass of their own.

    Without such a pass the forward pass of the update gives them: no weight has changed before the step's first one.
    """

    targets: Targets
    old_log_probs: Tensor | None = None


class Passes(Scoring):
    """The policy's passes: log-probs, and the algorithm's loss over them."""

    def __init__(
        self,
        model: Model,
        wrapped: Wrapped,
        *,
        axes: Axes,
        algorithm: Algorithm,
        temperature: float,
        chunk_rows: int,
        replay: OwnChoice,
    ) -> None:
        super().__init__(model, wrapped, axes=axes, chunk_rows=chunk_rows, replay=replay)
        self._algorithm = algorithm
        self._temperature = temperature

    def train(self, jobs: Sequence[tuple[Pack, MicroBatch]]) -> list[LossSums]:
        """Forward and backward; gradients end up reduced over all ranks. Sums of each micro-batch on the last stage."""

        def loss(hidden: Tensor, pack: Pack, batch: MicroBatch) -> LossSums:
            return self._loss(self._scores(hidden, pack, temperature=self._temperature), batch)

        return self.learn(jobs, loss)

    def _loss(self, scores: HeadScores, micro_batch: MicroBatch) -> LossSums:
        targets, algorithm = micro_batch.targets, self._algorithm
        policy = scores.log_probs.detach() if micro_batch.old_log_probs is None else micro_batch.old_log_probs
        return algorithm.loss(
            TokenBatch(
                log_probs=scores.log_probs,
                entropy=scores.entropy if algorithm.needs_entropy_gradient else scores.entropy.detach(),
                old_log_probs=policy if algorithm.needs_old_log_probs else targets.rollout_log_probs,
                policy_log_probs=policy,
                rollout_log_probs=targets.rollout_log_probs,
                advantages=targets.advantages,
                mask=targets.mask,
                weights=targets.weights,
                sequences=targets.sequences,
                ref_log_probs=targets.ref_log_probs,
                teacher_log_probs=targets.teacher_log_probs,
                prompt_lengths=targets.prompt_lengths,
            )
        )


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
    sequence_means: Mapping[str, float]

    @property
    def named(self) -> dict[str, float]:
        """All but the count."""
        return {**self.weighted, **self.token_means, **self.sequence_means, **self.token_maxima}


def reduce_sums(parts: Sequence[LossSums], *, axes: Axes, like: LossSums) -> Totals:
    """Add up micro-batches and data-parallel ranks in float64 and bring the result to every pipeline stage.

    The sums leave the device in one copy and are reduced between hosts: not every device's collectives take float64.
    `like` gives the names, which a stage without a loss does not see. Raises TrainerError on every rank when the loss is
    not finite.
    """
    maxima, width = tuple(like.token_maxima), 2 + len(like.weighted) + len(like.token_sums) + len(like.sequence_sums)
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
    tokens, sequences, *values = sums.tolist()
    left = iter(values)
    totals = Totals(
        weighted={name: next(left) for name in like.weighted},
        token_means={name: next(left) / max(tokens, 1.0) for name in like.token_sums},
        sequence_means={name: next(left) / max(sequences, 1.0) for name in like.sequence_sums},
        token_maxima=dict(zip(maxima, highest.tolist(), strict=True)),
        tokens=int(tokens),
    )
    if not all(math.isfinite(value) for value in totals.weighted.values()):
        raise TrainerError(
            f"the loss is {dict(totals.weighted)}; no weight was changed", fix="check log-probs and rewards for NaN"
        )
    return totals


def _row(part: LossSums, like: LossSums) -> Tensor:
    """A micro-batch's numbers [tokens, sequences, weighted, token sums, sequence sums, maxima] in the order of `like`."""
    pairs = (
        (part.weighted, like.weighted),
        (part.token_sums, like.token_sums),
        (part.sequence_sums, like.sequence_sums),
        (part.token_maxima, like.token_maxima),
    )
    values = [part.tokens, part.sequences, *(found[name] for found, names in pairs for name in names)]
    return torch.stack([value.to(part.loss.device, torch.float64) for value in values])
