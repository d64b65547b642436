"""From a run file, its includes, flags and overrides to one checked `Config`, with the origin of every value.

Relative paths in a file are relative to the folder of the file that holds them, those of overrides and flags to the
current folder; in the loaded configuration every path is absolute. Later layers win: includes, the file, flags, overrides.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from vime.config import passthrough, rules
from vime.config.schema import Config, GrpoSection
from vime.errors import ConfigError, Errors, VimeError
from vime.topology.findings import Finding, describe_validation
from vime.topology.load import with_text_environment
from vime.topology.structure import fields_at, homes_of, path_fields
from vime.yamltree import (
    Entries,
    Items,
    Node,
    Scalar,
    Value,
    Where,
    find,
    from_value,
    get,
    leaves,
    merge,
    parse,
    plain,
    read,
    replace_at,
    resolve,
)

__all__ = ["Finding", "LoadedConfig", "dump_resolved", "load_config"]


@dataclass(frozen=True)
class LoadedConfig:
    """The configuration, where each value that somebody gave comes from (`file:line`, override or flag), and warnings."""

    config: Config
    sources: Mapping[str, str]
    warnings: tuple[Finding, ...]
    tree: Node
    manifests: Mapping[str, str]

    @property
    def topology_source(self) -> str | Node:
        """What `load_topology` takes: a name or path, or the node of an inline topology, which keeps its lines."""
        node = get(self.tree, ("topology",))
        return node if isinstance(node, Entries) else str(self.config.topology)

    def where(self, path: str) -> str | None:
        """Where a dotted path, or its nearest given parent, stands."""
        seen, where = find(self.tree, _steps(path))
        return str(where) if seen else None


def load_config(
    path: Path | str | None,
    *,
    overrides: Sequence[str] = (),
    flags: Mapping[str, Any] | None = None,
    flag_sources: Mapping[str, str] | None = None,
) -> LoadedConfig:
    """Read and check a run.

    Args:
        path: the run file; None when everything comes from flags and overrides.
        overrides: `dotted.path=value`, the value in YAML.
        flags: a tree of values, as `vime.compat.flags.config_from_flags` gives it.
        flag_sources: the flag of each dotted path in `flags`.

    Raises:
        ConfigError or Errors: everything that is wrong, each with its place.
    """
    tree: Node = _read_with_includes(Path(path), ()) if path is not None else Entries(Where("command line"), {})
    if flags:
        tree = merge(tree, _absolute(_flag_tree(flags, flag_sources or {}), Path.cwd()))
    errors: list[VimeError] = []
    for override in overrides:
        try:
            tree = merge(tree, _absolute(_override(override, tree), Path.cwd()))
        except VimeError as error:
            errors.append(error)
    tree, manifests, found = _check_passthrough(with_text_environment(tree, ("topology", "env")))
    errors += found
    config, found = _validate(tree)
    errors += found
    warnings: tuple[Finding, ...] = ()
    if config is not None:
        found, warnings = rules.check(config, tree)
        errors += found
    if errors or config is None:
        raise errors[0] if len(errors) == 1 else Errors(sorted(errors, key=_place))
    sources = {key: str(where) for key, where in leaves(tree)}
    return LoadedConfig(config, sources, warnings, tree, manifests)


def dump_resolved(config: Config) -> str:
    """YAML of the whole configuration; `load_config` of it gives an equal configuration."""
    return yaml.dump(_to_yaml(config.model_dump()), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def _validate(tree: Node) -> tuple[Config | None, list[VimeError]]:
    values = plain(tree)
    if isinstance(values.get("algorithm"), dict):
        values["algorithm"].setdefault("kind", GrpoSection().kind)
    try:
        return Config.model_validate(values), []
    except ValidationError as invalid:
        return None, [ConfigError(f.what, where=f.where, fix=f.fix) for f in describe_validation(invalid, tree, _suggest)]


def _suggest(parents: tuple[str | int, ...], key: str) -> tuple[list[str], list[str]]:
    """Known names beside an unknown key, and the sections where a key of that very name lives."""
    return fields_at(Config, parents), homes_of(Config, key)


def _place(error: VimeError) -> tuple[str, int]:
    file, _, line = (error.where or "").rpartition(":")
    return (file, int(line)) if line.isdigit() else (error.where or "", 0)


# ---- files


def _read_with_includes(path: Path, above: tuple[Path, ...]) -> Node:
    """A file over its includes; each file's relative paths are made absolute by its own folder first."""
    real = path.resolve()
    if real in above:
        chain = " -> ".join(str(p) for p in (*above, real))
        raise ConfigError(f"a file includes itself: {chain}", where=str(path), fix="remove one `include`")
    node = read(path)
    if not isinstance(node, Entries):
        raise ConfigError("a run file is a mapping of sections", where=str(node.where), fix="start with `run:` and its keys")
    below: Node | None = None
    for name, where in _includes(node):
        try:
            part = _read_with_includes(real.parent / name, (*above, real))
        except VimeError as error:
            raise error if error.where else ConfigError(f"`include`: {error.what}", where=str(where), fix=error.fix) from None
        below = part if below is None else merge(below, part)
    entries = {key: value for key, value in node.entries.items() if key != "include"}
    own = _absolute(Entries(node.where, entries, node.keys), real.parent)
    return own if below is None else merge(below, own)


