"""YAML as nodes that know their file and line, and the meaning of plain scalars.

Plain scalars follow YAML 1.2's core rules as people read them: `1e-6` and `1e6` are numbers; `on`, `yes`, `010`, `08`,
`1_000` and `1:30:00` stay text, which a typed field may still take for a boolean or a number. Keys are always text.
Duplicate keys and tags are errors.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from vime.errors import ConfigError, Errors, VimeError

_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]{0,300})")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NULLS = frozenset({"", "~", "null", "Null", "NULL"})
_BOOLEANS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_SPECIAL = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_STANDARD_TAG = "tag:yaml.org,2002:"
_RESOLVER = yaml.resolver.Resolver()


@dataclass(frozen=True, slots=True)
class Where:
    """A place in a file; line 0 is a place without lines, such as an override on the command line."""

    file: str
    line: int = 0

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.line else self.file


@dataclass(frozen=True, slots=True)
class Scalar:
    """One value as written. `plain` is false for quoted text, which is never read as a number or boolean."""

    where: Where
    text: str
    plain: bool = True


@dataclass(frozen=True, slots=True)
class Value:
    """A value that never was YAML text (from a flag's converter); taken as it is."""

    where: Where
    value: Any


@dataclass(frozen=True, slots=True)
class Items:
    """A list."""

    where: Where
    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Entries:
    """A mapping in file order; `keys` says where each key stands."""

    where: Where
    entries: Mapping[str, Node]
    keys: Mapping[str, Where] = field(default_factory=dict)


Node: TypeAlias = Scalar | Value | Items | Entries


def resolve(text: str) -> Any:
    """What an unquoted scalar means: None, a boolean, a number, or the text itself."""
    if text in _NULLS:
        return None
    if text in _BOOLEANS:
        return _BOOLEANS[text]
    if _INTEGER.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    if _SPECIAL.fullmatch(text):
        return float(text.replace(".", ""))
    return text


def plain(node: Node) -> Any:
    """The node as Python values."""
    match node:
        case Scalar():
            return resolve(node.text) if node.plain else node.text
        case Value():
            return node.value
        case Items():
            return [plain(item) for item in node.items]
        case Entries():
            return {key: plain(value) for key, value in node.entries.items()}


def quoted(node: Node) -> Node:
    """The node with every scalar as the text that was written, as if it stood in quotes (environment variables)."""
    match node:
        case Scalar():
            return Scalar(node.where, node.text, plain=False)
        case Items():
            return Items(node.where, tuple(quoted(item) for item in node.items))
        case Entries():
            return Entries(node.where, {key: quoted(value) for key, value in node.entries.items()}, node.keys)
        case Value():
            return node


def replace_at(tree: Node, path: tuple[str, ...], value: Node) -> Node:
    """The tree with another node at an existing path through mappings."""
    if not path:
        return value
    assert isinstance(tree, Entries)
    return Entries(tree.where, {**tree.entries, path[0]: replace_at(tree.entries[path[0]], path[1:], value)}, tree.keys)


def from_value(value: Any, where: Where) -> Node:
    """Nodes for Python values that did not come from a file."""
    if isinstance(value, Mapping):
        entries = {str(key): from_value(item, where) for key, item in value.items()}
        return Entries(where, entries, dict.fromkeys(entries, where))
    if isinstance(value, list | tuple):
        return Items(where, tuple(from_value(item, where) for item in value))
    return Value(where, value)


def parse(text: str, file: str, *, error: type[VimeError] = ConfigError) -> Node:
    """Compose one YAML document. Raises `error` or Errors, each with file and line."""
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as cause:
        raise error(_problem(cause), where=_mark(cause, file), fix="mend the YAML at this line") from None
    except RecursionError:
        raise error("nested too deeply", where=file, fix="flatten the file") from None
    if root is None:
        return Entries(Where(file, 1), {})
    reader = _Reader(file, error)
    node = reader.read(root, ())
    if reader.errors:
        raise reader.errors[0] if len(reader.errors) == 1 else Errors(reader.errors)
    return node


def read(path: Path, *, error: type[VimeError] = ConfigError) -> Node:
    """Compose a file. Raises `error` when it cannot be read or is not YAML."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise error(f"no such file: {path}", fix="check the path") from None
    except UnicodeDecodeError as cause:
        raise error(f"{path} is not UTF-8 text: {cause.reason}", where=str(path), fix="save it as UTF-8") from None
    except OSError as cause:
        raise error(f"cannot read {path}: {cause.strerror}", fix="check the path and its permissions") from None
    return parse(text, str(path), error=error)


def _problem(cause: yaml.YAMLError) -> str:
    problem = getattr(cause, "problem", None) or getattr(cause, "reason", None) or str(cause)
    context = getattr(cause, "context", None)
    return f"not valid YAML: {problem}" + (f" {context}" if context else "")


def _mark(cause: yaml.YAMLError, file: str) -> str:
    mark = getattr(cause, "problem_mark", None) or getattr(cause, "context_mark", None)
    return str(Where(file, mark.line + 1 if mark else 0))


def _implied_tags(node: yaml.Node) -> tuple[str, ...]:
    """The tags a node may have without one being written: PyYAML does not keep the difference."""
    if isinstance(node, yaml.ScalarNode):
        is_plain = node.style is None
        return (_RESOLVER.resolve(yaml.ScalarNode, node.value, (is_plain, not is_plain)),)
    return (f"{_STANDARD_TAG}{'map' if isinstance(node, yaml.MappingNode) else 'seq'}",)


class _Reader:
    """Turns PyYAML's nodes into ours and collects what is wrong."""

    def __init__(self, file: str, error: type[VimeError]) -> None:
        self.file, self.error = file, error
        self.errors: list[VimeError] = []
        self._done: dict[int, Node] = {}

    def read(self, node: yaml.Node, above: tuple[int, ...]) -> Node:
        where = Where(self.file, node.start_mark.line + 1)
        if id(node) in above:
            self._fail(where, "an alias inside the value it stands for", "write the value out")
            return Scalar(where, "")
        if id(node) not in self._done:
            if node.tag not in _implied_tags(node):
                self._fail(where, f"the tag {node.tag!r} is not allowed", "write the plain value, in quotes if it is text")
            self._done[id(node)] = self._convert(node, where, (*above, id(node)))
        return self._done[id(node)]

    def _convert(self, node: yaml.Node, where: Where, above: tuple[int, ...]) -> Node:
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, where, above)
        if isinstance(node, yaml.SequenceNode):
            return Items(where, tuple(self.read(item, above) for item in node.value))
        assert isinstance(node, yaml.ScalarNode)
        return Scalar(where, str(node.value), plain=node.style is None)

    def _mapping(self, node: yaml.MappingNode, where: Where, above: tuple[int, ...]) -> Entries:
        entries: dict[str, Node] = {}
        keys: dict[str, Where] = {}
        merged: list[tuple[Entries, Where]] = []
        for key_node, value_node in node.value:
            at = Where(self.file, key_node.start_mark.line + 1)
            if not isinstance(key_node, yaml.ScalarNode):
                self._fail(at, "a key must be text", "use a plain word as the key")
                continue
            key, value = str(key_node.value), self.read(value_node, above)
            if key_node.tag == f"{_STANDARD_TAG}merge":
                merged += [(part, at) for part in self._merge_parts(value, at)]
            elif key in entries:
                self._fail(at, f"the key `{key}` is written twice (first at line {keys[key].line})", "remove one of them")
            else:
                entries[key], keys[key] = value, at
        for part, _ in merged:
            for key, value in part.entries.items():
                if key not in entries:
                    entries[key], keys[key] = value, part.keys[key]
        return Entries(where, entries, keys)

    def _merge_parts(self, value: Node, at: Where) -> list[Entries]:
        parts = value.items if isinstance(value, Items) else (value,)
        good = [part for part in parts if isinstance(part, Entries)]
        if len(good) != len(parts):
            self._fail(at, "`<<` takes a mapping or a list of mappings", "refer to a mapping")
        return good

    def _fail(self, where: Where, what: str, fix: str) -> None:
        self.errors.append(self.error(what, where=str(where), fix=fix))


