"""What a family of models has to say about itself."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any, Protocol

from vime.errors import ConfigError
from vime.facts.model import ModelShape


class Join(StrEnum):
    """How several Hugging Face tensors make one Megatron parameter.

    one: the same tensor. gate_up: two halves along dim 0. qkv: rows grouped by key-value head, each group holding its
    query heads, then its key head, then its value head.
    """

    ONE = "one"
    GATE_UP = "gate_up"
    QKV = "qkv"


@dataclass(frozen=True)
class NameRow:
    """One row of a name table.

    `megatron` is a parameter name with `{layer}` where the layer's number stands and `{expert}` where the expert's does;
    `names` are its Hugging Face parts. `tp_dim` is the dimension that tensor parallelism splits, inside an expert that of
    the experts (None: every rank holds all of it); `is_vocab` marks tensors whose dim 0 is the padded vocabulary, `is_buffer`
    those that no gradient reaches and that stay in float32.
    """

    megatron: str
    names: tuple[str, ...]
    join: Join = Join.ONE
    tp_dim: int | None = None
    is_vocab: bool = False
    is_buffer: bool = False

    @property
    def is_expert(self) -> bool:
        """The parameter belongs to one expert; expert parallelism spreads the experts over ranks."""
        return "{expert}" in self.megatron

    @property
    def is_router(self) -> bool:
        """The parameter scores experts."""
        return self.megatron.endswith(".router.weight")

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """Matches the Megatron name; groups `layer` and `expert` are the numbers in it."""
        return _pattern(self.megatron)

    @cached_property
    def part_patterns(self) -> tuple[re.Pattern[str], ...]:
        """Match the Hugging Face names, in the order of `names`."""
        return tuple(_pattern(name) for name in self.names)


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1's longer context: slow frequencies are divided by `factor`, fast ones kept, those between blended.

    Slow and fast are wavelengths beyond `positions / low` and below `positions / high`, where `positions` is the context
    before.
    """

    factor: float
    low: float
    high: float
    positions: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN (Peng et al. 2023, arXiv:2309.00071) with the two attention factors of DeepSeek."""

    factor: float
    positions: int
    beta_fast: float
    beta_slow: float
    mscale: float
    mscale_all_dim: float


@dataclass(frozen=True, slots=True)
class Rotary:
    """Rotary position embedding: `base` (theta), the share of a head's dimensions that it turns, and what stretches it."""

    base: float
    percent: float = 1.0
    scaling: Llama3Scaling | YarnScaling | None = None


@dataclass(frozen=True)
class NameTable:
    """Names in both directions. `tied` names hold no tensor of their own when embeddings are tied.

    `ignored` are names that folders may hold although no parameter stands for them.
    """

    rows: tuple[NameRow, ...]
    tied: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ("model.layers.{layer}.self_attn.rotary_emb.inv_freq",)

    @cached_property
    def ignored_patterns(self) -> tuple[re.Pattern[str], ...]:
        """Match the ignored names."""
        return tuple(_pattern(name) for name in self.ignored)

    def to_hf(self, megatron: str, *, layer_offset: int = 0, expert_offset: int = 0) -> tuple[NameRow, tuple[str, ...]]:
        """The row and Hugging Face names of a Megatron parameter.

        `layer_offset` is the first layer of its stage, `expert_offset` the first expert of its rank. Raises ConfigError for
        a parameter that the family does not know.
        """
        offsets = {"layer": layer_offset, "expert": expert_offset}
        for row in self.rows:
            if match := row.pattern.match(megatron):
                numbers = {key: str(int(number) + offsets[key]) for key, number in match.groupdict().items()}
                return row, tuple(_filled(name, numbers) for name in row.names)
        raise ConfigError(f"no Hugging Face name for the parameter {megatron}", fix="add a row to the family's name table")

    def to_megatron(self, name: str) -> tuple[NameRow, str, int]:
        """The row, the Megatron name (global numbers) and the position among its parts of a Hugging Face name.

        Raises ConfigError for a tensor that the family does not know.
        """
        for row in self.rows:
            for position, pattern in enumerate(row.part_patterns):
                if match := pattern.match(name):
                    return row, _filled(row.megatron, match.groupdict()), position
        raise ConfigError(f"no Megatron parameter for the tensor {name}", fix="add a row to the family's name table")


def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"\\{(layer|expert)\\}", r"(?P<\1>\\d+)", re.escape(name)) + r"\Z")


def _filled(name: str, numbers: Mapping[str, str]) -> str:
    for key, number in numbers.items():
        name = name.replace(f"{{{key}}}", number)
    return name


class Family(Protocol):
    """One file per family implements this and registers an instance."""

    @property
    def name(self) -> str: ...

    @property
    def architectures(self) -> tuple[str, ...]:
        """Names under `architectures` in config.json."""
        ...

    @property
    def table(self) -> NameTable: ...

    def shape(self, config: Mapping[str, Any]) -> ModelShape:
        """Sizes. Raises ConfigError for a missing or unsupported setting."""
        ...

    def rotary(self, config: Mapping[str, Any]) -> Rotary: ...

    def transformer_values(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """Fields of Megatron's transformer config, torch-free: `activation_func` is a name in torch.nn.functional."""
        ...


def require(config: Mapping[str, Any], key: str) -> Any:
    """`config[key]`, or a ConfigError naming the key."""
    if config.get(key) is None:
        raise ConfigError(f"config.json has no {key}", fix="use a complete Hugging Face model folder")
    return config[key]


def refuse(config: Mapping[str, Any], key: str, supported: object) -> None:
    """Raise ConfigError when a setting is present and differs from the only supported value."""
    value = config.get(key, supported)
    if value is not None and value != supported:
        raise ConfigError(
            f"config.json sets {key} to {value!r}; only {supported!r} is supported",
            fix="choose a model without it, or extend the family in vime/models/",
        )


def unknown_names(names: Iterable[str], table: NameTable, shape: ModelShape) -> list[str]:
    """Tensors of a folder that are no parameter of the model, in order.

    A layer for multi-token prediction (numbers from `shape.layers` on, `shape.frozen_layers` of them) is known whatever is in
    it: it is carried from folder to folder as it is.
    """
    return [name for name in names if not (is_carried(name, shape) or _is_known(name, table, shape))]


_LAYER_OF = re.compile(r"model\.layers\.(\d+)\.")


def is_carried(name: str, shape: ModelShape) -> bool:
    """Whether a tensor belongs to a layer for multi-token prediction, which nothing trains."""
    match = _LAYER_OF.match(name)
    return bool(match) and shape.layers <= int(match[1]) < shape.layers + shape.frozen_layers


def _is_known(name: str, table: NameTable, shape: ModelShape) -> bool:
    limits = {"layer": shape.layers, "expert": shape.experts}
    patterns = [pattern for row in table.rows for pattern in row.part_patterns]
    found = next((match for pattern in (*patterns, *table.ignored_patterns) if (match := pattern.match(name))), None)
    return found is not None and all(int(number) < limits[key] for key, number in found.groupdict().items())
