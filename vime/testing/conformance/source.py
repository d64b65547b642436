"""Looks a factory's target up in source, so that code for hardware and libraries that are not here can be checked.

Nothing is imported but the packages above the module (`importlib.util.find_spec` needs them). Names are followed through
`from x import y` and base classes through modules.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from vime.facts.process import Factory

_DEPTH = 12


class Absent(Exception):
    """A target does not exist; the text says which part."""


class Unreadable(Exception):
    """The target's module has no source here, or builds its names as it runs."""


@dataclass(frozen=True)
class Target:
    """What a factory names: a class with everything it inherits, or a function."""

    module: str
    name: str
    methods: frozenset[str] = frozenset()
    attributes: frozenset[str] = frozenset()
    parameters: frozenset[str] = frozenset()
    required: frozenset[str] = frozenset()
    any_keyword: bool = False
    is_class: bool = True


def find(factory: Factory) -> Target:
    """The target of a factory. Raises Absent with the missing part, Unreadable where only running it would tell."""
    module, _, name = factory.target.partition(":")
    if not module or not name:
        raise Absent(f"{factory.target!r} is not of the form module:callable")
    return _look(module, name, _DEPTH)


@cache
def _look(module: str, name: str, depth: int) -> Target:
    tree = _tree(module)
    first, _, rest = name.partition(".")
    node = _defined(tree, first)
    if isinstance(node, ast.ClassDef):
        return _in_class(module, node, rest, depth)
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return _function(module, node)
    if isinstance(node, ast.ImportFrom) and depth:
        source, original = _origin(module, node, first)
        if importlib.util.find_spec(source) is None:
            raise Unreadable(f"{module} takes {first} from {source}, which is not installed")
        return _look(source, original + (f".{rest}" if rest else ""), depth - 1)
    if node is not None:
        raise Unreadable(f"{module}.{first} is made as the module runs")
    raise Absent(f"module {module} defines no {first}")


@cache
def _tree(module: str) -> ast.Module:
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError as error:
        if error.name and (module == error.name or module.startswith(f"{error.name}.")):
            raise Absent(f"there is no module {module}") from None
        raise Unreadable(f"{module} cannot be looked up: {error}") from error
    except ImportError as error:
        raise Unreadable(f"{module} cannot be looked up: {error}") from error
    if spec is None:
        raise Absent(f"there is no module {module}")
    if not spec.origin or not spec.origin.endswith(".py"):
        raise Unreadable(f"{module} has no Python source")
    return ast.parse(Path(spec.origin).read_text(encoding="utf-8"))


