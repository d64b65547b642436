"""Proximal policy optimisation: Schulman et al. 2017, arXiv:1707.06347, with advantages from a critic's values."""

from __future__ import annotations

from torch import Tensor

from vime.algorithms.base import AdvantageBatch
from vime.algorithms.critic import raw_advantages
from vime.algorithms.policy import PolicyAlgorithm
from vime.algorithms.returns import placed
from vime.config.algorithms import PpoSection


class Ppo(PolicyAlgorithm):
    """Clipped loss over generalised advantages; see `vime.algorithms.base.Algorithm`."""

    def __init__(self, section: PpoSection) -> None:
        super().__init__(section)
        self._ppo = section

    def token_advantages(self, batch: AdvantageBatch) -> Tensor:
        found, at = raw_advantages(batch, self._ppo)
        return placed(found, at, batch.mask)