# ---- places


def find(node: Node, path: Iterable[str | int]) -> tuple[tuple[str | int, ...], Where]:
    """Follow a key path as far as it exists, passing over steps that name nothing (union tags of a validator).

    Returns the steps that exist and where the last of them stands (a mapping's key rather than its value).
    """
    seen: list[str | int] = []
    where = node.where
    for step in path:
        if isinstance(node, Entries) and str(step) in node.entries:
            where = node.keys.get(str(step), node.where)
            node = node.entries[str(step)]
        elif isinstance(node, Items) and isinstance(step, int) and 0 <= step < len(node.items):
            node = node.items[step]
            where = node.where
        else:
            continue
        seen.append(step)
    return tuple(seen), where


def get(node: Node | None, path: Iterable[str]) -> Node | None:
    """The node at an exact path through mappings, or None."""
    for step in path:
        if not isinstance(node, Entries) or step not in node.entries:
            return None
        node = node.entries[step]
    return node


def leaves(node: Node, above: tuple[str, ...] = ()) -> Iterator[tuple[str, Where]]:
    """Dotted path and place of every value that is not a mapping; list items are numbered. Empty mappings count."""
    if isinstance(node, Entries) and node.entries:
        for key, value in node.entries.items():
            yield from leaves(value, (*above, key))
    elif isinstance(node, Items) and node.items:
        for index, item in enumerate(node.items):
            yield from leaves(item, (*above, str(index)))
    else:
        yield ".".join(above), node.where