def _statements(tree: ast.AST) -> Iterator[ast.stmt]:
    """Statements of a module, those under `if` and `try` too."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.stmt):
            yield node
        if isinstance(node, ast.If | ast.Try | ast.ExceptHandler | ast.With):
            yield from _statements(node)


def _defined(tree: ast.AST, name: str) -> ast.stmt | None:
    found: ast.stmt | None = None
    for node in _statements(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            found = node
        elif name in _bound(node):
            found = found or node
    return found


def _bound(node: ast.stmt) -> set[str]:
    """Names that an import or an assignment makes."""
    if isinstance(node, ast.ImportFrom):
        return {a.asname or a.name for a in node.names}
    if isinstance(node, ast.Assign):
        return {t.id for t in node.targets if isinstance(t, ast.Name)}
    return set()


def _origin(module: str, node: ast.ImportFrom, name: str) -> tuple[str, str]:
    original = next(a.name for a in node.names if (a.asname or a.name) == name)
    if not node.level:
        return node.module or "", original
    spec = importlib.util.find_spec(module)
    package = module if spec is not None and spec.submodule_search_locations else module.rpartition(".")[0]
    return importlib.util.resolve_name("." * node.level + (node.module or ""), package), original


def _in_class(module: str, node: ast.ClassDef, rest: str, depth: int) -> Target:
    if not rest:
        return _class(module, node, depth)
    inner = next((f for f in node.body if isinstance(f, ast.FunctionDef) and f.name == rest), None)
    if inner is None:
        raise Absent(f"{module}.{node.name} defines no {rest}")
    return _function(module, inner, skip=1)


def _function(module: str, node: ast.FunctionDef | ast.AsyncFunctionDef, skip: int = 0) -> Target:
    parameters, required, any_keyword = _parameters(node, skip)
    return Target(module, node.name, parameters=parameters, required=required, any_keyword=any_keyword, is_class=False)


def _class(module: str, node: ast.ClassDef, depth: int) -> Target:
    methods, attributes = _members(node)
    init = next((f for f in node.body if isinstance(f, ast.FunctionDef) and f.name == "__init__"), None)
    bases = [base for expression in node.bases if depth and (base := _base(module, expression, depth)) is not None]
    parameters, required, any_keyword = _parameters(init, 1) if init else _inherited(bases)
    for base in bases:
        methods |= base.methods
        attributes |= base.attributes
    return Target(module, node.name, frozenset(methods), frozenset(attributes), parameters, required, any_keyword)


def _inherited(bases: list[Target]) -> tuple[frozenset[str], frozenset[str], bool]:
    for base in bases:
        return base.parameters, base.required, base.any_keyword
    return frozenset(), frozenset(), False


def _base(module: str, expression: ast.expr, depth: int) -> Target | None:
    """A base class; None for those that only libraries know (Protocol, torch modules)."""
    if isinstance(expression, ast.Subscript):
        expression = expression.value
    if not isinstance(expression, ast.Name):
        return None
    try:
        return _look(module, expression.id, depth - 1)
    except (Absent, Unreadable):
        return None


def _members(node: ast.ClassDef) -> tuple[set[str], set[str]]:
    """Methods and attributes of a class body; those that methods set on `self` count as attributes."""
    functions = [item for item in node.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)]
    attributes = {t.id for item in node.body if isinstance(item, ast.Assign) for t in item.targets if isinstance(t, ast.Name)}
    attributes |= {i.target.id for i in node.body if isinstance(i, ast.AnnAssign) and isinstance(i.target, ast.Name)}
    attributes |= {f.name for f in functions if any(isinstance(d, ast.Name) and d.id == "property" for d in f.decorator_list)}
    for item in ast.walk(node):
        if isinstance(item, ast.Attribute) and isinstance(item.ctx, ast.Store) and ast.unparse(item.value) == "self":
            attributes.add(item.attr)
    return {f.name for f in functions}, attributes


def _parameters(node: ast.FunctionDef | ast.AsyncFunctionDef | None, skip: int) -> tuple[frozenset[str], frozenset[str], bool]:
    """Names that can be given by keyword, those of them without a default, and whether any keyword is taken."""
    if node is None:
        return frozenset(), frozenset(), False
    arguments = node.args
    plain = [*arguments.posonlyargs, *arguments.args]
    needed = plain[skip : len(plain) - len(arguments.defaults)]
    keyword = {a.arg for a, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if default is None}
    names = {a.arg for a in (*arguments.args[skip:], *arguments.kwonlyargs)}
    return frozenset(names), frozenset({a.arg for a in needed} | keyword), arguments.kwarg is not None


def problem(factory: Factory, *, methods: frozenset[str] = frozenset(), attributes: frozenset[str] = frozenset()) -> str | None:
    """What is wrong with a factory that must build an object with these methods; None where nothing is found.

    Functions are only checked for existing: what they return is not known without running them.
    """
    try:
        target = find(factory)
    except Absent as error:
        return str(error)
    except Unreadable:
        return None
    if not target.is_class:
        return None
    missing = sorted(methods - target.methods) + sorted(attributes - target.attributes - target.methods)
    return f"{factory.target} has no {', '.join(missing)}" if missing else None


def bad_options(factory: Factory, given: Mapping[str, object] | None = None) -> str | None:
    """Options that the target's constructor does not take, or parameters that it needs and nobody gives."""
    options = factory.options if given is None else given
    try:
        target = find(factory)
    except (Absent, Unreadable):
        return None
    unknown = sorted(set(options) - target.parameters)
    if unknown and not target.any_keyword:
        return f"{factory.target} takes no option {', '.join(unknown)}"
    absent = sorted(target.required - set(options))
    return f"{factory.target} needs {', '.join(absent)}, which nobody gives" if absent else None


def members_of(protocol: type) -> tuple[frozenset[str], frozenset[str]]:
    """Methods and annotated attributes of a Protocol class."""
    methods = frozenset(n for n, v in vars(protocol).items() if not n.startswith("_") and callable(getattr(v, "__func__", v)))
    annotated = frozenset(vars(protocol).get("__annotations__", {}))
    return methods, annotated
