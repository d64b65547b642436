from __future__ import annotations

import collections.abc
import dataclasses
import inspect
import types
import typing
from pathlib import Path

import pytest

from vime.hooks import document
from vime.hooks.specs import RULES, Kind, VimeSpecs, first_line, hook_names
from vime.platforms.strict import Shape, shape_of

ROOT = Path(__file__).parents[3]


def test_every_hook_has_a_rule_in_the_same_order() -> None:
    assert tuple(RULES) == hook_names()


@pytest.mark.parametrize("hook", hook_names())
def test_a_hooks_first_line_and_kind_are_documented(hook: str) -> None:
    doc = inspect.getdoc(getattr(VimeSpecs, hook)) or ""
    line, rule = first_line(hook), RULES[hook]
    assert line.endswith(".")
    assert len(line.split()) >= 4
    assert rule.kind.capitalize() in doc
    assert rule.required == ("required" in line)


@pytest.mark.parametrize("hook", hook_names())
def test_pluggys_mark_agrees_with_the_kind(hook: str) -> None:
    options = getattr(VimeSpecs, hook).vime_spec
    assert options["firstresult"] == (RULES[hook].kind is Kind.FIRST)
    assert not options["historic"]


def element_types(hook: str) -> set[type]:
    hint = typing.get_type_hints(getattr(VimeSpecs, hook))["return"]
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    if origin is collections.abc.Mapping:
        assert inside[0] is str
        return {inside[1]}
    if origin is collections.abc.Iterable:
        return set(inside)
    return set(inside) - {type(None)} if origin in (types.UnionType, typing.Union) else {hint}


@pytest.mark.parametrize("hook", hook_names())
def test_the_rules_types_are_those_of_the_annotation(hook: str) -> None:
    assert element_types(hook) == set(RULES[hook].returns)
    assert all(dataclasses.is_dataclass(kind) for kind in RULES[hook].returns)


def test_shapes() -> None:
    assert shape_of("vime_process_env") is Shape.MAPPING
    assert shape_of("vime_transports") is Shape.ITEMS
    assert shape_of("vime_inventory") is Shape.VALUE
    assert shape_of("vime_vllm_defaults") is Shape.VALUE


def test_the_reference_page_is_up_to_date() -> None:
    command = "python -c \"from vime.hooks.document import render; open('docs/hooks.md', 'w').write(render())\""
    assert (ROOT / "docs" / "hooks.md").read_text() == document.render(), f"write it again: {command}"


def test_the_reference_page_tells_every_hook_once() -> None:
    page = document.render()
    assert tuple(hook for hooks in document.FAMILIES.values() for hook in hooks) == hook_names()
    for hook in hook_names():
        assert page.count(f"\n### {hook}\n") == 1
        assert first_line(hook) in page
    assert "def vime_transports(edge: Edge, side: Side) -> Iterable[TransportOffer]" in page
