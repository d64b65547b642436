"""Against the difference between the policy that is trained and the one that sampled: weights, rejections, sequence masks.

Truncated importance sampling: Yao et al. 2025, https://fengyao.notion.site/off-policy-rl. Masked weights: IcePop (Ling team
2025, arXiv:2510.18855) by token, MIS (Liu, Li et al. 2025, https://richardli.xyz/rl-collapse) by sequence; the statistics of
rejections are those of that text as verl names them. Off-policy sequence masking: DeepSeek-V3.2, arXiv:2512.02556.
Denominators stay: what is rejected counts as a token of loss 0, so that the result does not depend on the split of the work.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from vime.algorithms.base import TokenBatch, bounded_ratio, select
from vime.algorithms.kl import divergence
from vime.algorithms.losses import sequence_log_ratio
from vime.algorithms.sequences import Sequences
from vime.config.corrections import CorrectionSection, RejectSection


@dataclass(frozen=True)
class Corrected:
    """`raw` and `weights` [tokens]: importance weights before and after their bounds, None without.

    `kept` [tokens] bool is what no rejection takes, `by_statistic` the same of each alone; `dropped` [tokens] bool is what the
    sequence mask leaves out.
    """

    raw: Tensor | None
    weights: Tensor | None
    kept: Tensor
    by_statistic: Mapping[str, Tensor]
    dropped: Tensor | None

    @property
    def factor(self) -> Tensor:
        """[tokens]: what the policy loss is multiplied by."""
        kept = self.kept if self.dropped is None else self.kept & ~self.dropped
        ones = torch.ones(kept.shape, device=kept.device)
        return torch.where(kept, ones if self.weights is None else self.weights, torch.zeros_like(ones))


@torch.no_grad()
def corrected(batch: TokenBatch, section: CorrectionSection) -> Corrected:
    """What a section does to the tokens of a micro-batch."""
    mask, sequences = batch.mask, batch.sequences
    log_ratio = select(batch.policy_log_probs, mask) - select(batch.rollout_log_probs, mask)
    raw = weights = None
    if section.level is not None:
        raw = importance_ratio(log_ratio, mask, sequences, level=section.level)
        weights = bounded(raw, section)
    kept = torch.ones_like(mask)
    by_statistic: dict[str, Tensor] = {}
    for rule in section.reject:
        keep = keeps(log_ratio, mask, sequences, rule)
        kept = kept & keep
        by_statistic[rule.statistic] = by_statistic.get(rule.statistic, keep) & keep
    dropped = None if section.opsm_delta is None else off_policy(batch, section.opsm_delta)
    return Corrected(raw, weights, kept, by_statistic, dropped)


def importance_ratio(log_ratio: Tensor, mask: Tensor, sequences: Sequences, *, level: str) -> Tensor:
    """Ratio of trainer to sampler at every token; log_ratio, mask [tokens] -> [tokens]."""
    if level == "sequence":
        return bounded_ratio(sequences.spread(sequences.sum(select(log_ratio, mask))))
    if level == "geometric":
        return bounded_ratio(sequence_log_ratio(log_ratio, mask, sequences))
    return bounded_ratio(log_ratio)


def bounded(ratio: Tensor, section: CorrectionSection) -> Tensor:
    """Weights [tokens] from ratios [tokens]: moved to the bounds, or 0 outside."""
    if section.bounds == "truncate":
        return ratio.clamp(section.low, section.high)
    inside = (ratio >= section.low) & (ratio <= section.high)
    return torch.where(inside, ratio, torch.zeros_like(ratio))


def keeps(log_ratio: Tensor, mask: Tensor, sequences: Sequences, rule: RejectSection) -> Tensor:
    """[tokens] bool: where a statistic of the log-ratio [tokens], trainer to sampler, stays within its bounds.

    The sampler drew the tokens, so k2 and k3 estimate its divergence from the trainer; k1 bounds the ratio itself.
    """
    scope, _, estimator = rule.statistic.rpartition("_")
    value = select(log_ratio if estimator == "k1" else divergence(-log_ratio, estimator), mask)
    if scope == "seq_sum":
        value = sequences.spread(sequences.sum(value))
    elif scope == "seq_mean":
        value = sequences.spread(sequences.mean(value, mask))
    elif scope == "seq_max":
        value = sequences.spread(sequences.max(value))
    if estimator == "k1":
        low = 1.0 / rule.high if rule.low is None else rule.low
        return (value >= math.log(low)) & (value <= math.log(rule.high))
    return value <= rule.high


def off_policy(batch: TokenBatch, delta: float) -> Tensor:
    """[tokens] bool: negative advantage in a response whose mean log-ratio, old minus current, is above `delta`."""
    moved = select(batch.old_log_probs, batch.mask) - select(batch.log_probs, batch.mask)
    far = sequence_log_ratio(moved, batch.mask, batch.sequences) > delta
    return far & (select(batch.advantages, batch.mask) < 0)
