"""Group-relative policy optimisation: Shao et al. 2024, DeepSeekMath, arXiv:2402.03300.

Its variants are settings: Dr. GRPO (Liu et al. 2025, arXiv:2503.20783) leaves out the deviation (`normalize_std: false`) and
the length (`loss_mean: constant`); DAPO (Yu et al. 2025, arXiv:2503.14476) has a higher upper clip, token means and the
overlong penalty.
"""

from __future__ import annotations

from torch import Tensor

from vime.algorithms.base import AdvantageBatch
from vime.algorithms.groups import group_advantages, shaped
from vime.algorithms.policy import PolicyAlgorithm
from vime.config.algorithms import GroupedSection


class Grpo(PolicyAlgorithm):
    """Clipped loss over group-relative advantages; see `vime.algorithms.base.Algorithm`. What has these advantages too is
    derived from it.
    """

    def __init__(self, section: GroupedSection) -> None:
        super().__init__(section)
        self._normalize_std = section.normalize_std

    def token_advantages(self, batch: AdvantageBatch) -> Tensor:
        """Every token gets its sample's advantage, that of the shaped rewards."""
        rewards, siblings = shaped(batch, self.section.overlong)
        values = group_advantages(rewards, siblings, batch.group_weights, normalize_std=self._normalize_std)
        return batch.sequences.spread(values)