def _includes(node: Entries) -> Iterator[tuple[str, Where]]:
    value = node.entries.get("include")
    if value is None:
        return
    for item in value.items if isinstance(value, Items) else (value,):
        if not isinstance(item, Scalar) or not item.text:
            raise ConfigError("`include` takes a file name or a list of them", where=str(item.where), fix="give file names")
        yield str(Path(item.text).expanduser()), item.where


def _absolute(tree: Node, base: Path) -> Node:
    """The tree with its relative paths made absolute."""
    for pattern in path_fields(Config):
        tree = _rewrite(tree, pattern, lambda text: _absolute_path(text, base))
    return _rewrite(tree, ("topology",), lambda text: _topology_source(text, base))


def _topology_source(text: str, base: Path) -> str:
    """A shipped name stays; anything that looks like a file becomes absolute."""
    is_path = "/" in text or text.endswith((".yaml", ".yml"))
    return _absolute_path(text, base) if is_path else text


def _absolute_path(text: str, base: Path) -> str:
    """Without `..` where that names the same place; symbolic links stay, since their names mean something to people."""
    path = (base / Path(text).expanduser()).absolute()
    tidy = Path(os.path.normpath(path))
    return str(tidy if tidy.resolve() == path.resolve() else path)


def _rewrite(node: Node, pattern: tuple[str, ...], change: Any) -> Node:
    if not pattern:
        text = node.text if isinstance(node, Scalar) else node.value if isinstance(node, Value) else None
        usable = isinstance(text, str) and text and not (isinstance(node, Scalar) and node.plain and resolve(text) != text)
        return Scalar(node.where, change(text), plain=False) if usable else node
    step, rest = pattern[0], pattern[1:]
    if step == "*" and isinstance(node, Items):
        return Items(node.where, tuple(_rewrite(item, rest, change) for item in node.items))
    if isinstance(node, Entries) and step in node.entries:
        return Entries(node.where, {**node.entries, step: _rewrite(node.entries[step], rest, change)}, node.keys)
    return node


# ---- overrides and flags


def _steps(path: str) -> list[str | int]:
    return [int(step) if step.isdigit() else step for step in path.split(".")]


def _override(text: str, tree: Node) -> Node:
    """A tree with the one value of `dotted.path=value`; items of lists are named by their number."""
    path, equals, value = text.partition("=")
    place = f"override `{text}`"
    if not equals or not path or not all(path.split(".")):
        raise ConfigError("an override is written `dotted.path=value`", where=place, fix="for example schedule.num_steps=10")
    where = Where(place)
    return _around(_steps(path), _at(parse(value, place) if value.strip() else Scalar(where, value), where), tree, where)


def _at(node: Node, where: Where) -> Node:
    """The same values, all placed at one spot."""
    match node:
        case Entries():
            return Entries(where, {k: _at(v, where) for k, v in node.entries.items()}, dict.fromkeys(node.entries, where))
        case Items():
            return Items(where, tuple(_at(item, where) for item in node.items))
        case Scalar():
            return Scalar(where, node.text, node.plain)
        case Value():
            return Value(where, node.value)


def _around(steps: list[str | int], value: Node, tree: Node | None, where: Where) -> Node:
    if not steps:
        return value
    step = steps[0]
    if isinstance(tree, Items):
        if not isinstance(step, int) or step >= len(tree.items):
            fix = f"use a number below {len(tree.items)}" if tree.items else "the list is empty"
            raise ConfigError(f"{step!r} is not an item of this list", where=where.file, fix=fix)
        changed = _around(steps[1:], value, tree.items[step], where)
        merged = merge(tree.items[step], changed) if len(steps) > 1 else changed
        return Items(where, (*tree.items[:step], merged, *tree.items[step + 1 :]))
    key = str(step)
    if isinstance(tree, Scalar | Value) and plain(tree) is not None:
        raise ConfigError(f"`{key}` is below a plain value, not a section", where=where.file, fix="override the whole section")
    below = tree.entries.get(key) if isinstance(tree, Entries) else None
    return Entries(where, {key: _around(steps[1:], value, below, where)}, {key: where})


def _flag_tree(values: Mapping[str, Any], sources: Mapping[str, str], above: tuple[str, ...] = ()) -> Node:
    entries: dict[str, Node] = {}
    for key, value in values.items():
        path = (*above, key)
        where = Where(sources.get(".".join(path), "command line"))
        nested = isinstance(value, Mapping) and ".".join(path) not in sources
        entries[key] = _flag_tree(value, sources, path) if nested else from_value(value, where)
    return Entries(Where("command line"), entries, {key: node.where for key, node in entries.items()})


# ---- pass-through sections


def _check_passthrough(tree: Node) -> tuple[Node, dict[str, str], list[VimeError]]:
    errors: list[VimeError] = []
    used: dict[str, str] = {}
    for section in passthrough.SECTIONS:
        node = get(tree, section.path)
        if isinstance(node, Entries) and node.entries:
            checked = passthrough.check(section, node)
            used[".".join(section.path)] = f"{checked.manifest.package}: {checked.manifest.origin}"
            errors += checked.errors
            tree = replace_at(tree, section.path, checked.entries)
    return tree, used, errors


# ---- writing


class _Dumper(yaml.SafeDumper):
    """Quotes every text that reading would take for something else."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: _Dumper, value: str) -> yaml.Node:
    style = '"' if resolve(value) != value else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _text)


def _to_yaml(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _to_yaml(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_to_yaml(item) for item in value]
    return str(value) if isinstance(value, Path) else value
