"""Packs through megatron-core's pipeline schedule, forward alone or with gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from vime.algorithms.base import LossSums
from vime.errors import TrainerError
from vime.trainer.megatron.context import whole_targets
from vime.trainer.megatron.experts import weigh_auxiliary_losses
from vime.trainer.megatron.logprobs import Head, HeadScores, score_rows
from vime.trainer.megatron.model import Model
from vime.trainer.megatron.packing import Pack, make_pack, pack_shape
from vime.trainer.megatron.parallel import Axes
from vime.trainer.megatron.replayed import OwnChoice
from vime.trainer.megatron.wrapping import Wrapped


class Pipeline:
    """A model on its way through the stages.

    `wrapped` is the model with what training puts around it; `replay` says who chooses the experts of its passes.
    """

    def __init__(self, model: Model, wrapped: Wrapped, *, axes: Axes, replay: OwnChoice | None = None) -> None:
        self._model, self._wrapped, self._axes = model, wrapped, axes
        self._replay = replay or OwnChoice()
        self._shape = pack_shape(axes, vocab=model.shape.vocab, device=next(model.bare.parameters()).device)
        self._multiple = axes.pp_size if axes.vpp_size > 1 else 1

    @torch.no_grad()
    def read(self, packs: Sequence[Pack], look: Callable[[Tensor, Pack], Any]) -> list[Any]:
        """Forward alone. What `look` makes of each pack's hidden states [targets, hidden], on the last stage; else nothing."""
        self._wrapped.eval()
        todo = [*packs, *[make_pack([], [], self._shape)] * self._missing(len(packs))]

        def forward_step(jobs: Iterator[Any], module: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
            pack, _ = next(jobs)
            output = self._forward(module, pack)

            def finish(hidden: Tensor) -> tuple[Tensor, Tensor, Any]:
                found = look(hidden.view(-1, hidden.shape[-1]), pack)
                return hidden.new_zeros(()), torch.zeros((), dtype=torch.int, device=hidden.device), found

            return output, finish

        return self._run([(pack, None) for pack in todo], forward_step, forward_only=True)[: len(packs)]

    def learn(self, jobs: Sequence[tuple[Pack, Any]], loss: Callable[[Tensor, Pack, Any], LossSums]) -> list[LossSums]:
        """Forward and backward; gradients end up reduced over all ranks.

        `loss` gets hidden states [targets, hidden], the pack and the job's second part. Its sums, job by job, on the last
        stage.
        """
        self._wrapped.train()
        weigh_auxiliary_losses(self._model.config, [pack for pack, _ in jobs], self._axes)

        def forward_step(left: Iterator[Any], module: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
            pack, batch = next(left)
            output = self._forward(module, pack)

            def finish(hidden: Tensor) -> tuple[Tensor, Tensor, LossSums]:
                sums = loss(hidden.view(-1, hidden.shape[-1]), pack, batch)
                return sums.loss, torch.zeros((), dtype=torch.int, device=sums.loss.device), sums

            return output, finish

        return self._run(jobs, forward_step, forward_only=False)

    def _missing(self, packs: int) -> int:
        """Packs of padding that this rank adds.

        A layer of experts takes all ranks at once, so each needs as many as any other; a virtual pipeline takes as many packs
        at a time as it has stages.
        """
        most = torch.tensor(packs)
        if self._model.shape.experts and self._axes.dp_size > 1:
            dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self._axes.dp_group)
        return int(most) + -int(most) % self._multiple - packs

    def _forward(self, module: Any, pack: Pack) -> Tensor:
        if self._model.select is not None:
            self._model.select.rows = pack.rows
        options: dict[str, Any] = {"fp32_output": False} if self._model.config.bf16 else {}
        with self._replay.passing(self._wrapped.chunks.index(module), pack):
            return module(pack.ids, pack.positions, None, packed_seq_params=pack.params, **options)

    def _run(self, jobs: Sequence[Any], forward_step: Callable[..., Any], *, forward_only: bool) -> list[Any]:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        if not jobs:
            return []
        if len(jobs) % self._multiple:
            raise TrainerError(
                f"{len(jobs)} micro-batches for a virtual pipeline of {self._axes.pp_size} stages",
                fix=f"plan a multiple of {self._multiple}, some of them without samples",
            )
        chunks = self._wrapped.chunks
        results = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(jobs) if len(chunks) == 1 else [iter(jobs) for _ in chunks],
            model=chunks,
            num_microbatches=len(jobs),
            seq_length=max(pack.ids.shape[1] for pack, _ in jobs),
            micro_batch_size=1,
            forward_only=forward_only,
        )
        return results if self._axes.is_last_stage else []


class Scoring(Pipeline):
    """Log-probs through the vocabulary's head, `chunk_rows` rows of logits at once."""

    def __init__(self, model: Model, wrapped: Wrapped, *, axes: Axes, chunk_rows: int, replay: OwnChoice | None = None) -> None:
        super().__init__(model, wrapped, axes=axes, replay=replay)
        self._chunk_rows = chunk_rows

    def score(self, packs: Sequence[Pack], *, temperature: float, greedy: bool = False) -> list[HeadScores]:
        """Forward alone. HeadScores of each pack on the last stage, nothing elsewhere."""
        return self.read(packs, lambda hidden, pack: self._scores(hidden, pack, temperature=temperature, greedy=greedy))

    def _scores(self, hidden: Tensor, pack: Pack, *, temperature: float, greedy: bool = False) -> HeadScores:
        """hidden [own targets, hidden] of the rows that predict this rank's targets -> scores of all the pack's targets."""
        head = Head(
            self._model.head_weight,
            vocab=self._model.shape.vocab,
            temperature=temperature,
            chunk_rows=self._chunk_rows,
            group=self._axes.tp_group,
        )
        own = score_rows(hidden, pack.targets, head, greedy=greedy)
        if pack.share is None:
            return own
        hits = None if own.greedy is None else whole_targets(own.greedy.float(), pack.share) > 0
        return HeadScores(whole_targets(own.log_probs, pack.share), whole_targets(own.entropy, pack.share), hits)
