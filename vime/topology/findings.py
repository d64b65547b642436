"""What is wrong with a typed tree, said with file and line: a validator's errors put into words."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from vime.yamltree import Entries, Items, Node, Scalar, find, nearest, plain

Suggest = Callable[[tuple[str | int, ...], str], tuple[list[str], list[str]]]
"""(path of a section, unknown key) -> (names there, sections elsewhere with that very name)."""

_DOTTED = re.compile(r"[a-z_]+(?:\.[a-z_0-9]+)+")
_TYPE_WORDS = {
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
    "tuple_type": "a list",
    "list_type": "a list",
    "string_type": "text",
    "path_type": "a path",
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "int_from_float": "a whole number",
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """Something to tell the user that stops nothing, or the words of an error."""

    what: str
    where: str | None = None
    fix: str | None = None

    def __str__(self) -> str:
        place = f"{self.where}: " if self.where else ""
        return f"{place}{self.what}" + (f"\n  fix: {self.fix}" if self.fix else "")


def dotted(path: Iterable[str | int]) -> str:
    """`a.b.0.c`."""
    return ".".join(str(step) for step in path)


def describe_validation(invalid: ValidationError, tree: Node, suggest: Suggest) -> list[Finding]:
    """One finding for every place that pydantic complains about; a union's several complaints become one."""
    grouped: dict[tuple[str, str | None], list[tuple[str, str | None]]] = {}
    for error in invalid.errors(include_url=False):
        path, where = _locate(error, tree)
        grouped.setdefault((dotted(path), where), []).append(_words(error, path, tree, suggest))
    findings = []
    for (path, where), said in grouped.items():
        texts = list(dict.fromkeys(text for text, _ in said))
        fix = next((fix for _, fix in said if fix), None)
        findings.append(Finding(_sentence(path, texts), where, fix))
    return findings


def _sentence(path: str, texts: list[str]) -> str:
    wanted = [t.removeprefix("expected ").partition(", got ") for t in texts]
    if len(texts) > 1 and all(t.startswith("expected ") and got for t, (_, _, got) in zip(texts, wanted, strict=True)):
        texts = [f"expected {' or '.join(w for w, _, _ in wanted)}, got {wanted[0][2]}"]
    joined = "; ".join(texts)
    return joined if not path or f"`{path}`" in joined or path in joined.split() else f"`{path}`: {joined}"


def _locate(error: Any, tree: Node) -> tuple[tuple[str | int, ...], str]:
    """The path in the file and its place. A whole section's error names its key in the text: that key's line is better."""
    loc = error["loc"]
    seen, where = find(tree, loc)
    if error["type"] == "missing":
        seen, where = find(tree, loc[:-1])
        return (*seen, loc[-1]), str(where)
    if error["type"] == "value_error":
        for name in _DOTTED.findall(error["msg"]):
            deeper, place = find(tree, name.split("."))
            if dotted(deeper) == name:
                return deeper, str(place)
    return seen, str(where)


def _words(error: Any, path: tuple[str | int, ...], tree: Node, suggest: Suggest) -> tuple[str, str | None]:
    kind, name = error["type"], dotted(path)
    if kind == "missing":
        return f"missing key `{name}`", f"write `{path[-1]}:` into {_section(path)}"
    if kind == "extra_forbidden":
        names, homes = suggest(error["loc"][:-1], str(path[-1]))
        return f"unknown key `{name}`", _nearest_fix(str(path[-1]), names, homes)
    if kind == "value_error":
        return str(error["msg"]).removeprefix("Value error, "), None
    got = _as_written(tree, path, error["input"])
    if kind in ("string_type", "path_type") and isinstance(error["input"], bool | int | float):
        return f"expected {_TYPE_WORDS[kind]}, got {got}", f'write it in quotes: "{got}"'
    if kind in _TYPE_WORDS:
        return f"expected {_TYPE_WORDS[kind]}, got {got}", None
    if kind in ("literal_error", "union_tag_invalid", "union_tag_not_found"):
        return _choice(error, got)
    if kind == "too_short":
        least = error["ctx"]["min_length"]
        return f"expected at least {least} item{'' if least == 1 else 's'}", None
    message = str(error["msg"]).removeprefix("Input ")
    return f"{message}, got {got}", None


def _choice(error: Any, got: str) -> tuple[str, str | None]:
    """An enumeration, or the `kind` that picks a union's member."""
    context = error.get("ctx", {})
    if error["type"] == "union_tag_not_found":
        return "missing key `kind`, which picks the other keys", "write `kind:` into it"
    if error["type"] == "union_tag_invalid":
        expected, got = f"`kind` to be one of {context['expected_tags']}", repr(context["tag"])
        tried = context["tag"]
    else:
        expected, tried = context["expected"], str(error["input"])
    near = nearest(tried, re.findall(r"'([^']*)'", expected))
    return f"expected {expected}, got {got}", f"did you mean `{near}`?" if near else None


def _nearest_fix(key: str, names: list[str], homes: list[str]) -> str:
    near = nearest(key, names, cutoff=0.75)
    if near is None and homes:
        return f"`{key}` belongs to {' or '.join(f'`{home}`' for home in homes)}"
    near = near or nearest(key, names)
    if near is not None:
        return f"did you mean `{near}`?"
    return f"known keys: {', '.join(sorted(names))}" if names else "remove it"


def _section(path: tuple[str | int, ...]) -> str:
    return f"`{dotted(path[:-1])}`" if len(path) > 1 else "the file"


def _as_written(tree: Node, path: tuple[str | int, ...], value: Any) -> str:
    """What the reader wrote, short."""
    node: Node | None = tree
    for step in path:
        if isinstance(node, Entries):
            node = node.entries.get(str(step))
        elif isinstance(node, Items) and isinstance(step, int) and step < len(node.items):
            node = node.items[step]
    if isinstance(node, Scalar):
        return node.text if node.plain and plain(node) != node.text else repr(node.text)
    if isinstance(value, dict):
        return "a mapping"
    return "a list" if isinstance(value, list | tuple) else repr(value)
