"""The policy's backbone with a scalar head in the place of the vocabulary's, under transformers' names.

The head is that of transformers' token classification with one label: `score.weight` [1, hidden] and `score.bias` [1], read
after the final norm. So a critic's folder opens with `AutoModelForTokenClassification`, and a reward model's head (without a
bias) can be a critic's first one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from vime.errors import ConfigError
from vime.facts.model import ModelShape
from vime.models.base import Family, NameRow, NameTable, Rotary
from vime.trainer.megatron.folders import TensorSource, drawn_source
from vime.trainer.megatron.model import Model, build_model
from vime.trainer.megatron.parallel import Axes
from vime.trainer.setup import TrainerSetup

WEIGHT, BIAS = "score.weight", "score.bias"


class ValueFamily:
    """A family whose models end in a scalar head; see `vime.models.base.Family`. Nothing is tied to the embeddings."""

    def __init__(self, family: Family) -> None:
        self._family = family
        self.name, self.architectures = family.name, family.architectures
        backbone = tuple(row for row in family.table.rows if not row.megatron.startswith("output_layer."))
        self.table = NameTable(
            rows=(*backbone, NameRow("output_layer.weight", (WEIGHT,)), NameRow("output_layer.bias", (BIAS,))),
            ignored=(*family.table.ignored, "lm_head.weight"),
        )

    def shape(self, config: Mapping[str, Any]) -> ModelShape:
        """The policy's sizes, with the head's parameters in place of an output layer's."""
        shape = self._family.shape(config)
        own_head = 0 if shape.tied_embeddings else shape.vocab * shape.hidden
        parameters = shape.parameters - own_head + shape.hidden + 1
        return dataclasses.replace(shape, tied_embeddings=False, parameters=parameters)

    def rotary(self, config: Mapping[str, Any]) -> Rotary:
        return self._family.rotary(config)

    def transformer_values(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        return self._family.transformer_values(config)


class ValueHead(torch.nn.Module):
    """`weight` [1, hidden] and `bias` [1], the same on every tensor-parallel rank."""

    def __init__(self, config: Any, device: torch.device) -> None:
        super().__init__()
        options: dict[str, Any] = {"dtype": config.params_dtype, "device": device}
        self.weight = torch.nn.Parameter(torch.empty(1, config.hidden_size, **options))
        self.bias = torch.nn.Parameter(torch.empty(1, **options))

    def values(self, hidden: Tensor) -> Tensor:
        """hidden [rows, hidden] -> [rows] float32."""
        return torch.nn.functional.linear(hidden.float(), self.weight.float(), self.bias.float())[:, 0]


def build_value_model(
    setup: TrainerSetup, *, axes: Axes, family: Family, hf_config: Mapping[str, Any], device: torch.device
) -> Model:
    """The model with undefined weights. Raises ConfigError or TrainerError when it does not fit the layout."""
    model = build_model(setup, axes=axes, family=ValueFamily(family), hf_config=hf_config, device=device)
    if model.select is not None:
        head: Any = ValueHead(model.config, device)
        head.forward = model.select
        model.bare.output_layer = head
    return model


def with_value_head(source: TensorSource, *, seed: int, std: float) -> TensorSource:
    """`source`, where it has no scalar head with one that is drawn: normal with deviation `std`, the bias 0."""
    draw = drawn_source(seed, std=std)

    def read(name: str, shape: tuple[int, ...]) -> Tensor:
        if name not in (WEIGHT, BIAS):
            return source(name, shape)
        try:
            return source(name, shape)
        except ConfigError:  # A policy's folder has no such tensor.
            return torch.zeros(shape) if name == BIAS else draw(name, shape)

    return read
