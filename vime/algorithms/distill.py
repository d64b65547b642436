"""On-policy distillation: Agarwal et al. 2023, arXiv:2306.13649; as a policy gradient, Thinking Machines Lab 2025,
https://thinkingmachines.ai/blog/on-policy-distillation. The student samples, the teacher scores each of its tokens.
"""

from __future__ import annotations

from torch import Tensor

from vime.algorithms.base import AdvantageBatch
from vime.algorithms.grpo import Grpo
from vime.config.algorithms import DistillSection


class Distill(Grpo):
    """Clipped loss over teacher minus student; see `vime.algorithms.base.Algorithm`."""

    def __init__(self, section: DistillSection) -> None:
        super().__init__(section)
        self._teacher_coef, self._reward_coef = section.teacher_coef, section.reward_coef

    def token_advantages(self, batch: AdvantageBatch) -> Tensor:
        """teacher_coef x (teacher's minus sampler's log-prob) of each token, plus reward_coef x its sample's advantage."""
        found = self._teacher_coef * (batch.teacher_log_probs.double() - batch.rollout_log_probs.double())
        if not self._reward_coef:
            return found
        return found + self._reward_coef * super().token_advantages(batch)
