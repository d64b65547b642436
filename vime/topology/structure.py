"""What the schema looks like, read from the schema itself: fields by path, homes of a name, fields that hold paths."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel

Model = type[BaseModel]


def _members(annotation: Any) -> Iterator[Any]:
    """The plain types inside Annotated, unions and lists."""
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        yield from _members(typing.get_args(annotation)[0])
    elif origin in (typing.Union, types.UnionType, tuple, list):
        for part in typing.get_args(annotation):
            yield from _members(part)
    elif origin is dict:
        yield from _members(typing.get_args(annotation)[1])
    else:
        yield annotation


def models_in(annotation: Any) -> list[Model]:
    """The sections that an annotation may hold."""
    return [m for m in _members(annotation) if isinstance(m, type) and issubclass(m, BaseModel)]


def _is_tag(model: Model, step: str | int) -> bool:
    kind = model.model_fields.get("kind")
    return kind is not None and typing.get_origin(kind.annotation) is Literal and step in typing.get_args(kind.annotation)


def models_at(root: Model, path: Sequence[str | int]) -> list[Model]:
    """The sections at a path; list positions are passed over and a union's tag picks its member."""
    models = [root]
    for step in path:
        if isinstance(step, int):
            continue
        fields = [m.model_fields[step] for m in models if step in m.model_fields]
        if fields:
            models = [found for f in fields for found in models_in(f.annotation)]
        else:
            models = [m for m in models if _is_tag(m, step)] or models
    return models


def names_of(model: Model) -> list[str]:
    """The keys of a section as they are written in a file."""
    return [field.alias or name for name, field in model.model_fields.items()]


def fields_at(root: Model, path: Sequence[str | int]) -> list[str]:
    """Names of the fields at a path."""
    return sorted({name for model in models_at(root, path) for name in names_of(model)})


def walk(root: Model, above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Model, str]]:
    """Every field as (path, section, name); `*` stands for a list position. A union's members are walked in turn."""
    for name, field in root.model_fields.items():
        path = (*above, field.alias or name)
        yield path, root, name
        listed = typing.get_origin(field.annotation) in (tuple, list)
        for model in models_in(field.annotation):
            yield from walk(model, (*path, "*") if listed else path)


@cache
def path_fields(root: Model) -> tuple[tuple[str, ...], ...]:
    """Paths of the fields that hold a file or folder."""
    found = (path for path, model, name in walk(root) if Path in set(_members(model.model_fields[name].annotation)))
    return tuple(dict.fromkeys(found))


def homes_of(root: Model, name: str) -> list[str]:
    """Sections that have a field of this name, as dotted paths."""
    return sorted({".".join(path[:-1]) for path, _, _ in walk(root) if path[-1] == name and len(path) > 1})


def field_at(root: Model, path: Sequence[str | int]) -> Any:
    """The pydantic field at a path, or None."""
    for model in models_at(root, path[:-1]):
        for name, field in model.model_fields.items():
            if path and (field.alias or name) == path[-1]:
                return field
    return None
