"""REINFORCE leave-one-out: Ahmadian et al. 2024, arXiv:2402.14740. The baseline is the mean reward of the other answers."""

from __future__ import annotations

from torch import Tensor

from vime.algorithms.base import AdvantageBatch
from vime.algorithms.groups import leave_one_out, shaped
from vime.algorithms.policy import PolicyAlgorithm


class Rloo(PolicyAlgorithm):
    """Clipped loss over leave-one-out advantages; see `vime.algorithms.base.Algorithm`."""

    def token_advantages(self, batch: AdvantageBatch) -> Tensor:
        rewards, siblings = shaped(batch, self.section.overlong)
        return batch.sequences.spread(leave_one_out(rewards, siblings, batch.group_weights))