def merge(below: Node, above: Node) -> Node:
    """Mappings are merged key by key, `above` wins; anything else is replaced. Places are kept."""
    if not (isinstance(below, Entries) and isinstance(above, Entries)):
        return above
    entries, keys = dict(below.entries), dict(below.keys)
    for key, value in above.entries.items():
        entries[key] = merge(entries[key], value) if key in entries else value
        keys[key] = above.keys.get(key, above.where)
    return Entries(above.where, entries, keys)


def nearest(word: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """The known word most like `word`, reading `-` as `_`; None when none is near."""
    names = list(known)
    plain_word = word.replace("-", "_").lower()
    by_plain = {name.replace("-", "_").lower(): name for name in names}
    if plain_word in by_plain:
        return by_plain[plain_word]
    found = difflib.get_close_matches(plain_word, by_plain, n=1, cutoff=cutoff)
    return by_plain[found[0]] if found else None


def did_you_mean(word: str, known: Sequence[str] | Iterable[str], *, what: str = "keys") -> str:
    """A fix for an unknown word: its nearest neighbour, or the words there are."""
    names = sorted(known)
    near = nearest(word, names)
    if near is not None:
        return f"did you mean `{near}`?"
    listed = ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")
    return f"known {what}: {listed}" if names else f"there are no {what} here"


# ---- typed values, for every tree that is read from YAML


class Section(BaseModel):
    """A node of a typed tree: unknown keys are errors, values are frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, protected_namespaces=())


def _number(value: object) -> object:
    """A typed number accepts what a person means by a text such as `1e-6`, `010` or `1_000`."""
    if isinstance(value, bool):
        raise ValueError(f"expected a number, not the boolean {str(value).lower()}")
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            raise ValueError(f"expected a number, got {value!r}") from None
    return value


def _whole(value: object) -> object:
    value = _number(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


_BYTE_UNITS = {
    "": 1,
    "B": 1,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}
_SECOND_UNITS = {"": 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_MEASURE = re.compile(r"\s*([-+]?[0-9_.]+(?:[eE][-+]?[0-9]+)?)\s*([A-Za-z]*)\s*")


def _measure(value: str, units: Mapping[str, float], example: str) -> float:
    found = _MEASURE.fullmatch(value)
    unit = found[2] if found is not None and found[2] in units else found[2].upper() if found is not None else ""
    if found is None or unit not in units:
        raise ValueError(f"expected {example}, got {value!r}")
    try:
        return float(found[1]) * units[unit]
    except ValueError:
        raise ValueError(f"expected {example}, got {value!r}") from None


def parse_bytes(value: object) -> object:
    """`1GiB`, `512 MiB`, `64MB` or a plain number of bytes."""
    if isinstance(value, bool):
        raise ValueError(f"expected a size such as 512MiB, not the boolean {str(value).lower()}")
    if not isinstance(value, str):
        return _whole(value)
    size = _measure(value, _BYTE_UNITS, "a size such as 512MiB")
    if not abs(size) < 2**63:
        raise ValueError(f"expected a size such as 512MiB, got {value!r}")
    return int(size)


def parse_seconds(value: object) -> object:
    """`20m`, `1.5h`, `90s` or a plain number of seconds."""
    if not isinstance(value, str):
        return _number(value)
    return _measure(value, _SECOND_UNITS, "a duration such as 90s or 20m")


Number = Annotated[float, BeforeValidator(_number)]
Whole = Annotated[int, BeforeValidator(_whole)]
Count = Annotated[int, BeforeValidator(_whole), Field(ge=1)]
NonNegative = Annotated[int, BeforeValidator(_whole), Field(ge=0)]
Rate = Annotated[float, BeforeValidator(_number), Field(ge=0, allow_inf_nan=False)]
Seconds = Annotated[float, BeforeValidator(_number), Field(gt=0, allow_inf_nan=False)]
Duration = Annotated[float, BeforeValidator(parse_seconds), Field(gt=0, allow_inf_nan=False)]
Bytes = Annotated[int, BeforeValidator(parse_bytes), Field(ge=0)]
