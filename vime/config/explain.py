"""The schema and a loaded configuration, told to people."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic_core import PydanticUndefined

from vime.config.load import LoadedConfig
from vime.config.schema import Config
from vime.topology.structure import models_in, walk


@dataclass(frozen=True, slots=True)
class FieldDoc:
    """One key of the run file. `default` is text, `required` where there is none."""

    path: str
    type: str
    default: str
    description: str


def describe_schema() -> list[FieldDoc]:
    """Every key of the run file in schema order; the members of a union follow each other."""
    return list(_fields())


def _fields() -> Iterator[FieldDoc]:
    for path, model, name in walk(Config):
        field = model.model_fields[name]
        nested = models_in(field.annotation)
        text = field.description or (" or ".join((m.__doc__ or "").split("\n")[0] for m in nested) if nested else "")
        yield FieldDoc(".".join(path), _type_text(field.annotation), _default_text(field), text)


def _default_text(field: Any) -> str:
    if field.default_factory is not None:
        return "empty"
    if field.default is PydanticUndefined:
        return "required"
    if models_in(field.annotation):
        return "see its keys"
    if isinstance(field.default, bool):
        return str(field.default).lower()
    return "null" if field.default is None else str(field.default)


def _type_text(annotation: Any) -> str:
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _type_text(args[0])
    if origin is Literal:
        return " | ".join(str(a) for a in args)
    if origin is tuple:
        return f"list of {_type_text(args[0])}" if args[-1] is Ellipsis else f"list of {len(args)} {_type_text(args[0])}"
    if origin is dict:
        return "mapping"
    if args:
        return " | ".join(_type_text(a) for a in args)
    if isinstance(annotation, type) and issubclass(annotation, Path):
        return "path"
    words = {str: "text", bool: "boolean", int: "whole number", float: "number", type(None): "null"}
    return words.get(annotation, "section" if models_in(annotation) else getattr(annotation, "__name__", str(annotation)))


def explain_config(loaded: LoadedConfig) -> str:
    """Every given value with its origin, one a line; everything else has its default."""
    values = loaded.config.model_dump()
    rows = [(path, _value_text(values, path), source) for path, source in sorted(loaded.sources.items()) if path]
    width = max((len(path) for path, _, _ in rows), default=0)
    return "\n".join(f"{path:<{width}}  {value}  [{source}]" for path, value, source in rows)


def _value_text(values: Any, path: str) -> str:
    for step in path.split("."):
        values = values[int(step)] if isinstance(values, list | tuple) else values[step]
    return str(values)
