"""One rank of the critic: values of the policy's states, and their training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from vime.algorithms.base import LossSums, masked_sum, token_weights
from vime.algorithms.batch import advantage_batch
from vime.algorithms.critic import returns, value_loss
from vime.config.algorithms import PpoSection
from vime.errors import ConfigError, TrainerError
from vime.facts.memory import Tag
from vime.memory.residency import TRAINER_TAGS
from vime.models.base import Family
from vime.trainer.megatron.context import whole_targets
from vime.trainer.megatron.folders import TensorSource
from vime.trainer.megatron.model import Model
from vime.trainer.megatron.packing import Pack
from vime.trainer.megatron.pipeline import Pipeline
from vime.trainer.megatron.rank import TrainingRank
from vime.trainer.megatron.value_model import build_value_model, with_value_head
from vime.trainer.setup import TrainerSetup
from vime.types import TrainSample, UpdateWork


@dataclass(frozen=True)
class ValueTargets:
    """What the loss of a micro-batch needs, all [targets]; see `vime.algorithms.critic.value_loss`."""

    old_values: Tensor
    returns: Tensor
    mask: Tensor
    weights: Tensor


class Critic(TrainingRank):
    """Model, optimizer and schedule of one rank of the critic.

    The value of response token t is that of the state before it (prompt and response tokens up to t - 1): it is read at the
    row whose logits would predict token t, so the first one belongs to the prompt alone.
    """

    def __init__(self, setup: TrainerSetup) -> None:
        if not isinstance(setup.algorithm, PpoSection):
            raise ConfigError(
                f"algorithm.kind {setup.algorithm.kind} has no critic", fix="use ppo, or remove the critic's role"
            )
        self._section = setup.algorithm
        super().__init__(setup)

    def _build_model(self, family: Family, hf_config: Mapping[str, Any]) -> Model:
        return build_value_model(self._setup, axes=self._axes, family=family, hf_config=hf_config, device=self._device)

    def _source(self) -> TensorSource:
        return with_value_head(super()._source(), seed=self._setup.seed, std=self._deviation())

    def _build(self) -> None:
        super()._build()
        self._passes = Pipeline(self._model, self._wrapped, axes=self._axes)

    def _values(self, hidden: Tensor, pack: Pack) -> Tensor:
        """hidden [this rank's targets, hidden] -> [targets] float32, on the last stage."""
        return whole_targets(self._model.bare.output_layer.values(hidden), pack.share)

    def score(self, micro_batches: Sequence[Sequence[TrainSample]]) -> list[list[tuple[float, ...]]]:
        """The value of every response token of every sample, on the rank that `speaks`."""
        self._require([Tag.PARAMS], to="compute values")
        return self._by_sample(micro_batches, lambda packs: self._passes.read(packs, self._values))

    # ---- training

    def train_step(self, updates: Sequence[UpdateWork]) -> dict[str, float]:
        """One optimizer step per update -> metrics, the same on every rank. The samples hold the values from before the step.

        Raises TrainerError when a sample does not fit, or a loss or gradient is not finite; no weight is changed by that
        update. Metrics of several updates are averaged; the rate is the last one.
        """
        self._require(TRAINER_TAGS, to="train")
        prepared = [[self._micro_batch(samples, work) for samples in work.micro_batches] for work in updates]
        rows = [self._update(jobs) for jobs in prepared]
        self._wrapped.settle()
        self._progress.steps += 1
        return {f"train/critic-{name}": value for name, value in _averaged(rows).items()}

    def _micro_batch(self, samples: Sequence[TrainSample], work: UpdateWork) -> tuple[Pack, ValueTargets]:
        _check(samples, self._section)
        arranged, pack = self._packed(samples)
        batch = advantage_batch(arranged)
        section = self._section
        weights = token_weights(
            batch.mask,
            batch.lengths,
            loss_mean="token" if section.loss_mean == "token" else "rollout",
            num_rollouts=work.num_rollouts,
            num_tokens=work.num_tokens,
            rollout_tokens=torch.tensor([sample.rollout_tokens for sample in arranged]),
        )
        parts = (batch.values, returns(batch, section), batch.mask, weights)
        return pack, ValueTargets(*(part.to(self._device) for part in parts))

    def _update(self, jobs: Sequence[tuple[Pack, ValueTargets]]) -> dict[str, float]:
        def loss(hidden: Tensor, pack: Pack, targets: ValueTargets) -> LossSums:
            return self._loss(self._values(hidden, pack), targets)

        totals, norm, rate = self._updated(lambda: self._passes.learn(jobs, loss), self._loss(torch.zeros(0), _NOTHING))
        means = dict(totals.token_means)
        spread, left, error = (means.pop(name) for name in _MOMENTS)
        variance = spread - means["returns"] ** 2
        explained = 1.0 - (left - error**2) / variance if variance > 0 else 0.0
        return {**totals.weighted, **means, "explained_variance": explained, "grad_norm": norm, "lr-pg_0": rate}

    def _loss(self, values: Tensor, targets: ValueTargets) -> LossSums:
        """values [targets] with gradient."""
        mask, old = targets.mask, targets.old_values
        sums = value_loss(values, old, targets.returns, mask, targets.weights, self._section)
        wide, error = targets.returns.double(), (targets.returns - old).double()
        moments = [masked_sum(part, mask) for part in (wide**2, error**2, error)]
        return replace(sums, token_sums={**sums.token_sums, **dict(zip(_MOMENTS, moments, strict=True))})


_MOMENTS = ("returns_squared", "errors_squared", "errors")
"""Sums over tokens from which the variance comes that the old values explain."""
_NOTHING = ValueTargets(torch.zeros(0), torch.zeros(0), torch.zeros(0, dtype=torch.bool), torch.zeros(0))


def _check(samples: Sequence[TrainSample], section: PpoSection) -> None:
    """Raise TrainerError for a sample whose fields do not fit together."""
    needed = [
        "loss_mask",
        "values",
        *(("log_probs", "ref_log_probs") if section.kl.coef and section.kl.use == "reward" else ()),
    ]
    for index, sample in enumerate(samples):
        size = len(sample.response_ids)
        wrong = [f"{name} has {len(getattr(sample, name))} entries" for name in needed if len(getattr(sample, name)) != size]
        wrong += ["it has no reward"] if sample.reward is None else []
        if wrong:
            raise TrainerError(
                f"sample {index} of the micro-batch: {wrong[0]} for {size} response tokens",
                fix="check the rollout function and the roles that score",
            )


def _averaged(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Metrics of a step from those of its updates."""
    means = {name: sum(row[name] for row in rows) / len(rows) for name in rows[0]} if rows else {}
    return {**means, **({"lr-pg_0": rows[-1]["lr-pg_0"]} if rows else {})}
