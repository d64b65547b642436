"""Which algorithm a section of the run file asks for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vime.algorithms.base import Algorithm
from vime.algorithms.cispo import Cispo
from vime.algorithms.distill import Distill
from vime.algorithms.grpo import Grpo
from vime.algorithms.gspo import Gspo
from vime.algorithms.ppo import Ppo
from vime.algorithms.reinforce_plus_plus import ReinforcePlusPlus, ReinforcePlusPlusBaseline
from vime.algorithms.rloo import Rloo
from vime.algorithms.sft import Sft
from vime.config.algorithms import AnyAlgorithm
from vime.errors import ConfigError

ALGORITHMS: dict[str, Callable[[Any], Algorithm]] = {
    "grpo": Grpo,
    "gspo": Gspo,
    "cispo": Cispo,
    "ppo": Ppo,
    "reinforce_plus_plus": ReinforcePlusPlus,
    "reinforce_plus_plus_baseline": ReinforcePlusPlusBaseline,
    "rloo": Rloo,
    "distill": Distill,
    "sft": Sft,
}


def algorithm_of(section: AnyAlgorithm) -> Algorithm:
    """Build the algorithm named by `section.kind`. Raises ConfigError for an unknown one."""
    if section.kind not in ALGORITHMS:
        raise ConfigError(f"unknown algorithm {section.kind}", fix=f"use one of: {', '.join(ALGORITHMS)}")
    return ALGORITHMS[section.kind](section)
