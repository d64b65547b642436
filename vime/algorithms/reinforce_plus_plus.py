"""REINFORCE++: Hu et al. 2025, arXiv:2501.03262. No critic; whitening over the whole batch is the baseline and the scale."""

from __future__ import annotations

from torch import Tensor

from vime.algorithms.base import AdvantageBatch
from vime.algorithms.groups import group_advantages, shaped
from vime.algorithms.policy import PolicyAlgorithm
from vime.algorithms.returns import discounted_sums, kl_in_reward, placed, token_rewards
from vime.config.algorithms import ReinforcePlusPlusSection


class ReinforcePlusPlus(PolicyAlgorithm):
    """Clipped loss over discounted returns; see `vime.algorithms.base.Algorithm`."""

    def __init__(self, section: ReinforcePlusPlusSection) -> None:
        super().__init__(section)
        self._gamma = section.gamma

    def token_advantages(self, batch: AdvantageBatch) -> Tensor:
        """Discounted sums of what follows: the reward at the end, minus the divergence on the way."""
        rewards, _ = shaped(batch, self.section.overlong)
        by_token, at, samples = token_rewards(batch, rewards, self.section)
        return placed(discounted_sums(by_token, samples, self._gamma), at, batch.mask)


class ReinforcePlusPlusBaseline(PolicyAlgorithm):
    """Clipped loss over rewards less the group's mean; see `vime.algorithms.base.Algorithm`."""

    def token_advantages(self, batch: AdvantageBatch) -> Tensor:
        """Every token gets its sample's centred reward, minus its own divergence where that is in the reward."""
        rewards, siblings = shaped(batch, self.section.overlong)
        centred = group_advantages(rewards, siblings, batch.group_weights, normalize_std=False)
        return batch.sequences.spread(centred) - kl_in_reward(batch, self.section.kl)
