"""Which algorithm a section of the run file asks for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vime.algorithms.base import Algorithm
from vime.algorithms.grpo import Grpo
from vime.algorithms.sft import Sft
from vime.config.schema import GrpoSection, SftSection
from vime.errors import ConfigError

ALGORITHMS: dict[str, Callable[[Any], Algorithm]] = {"grpo": Grpo, "sft": Sft}


def algorithm_of(section: GrpoSection | SftSection) -> Algorithm:
    """Build the algorithm named by `section.kind`. Raises ConfigError for an unknown one."""
    if section.kind not in ALGORITHMS:
        raise ConfigError(f"unknown algorithm {section.kind}", fix=f"use one of: {', '.join(ALGORITHMS)}")
    return ALGORITHMS[section.kind](section)
