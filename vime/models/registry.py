"""From a model folder to its family and sizes. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vime.errors import ConfigError
from vime.facts.model import ModelShape
from vime.models import deepseek_v3, glm4_moe, llama, qwen2, qwen3, qwen3_moe
from vime.models.decoder import Decoder

FAMILIES: tuple[Decoder, ...] = (
    qwen2.FAMILY,
    qwen3.FAMILY,
    qwen3_moe.FAMILY,
    llama.FAMILY,
    glm4_moe.FAMILY,
    deepseek_v3.FAMILY,
)


def supported_architectures() -> tuple[str, ...]:
    """Every architecture name that some family takes."""
    return tuple(name for family in FAMILIES for name in family.architectures)


def family_of(config: Mapping[str, Any]) -> Decoder:
    """The family of a Hugging Face config. Raises ConfigError listing what is supported."""
    asked = tuple(config.get("architectures") or ())
    for family in FAMILIES:
        if any(name in family.architectures for name in asked):
            return family
    raise ConfigError(
        f"unsupported model architecture {', '.join(asked) or '(config.json names none)'}",
        fix=f"use one of: {', '.join(supported_architectures())}",
    )


def read_config(model_dir: Path | str) -> dict[str, Any]:
    """config.json of a Hugging Face folder. Raises ConfigError saying what is missing."""
    folder = Path(model_dir)
    path = folder / "config.json"
    if not folder.is_dir():
        raise ConfigError(f"model folder {folder} does not exist", fix="set model.path to a Hugging Face model folder")
    if not path.is_file():
        raise ConfigError(f"{folder} has no config.json", fix="set model.path to a Hugging Face model folder")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"not valid JSON: {error}", where=str(path)) from None
    if not isinstance(config, dict):
        raise ConfigError("expected a mapping at the top level", where=str(path))
    return config


def read_shape(model_dir: Path | str) -> ModelShape:
    """A folder's sizes. Raises ConfigError for a missing folder or an unsupported model."""
    config = read_config(model_dir)
    return family_of(config).shape(config)
