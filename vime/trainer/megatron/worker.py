"""One rank of the actor: the policy that is trained. Every public method is called on all ranks at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from vime.algorithms.base import LossSums
from vime.algorithms.batch import advantage_batch
from vime.algorithms.registry import algorithm_of
from vime.errors import TrainerError
from vime.facts.memory import Tag
from vime.memory.residency import TRAINER_TAGS
from vime.trainer.megatron.logprobs import HeadScores
from vime.trainer.megatron.packing import (
    Pack,
    Targets,
    check_samples,
    make_pack,
    pack_samples,
    split_by_tokens,
    target_tensors,
)
from vime.trainer.megatron.rank import TrainingRank
from vime.trainer.megatron.replayed import Part, replay_of
from vime.trainer.megatron.step import MicroBatch, Passes
from vime.types import TrainSample, UpdateWork


class MegatronWorker(TrainingRank):
    """Model, optimizer and schedule of one rank of the actor."""

    def _build(self) -> None:
        super()._build()
        self._algorithm = algorithm_of(self._setup.algorithm)
        self._temperature = self._setup.temperature if self._algorithm.needs_rollout_log_probs else 1.0
        self._routed = self._setup.trainer.routing_replay == "rollout"
        self._replay = replay_of(self._setup.trainer.routing_replay, self._model, self._axes)
        self._passes = Passes(
            self._model,
            self._wrapped,
            axes=self._axes,
            algorithm=self._algorithm,
            temperature=self._temperature,
            chunk_rows=self._setup.trainer.log_prob_chunk_tokens,
            replay=self._replay,
        )

    # ---- training

    def train_step(self, updates: Sequence[UpdateWork]) -> dict[str, float]:
        """One optimizer step per update -> metrics, the same on every rank.

        Raises TrainerError when a sample does not fit, or a loss or gradient is not finite; no weight is changed by that
        update. Metrics of several updates are averaged; counts are summed, maxima are maxima, the rate is the last one.
        """
        self._require(TRAINER_TAGS, to="train")
        packed = [[self._checked(samples) for samples in work.micro_batches] for work in updates]
        scored = [self._old_log_probs(parts, first=index == 0) for index, parts in enumerate(packed)]
        jobs = [self._jobs(parts, old, work) for (parts, old), work in zip(scored, updates, strict=True)]
        rows = [self._update(job, work) for job, work in zip(jobs, updates, strict=True)]
        self._wrapped.settle()
        self._progress.steps += 1
        return _merged(rows)

    def _checked(self, samples: Sequence[TrainSample]) -> Part:
        check_samples(samples, self._algorithm)
        self._replay.check(samples)
        arranged, pack = self._packed(samples)
        return arranged, self._replay.given(arranged, pack)

    def _old_log_probs(self, parts: Sequence[Part], *, first: bool) -> tuple[Sequence[Part], list[Tensor | None]]:
        """An update's parts, and log-probs [targets] of each with the weights from before the step, on the last stage.

        None where the update's own forward pass gives them: in the first one, unless its advantages need them.
        """
        nothing: list[Tensor | None] = [None] * len(parts)
        if not self._algorithm.needs_old_log_probs or (first and not self._algorithm.needs_old_for_advantages):
            return parts, nothing
        parts, scores = self._replay.scored(parts, lambda packs: self._passes.score(packs, temperature=self._temperature))
        return parts, [score.log_probs for score in scores] or nothing

    def _jobs(self, parts: Sequence[Part], old: Sequence[Tensor | None], work: UpdateWork) -> list[tuple[Pack, MicroBatch]]:
        """An update's micro-batches with the advantages of all samples of this rank, which are computed together."""
        known = [values for values in old if values is not None]
        samples = [sample for members, _ in parts for sample in members]
        batch = advantage_batch(samples, log_probs=torch.cat(known) if known else None)
        sizes = [sum(len(sample.response_ids) for sample in members) for members, _ in parts]
        advantages = self._algorithm.advantages(batch, self._summed).split(sizes)
        return [
            (pack, MicroBatch(self._targets(members, values, work), before))
            for (members, pack), values, before in zip(parts, advantages, old, strict=True)
        ]

    def _targets(self, samples: Sequence[TrainSample], advantages: Tensor, work: UpdateWork) -> Targets:
        return target_tensors(samples, advantages, algorithm=self._algorithm, work=work, device=self._device)

    def _summed(self, values: Tensor) -> Tensor:
        """Host tensor, added up over data-parallel ranks."""
        total = values.clone()
        dist.all_reduce(total, group=self._axes.dp_group)
        return total

    def _update(self, jobs: Sequence[tuple[Pack, MicroBatch]], work: UpdateWork) -> dict[str, float]:
        replayed: dict[str, float] = {}

        def learn() -> list[LossSums]:
            sums = self._passes.train(jobs)
            replayed.update(self._replay.counted())
            return sums

        with self._replay.updating():
            totals, norm, rate = self._updated(learn, self._algorithm.empty_sums())
        rollouts = torch.tensor(float(sum(len(m) for m in work.micro_batches)), dtype=torch.float64)
        dist.all_reduce(rollouts, group=self._axes.dp_group)
        own = {"grad_norm": norm, "lr-pg_0": rate, "tokens": float(totals.tokens), "rollouts": float(rollouts)}
        named = {**self._algorithm.finish(totals.named), **own, **replayed}
        return {name if name.startswith("rollout/") else f"train/{name}": value for name, value in named.items()}

    # ---- scoring

    def log_probs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """For every sequence the log-probs of its tokens from the second on, at temperature 1; the same on every rank."""
        self._require([Tag.PARAMS], to="compute log-probs")
        lengths = [len(sequence) for sequence in sequences]
        if min(lengths, default=2) < 2:
            raise TrainerError("a sequence of fewer than two tokens has no log-probs", fix="send longer sequences")
        parts = split_by_tokens(lengths, self._setup.trainer.max_tokens_per_micro_batch)
        packs = [make_pack([sequences[i] for i in part], [1] * len(part), self._shape) for part in parts]
        scores = self._passes.score(packs, temperature=1.0)
        flat = self._from_last_stage([s.log_probs for s in scores], sum(lengths) - len(lengths)).tolist()
        result, start = [], 0
        for length in lengths:
            result.append(flat[start : start + length - 1])
            start += length - 1
        return result

    def evaluate_rows(self, samples: Sequence[TrainSample]) -> dict[str, float]:
        """Teacher-forced scores of supervised rows, the same list given to every rank.

        `loss` is the mean negative log-likelihood over response tokens; `exact_match` the share of rows whose response
        tokens are all the argmax, which is what greedy decoding would then produce.
        """
        self._require([Tag.PARAMS], to="evaluate")
        own = samples[self._axes.dp_rank :: self._axes.dp_size]
        lengths = [len(s.prompt_ids) + len(s.response_ids) for s in own]
        parts = split_by_tokens(lengths, self._setup.trainer.max_tokens_per_micro_batch)
        groups = [[own[i] for i in part] for part in parts]
        packs = [pack_samples(group, self._shape) for group in groups]
        scores = self._passes.score(packs, temperature=1.0, greedy=True)
        sums = torch.zeros(4, dtype=torch.float64)
        for group, score in zip(groups, scores, strict=False):
            sums += _row_sums(group, score)
        dist.all_reduce(sums, group=self._axes.dp_group)
        if self._axes.pp_size > 1:
            dist.broadcast(sums, src=self._axes.last_stage_rank, group=self._axes.pp_group)
        loss, tokens, matches, rows = sums.tolist()
        return {"loss": loss / max(tokens, 1.0), "exact_match": matches / max(rows, 1.0)}


def _row_sums(samples: Sequence[TrainSample], score: HeadScores) -> Tensor:
    """[negative log-likelihood, tokens, matching rows, rows] of a pack; float64 on the host."""
    lengths = torch.tensor([len(s.response_ids) for s in samples])
    row = torch.repeat_interleave(torch.arange(len(samples)), lengths)
    assert score.greedy is not None
    misses = torch.zeros(len(samples), dtype=torch.float64).index_add_(0, row, (~score.greedy.cpu()).double())
    values = [-score.log_probs.cpu().double().sum(), lengths.sum().double(), (misses == 0).sum().double()]
    return torch.stack([*values, values[0].new_tensor(float(len(samples)))])


def _merged(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Metrics of a step from those of its updates."""
    if len(rows) == 1:
        return dict(rows[0])
    result: dict[str, float] = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row[name] for row in rows if name in row]
        if name.endswith("_max"):
            result[name] = max(values)
        elif name in ("train/tokens", "train/rollouts"):
            result[name] = sum(values)
        else:
            result[name] = values[-1] if name == "train/lr-pg_0" else sum(values) / len(values)
    return result
