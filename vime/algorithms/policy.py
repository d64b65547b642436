"""What all algorithms with a policy loss share: ratio, corrections, divergence, entropy, metrics."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from vime.algorithms import custom, mismatch
from vime.algorithms.base import (
    AdvantageBatch,
    LossSums,
    Reduce,
    TokenBatch,
    bounded_ratio,
    empty_batch,
    masked_max,
    masked_sum,
    select,
)
from vime.algorithms.corrections import corrected
from vime.algorithms.kl import divergence, kl_loss
from vime.algorithms.losses import clipped_loss
from vime.algorithms.returns import whiten
from vime.compat.functions import load_function
from vime.config.algorithms import PolicySection, needs_of


class PolicyAlgorithm(ABC):
    """See `vime.algorithms.base.Algorithm`. An algorithm says what its advantages are and, where it differs from the clipped
    loss, what a token's loss is.
    """

    needs_rollout_log_probs = True
    needs_advantages = True

    def __init__(self, section: PolicySection) -> None:
        self.section = section
        needs = needs_of(section)
        self.needs_reference, self.needs_values = "reference" in needs, "values" in needs
        self.needs_teacher = "teacher" in needs
        self.loss_mean: str = section.loss_mean
        self.loss_tokens = section.loss_tokens
        self.needs_old_log_probs = section.old_log_probs == "recompute"
        self.needs_old_for_advantages = self.needs_old_log_probs and section.advantage_function is not None
        self.needs_entropy_gradient = section.entropy_coef > 0 or section.loss_function is not None
        self._advantage_function = _function(section.advantage_function, "algorithm.advantage_function")
        self._loss_function = _function(section.loss_function, "algorithm.loss_function")
        self._correction_function = _function(section.correction.function, "algorithm.correction.function")

    # ---- what an algorithm says

    @abstractmethod
    def token_advantages(self, batch: AdvantageBatch) -> Tensor:
        """[tokens] float64, before whitening; what stands at masked tokens has no effect."""

    def token_loss(self, log_ratio: Tensor, batch: TokenBatch) -> tuple[Tensor, Tensor]:
        """log_ratio [tokens] = current minus old, 0 where masked -> loss [tokens], whether a clip binds [tokens] bool."""
        section = self.section
        return clipped_loss(
            log_ratio,
            select(batch.advantages, batch.mask),
            clip_low=section.clip_low,
            clip_high=section.clip_high,
            dual_clip=getattr(section, "dual_clip", None),
        )

    # ---- what the trainer calls

    def advantages(self, batch: AdvantageBatch, reduce: Reduce) -> Tensor:
        function = self._advantage_function
        found = custom.advantages_of(function, self.section, batch) if function else self.token_advantages(batch)
        if self.section.whiten:
            found = whiten(found, batch.mask, reduce)
        return select(found, batch.mask).float()

    def loss(self, batch: TokenBatch) -> LossSums:
        """Policy loss minus `entropy_coef` times entropy plus `kl.coef` times divergence; fields of `batch` are [tokens]."""
        mask, section = batch.mask, self.section
        log_ratio = select(batch.log_probs, mask) - select(batch.old_log_probs, mask)
        sums = mismatch.Sums(mask, batch.sequences)
        policy_loss, clipped = self._policy_loss(log_ratio, batch, sums)
        weighted = {"pg_loss": policy_loss.detach()}
        loss = policy_loss
        if section.entropy_coef:
            loss = loss - section.entropy_coef * masked_sum(batch.entropy, mask, batch.weights)
        if self.needs_reference and section.kl.use == "loss":
            divergence_loss = masked_sum(self._kl(log_ratio, batch), mask, batch.weights)
            loss = loss + section.kl.coef * divergence_loss
            weighted["kl_loss"] = divergence_loss.detach()
        self._measure(log_ratio.detach(), clipped, batch, sums)
        return LossSums(
            loss=loss,
            tokens=mask.sum(),
            weighted={"loss": loss.detach(), **weighted},
            token_sums=sums.tokens,
            token_maxima=sums.maxima,
            sequences=sums.trained.sum(),
            sequence_sums=sums.samples,
        )

    def empty_sums(self) -> LossSums:
        return self.loss(empty_batch())

    def finish(self, metrics: Mapping[str, float]) -> dict[str, float]:
        return mismatch.finish(metrics)

    # ---- parts of the loss

    def _policy_loss(self, log_ratio: Tensor, batch: TokenBatch, sums: mismatch.Sums) -> tuple[Tensor, Tensor]:
        """Scalar, and where a clip binds [tokens]; metrics of corrections go into `sums`."""
        mask = batch.mask
        if self._loss_function is not None:
            loss, found = custom.loss_of(self._loss_function, self.section, batch)
            sums.tokens.update(found)
            return loss, torch.zeros_like(mask)
        token_loss, clipped = self.token_loss(log_ratio, batch)
        correction = self.section.correction
        applied = corrected(batch, correction)
        mismatch.weights(sums, applied, correction)
        token_loss = token_loss * applied.factor
        if self._correction_function is not None:
            token_loss, kept, found = custom.correct(self._correction_function, self.section, batch, token_loss)
            sums.tokens.update(found)
            token_loss = select(token_loss, kept)
        return masked_sum(token_loss, mask, batch.weights), clipped

    def _kl(self, log_ratio: Tensor, batch: TokenBatch) -> Tensor:
        """[tokens] with gradient."""
        assert batch.ref_log_probs is not None
        kl, mask = self.section.kl, batch.mask
        ratio = bounded_ratio(log_ratio) if kl.unbiased else None
        return kl_loss(select(batch.log_probs, mask), select(batch.ref_log_probs, mask), kl.estimator, ratio=ratio)

    @torch.no_grad()
    def _measure(self, log_ratio: Tensor, clipped: Tensor, batch: TokenBatch, sums: mismatch.Sums) -> None:
        mask, policy, rollout = batch.mask, batch.policy_log_probs, batch.rollout_log_probs
        difference = (select(policy, mask) - select(rollout, mask)).abs()
        values = {
            "entropy_loss": batch.entropy,
            "pg_clipfrac": clipped,
            "ppo_kl": -log_ratio,
            "ois": bounded_ratio(log_ratio),
            "train_rollout_logprob_abs_diff": difference,
            "rollout/advantages": batch.advantages,
            "rollout/log_probs": policy,
            "rollout/rollout_log_probs": rollout,
        }
        if self.needs_reference and batch.ref_log_probs is not None:
            away = select(policy, mask) - select(batch.ref_log_probs, mask)
            values |= {"rollout/ref_log_probs": batch.ref_log_probs, "rollout/kl": divergence(away, self.section.kl.estimator)}
        if self.needs_teacher and batch.teacher_log_probs is not None:
            values["rollout/teacher_log_probs"] = batch.teacher_log_probs
            values["rollout/opd_reverse_kl"] = select(policy, mask) - select(batch.teacher_log_probs, mask)
        sums.tokens.update({name: masked_sum(value.double(), mask) for name, value in values.items()})
        sums.maxima["train_rollout_logprob_abs_diff_max"] = masked_max(difference, mask)
        mismatch.differences(sums, policy, rollout)


def _function(path: str | None, setting: str) -> Callable[..., Any] | None:
    return None if path is None else load_function(path, setting=setting)
