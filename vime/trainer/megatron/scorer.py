"""One rank of a frozen role: a reference or a teacher whose log-probs others train with."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from vime.facts.memory import Tag
from vime.trainer.megatron.packing import Pack
from vime.trainer.megatron.pipeline import Scoring
from vime.trainer.megatron.rank import Rank
from vime.trainer.megatron.wrapping import frozen_model
from vime.types import TrainSample


class FrozenScorer(Rank):
    """A model alone: no gradients, no optimizer, no checkpoint; a run that goes on reads it from its folder again."""

    tags = (Tag.PARAMS,)

    def _build(self) -> None:
        chunk_rows = self._setup.trainer.log_prob_chunk_tokens
        self._wrapped = frozen_model(self._model)
        self._passes = Scoring(self._model, self._wrapped, axes=self._axes, chunk_rows=chunk_rows)

    def _tensors(self) -> dict[Tag, list[Tensor]]:
        return {Tag.PARAMS: [parameter.data for parameter in self._wrapped.parameters()]}

    def score(self, micro_batches: Sequence[Sequence[TrainSample]]) -> list[list[tuple[float, ...]]]:
        """Log-probs of every sample's response tokens at the sampler's temperature, on the rank that `speaks`."""
        self._require([Tag.PARAMS], to="score")

        def run(packs: list[Pack]) -> list[Tensor]:
            return [scores.log_probs for scores in self._passes.score(packs, temperature=self._setup.temperature)]

        return self._by_sample(micro_batches, run)
