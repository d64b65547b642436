"""How far trainer and sampler are apart, under the names that verl gives these metrics (`rollout_corr/...`).

Sums, so that any split of the work gives the same; what is a function of several means is made by `finish`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from vime.algorithms.base import bounded_ratio, masked_max, masked_sum, select
from vime.algorithms.corrections import Corrected
from vime.algorithms.kl import k3
from vime.algorithms.sequences import Sequences
from vime.config.corrections import CorrectionSection

PREFIX = "rollout_corr/"
_SQUARE = f"{PREFIX}rollout_is_square"


@dataclass
class Sums:
    """Scalar float64 sums over trained tokens and over samples that have some, and maxima."""

    mask: Tensor
    sequences: Sequences
    tokens: dict[str, Tensor] = field(default_factory=dict)
    samples: dict[str, Tensor] = field(default_factory=dict)
    maxima: dict[str, Tensor] = field(default_factory=dict)

    @property
    def trained(self) -> Tensor:
        """[samples] bool: has a trained token."""
        return self.sequences.sum(self.mask.double()) > 0

    def add(self, **values: Tensor) -> None:
        """Values [tokens] float64 or bool."""
        for name, value in values.items():
            self.tokens[f"{PREFIX}{name}"] = masked_sum(value.double(), self.mask)

    def add_samples(self, **values: Tensor) -> None:
        """Values [samples]."""
        for name, value in values.items():
            self.samples[f"{PREFIX}{name}"] = select(value.double(), self.trained).sum()


@torch.no_grad()
def differences(sums: Sums, policy: Tensor, rollout: Tensor) -> None:
    """Divergence, perplexities and chi-square between trainer (`policy`) and sampler (`rollout`), both [tokens]."""
    mask, sequences = sums.mask, sums.sequences
    policy, rollout = select(policy, mask).double(), select(rollout, mask).double()
    log_ratio = policy - rollout
    sums.add(kl=-log_ratio, k3_kl=k3(-log_ratio), chi2_token=bounded_ratio(log_ratio) ** 2 - 1.0)
    trainer, sampler = -sequences.mean(policy, mask), -sequences.mean(rollout, mask)
    apart = trainer - sampler
    sums.add_samples(
        training_ppl=trainer.exp(),
        training_log_ppl=trainer,
        rollout_ppl=sampler.exp(),
        rollout_log_ppl=sampler,
        log_ppl_diff=apart,
        log_ppl_abs_diff=apart.abs(),
        ppl_ratio=apart.exp(),
        chi2_seq=bounded_ratio(sequences.sum(log_ratio)) ** 2 - 1.0,
    )
    sums.maxima[f"{PREFIX}log_ppl_abs_diff_max"] = masked_max(apart.abs(), sums.trained)


@torch.no_grad()
def weights(sums: Sums, found: Corrected, section: CorrectionSection) -> None:
    """Importance weights and what was out of bounds or rejected; slime's names beside verl's."""
    if found.raw is not None and found.weights is not None:
        raw, applied = found.raw.double(), found.weights.double()
        low = section.low or 1.0 / section.high
        sums.add(
            rollout_is_mean=applied,
            rollout_is_square=applied**2,
            rollout_is_ratio_fraction_high=raw > section.high,
            rollout_is_ratio_fraction_low=raw < low,
            rollout_is_oob_ratio=(raw > section.high) | (raw < section.low),
        )
        sums.add_samples(rollout_is_seq_mean=sums.sequences.mean(applied, sums.mask))
        sums.maxima[f"{PREFIX}rollout_is_max"] = masked_max(applied, sums.mask)
        sums.tokens["tis"] = masked_sum(raw, sums.mask)
        sums.tokens["tis_abs"] = masked_sum((raw - 1.0).abs(), sums.mask)
        sums.tokens["tis_clipfrac"] = masked_sum((applied != raw).double(), sums.mask)
    for statistic, kept in {**found.by_statistic, **({"": found.kept} if found.by_statistic else {})}.items():
        name = f"rollout_rs_{statistic}_" if statistic else "rollout_rs_"
        rejected = (~kept).double()
        sums.add(**{f"{name}masked_fraction": rejected})
        sums.add_samples(**{f"{name}seq_masked_fraction": sums.sequences.max(select(rejected, sums.mask))})
    if found.dropped is not None:
        sums.samples["opsm_clipfrac"] = sums.sequences.max(select(found.dropped.double(), sums.mask)).sum()


def finish(metrics: Mapping[str, float]) -> dict[str, float]:
    """Adds deviation and effective sample size (a share of the tokens) of the weights, from means of them and their squares."""
    result = dict(metrics)
    square = result.pop(_SQUARE, None)
    if square is not None:
        mean = result[f"{PREFIX}rollout_is_mean"]
        result[f"{PREFIX}rollout_is_std"] = math.sqrt(max(square - mean**2, 0.0))
        result[f"{PREFIX}rollout_is_eff_sample_size"] = mean**2 / square if square else 0.0
    return result
