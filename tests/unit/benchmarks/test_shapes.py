"""Shapes of benchmarks: their tensors are those that the family implies."""

from __future__ import annotations

import math

import pytest

from vime.benchmarks.shapes import SHAPES
from vime.data.tiny_model import tiny_config, tiny_sizes
from vime.models.registry import family_of


@pytest.mark.parametrize("name", SHAPES)
def test_tensors_and_config_agree(name: str) -> None:
    config = tiny_config(SHAPES[name], dtype="bfloat16")
    family = family_of(config)
    sizes = dict(tiny_sizes(SHAPES[name]))
    assert sum(math.prod(size) for size in sizes.values()) == family.shape(config).parameters
    for tensor in sizes:
        family.table.to_megatron(tensor)
