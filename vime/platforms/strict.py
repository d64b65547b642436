"""Strictness: a plugin's hooks are checked when it is registered, its answers when they are given.

Every refusal names the plugin, the hook and the fix, and every exception of an implementation is attributed to its
plugin, so that a half-written plugin is never taken for its parent.
"""

from __future__ import annotations

import collections.abc
import difflib
import functools
import inspect
import typing
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NoReturn

from vime.errors import PluginError, VimeError
from vime.hooks.markers import PROJECT
from vime.hooks.specs import RULES, Kind, VimeSpecs

_PREFIX = f"{PROJECT}_"
_OPTIONS = f"{PROJECT}_impl"


class HookError(PluginError):
    """An error that already names its plugin and hook."""


class Shape(StrEnum):
    """How a hook hands over its values: one, an iterable of them, or a mapping from names to them."""

    VALUE = "value"
    ITEMS = "items"
    MAPPING = "mapping"


@dataclass(frozen=True, slots=True)
class Implementation:
    """One checked hook implementation. `call` is guarded: its errors and answers are attributed to the plugin."""

    hook: str
    call: Callable[..., Any]
    wrapper: bool


@functools.cache
def shape_of(hook: str) -> Shape:
    """The shape of a hook's answer, read from the specification's return annotation."""
    origin = typing.get_origin(typing.get_type_hints(getattr(VimeSpecs, hook))["return"])
    if origin is collections.abc.Mapping:
        return Shape.MAPPING
    return Shape.ITEMS if origin is collections.abc.Iterable else Shape.VALUE


@functools.cache
def parameters_of(hook: str) -> tuple[str, ...]:
    """The parameter names of a hook specification, without `self`."""
    return tuple(name for name in inspect.signature(getattr(VimeSpecs, hook)).parameters if name != "self")


def implementations(plugin: str, namespace: object) -> tuple[Implementation, ...]:
    """Check every `vime_*` function of a plugin and return its guarded implementations.

    Raises PluginError for unknown hooks, unmarked functions, wrong parameters and refused marker options.
    """
    found: list[Implementation] = []
    problems: list[PluginError] = []
    for name in dir(namespace):
        value = inspect.getattr_static(namespace, name)
        if name.startswith("__") or inspect.isclass(value) or inspect.ismodule(value):
            continue
        function = getattr(namespace, name)
        try:
            implementation = _implementation(plugin, name, function)
        except PluginError as problem:
            problems.append(problem)
            continue
        if implementation is not None:
            found.append(implementation)
    problems += _twice(plugin, found)
    if len(problems) > 1:
        raise PluginError(
            "\n".join(str(problem) for problem in problems), where=f"plugin {plugin}", fix="mend each of the hooks above"
        )
    if problems:
        raise problems[0]
    return tuple(found)


def _twice(plugin: str, found: list[Implementation]) -> list[PluginError]:
    hooks = [implementation.hook for implementation in found]
    return [
        PluginError("the hook is implemented twice", where=_where(plugin, hook), fix="keep one implementation")
        for hook in sorted(set(hooks))
        if hooks.count(hook) > 1
    ]


def _implementation(plugin: str, name: str, function: object) -> Implementation | None:
    options: Mapping[str, Any] | None = getattr(function, _OPTIONS, None) if callable(function) else None
    if not isinstance(options, Mapping):
        if name.startswith(_PREFIX) and callable(function):
            raise PluginError(
                f"{name} is not marked as an implementation, so nothing would ever call it",
                where=_where(plugin, name),
                fix="decorate it with @hookimpl from vime.hooks, or rename it so that it does not start with vime_",
            )
        return None
    assert callable(function)
    hook = options.get("specname") or name
    if hook not in RULES:
        near = difflib.get_close_matches(hook, RULES, n=1)
        raise PluginError(
            f"there is no hook named {hook}",
            where=_where(plugin, hook),
            fix=f"did you mean {near[0]}?" if near else "see vime.hooks.specs for every hook",
        )
    _check_options(plugin, hook, options, function)
    _check_parameters(plugin, hook, function)
    wrapper = bool(options.get("wrapper"))
    return Implementation(hook, _guard(plugin, hook, function, wrapper=wrapper), wrapper)


def _check_options(plugin: str, hook: str, options: Mapping[str, Any], function: Callable[..., Any]) -> None:
    def refuse(what: str, fix: str) -> NoReturn:
        raise PluginError(what, where=_where(plugin, hook), fix=fix)

    if options.get("hookwrapper"):
        refuse("old-style hookwrapper=True loses exceptions", "use @hookimpl(wrapper=True) and return the amended answer")
    if options.get("tryfirst") or options.get("trylast"):
        refuse(
            "tryfirst and trylast would break the order of the lineage (the leaf answers first)",
            "leave them out; amend a parent's answer with @hookimpl(wrapper=True)",
        )
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        refuse("hooks are called synchronously, this one is async", "write a plain function")
    if not options.get("wrapper"):
        return
    if RULES[hook].kind is Kind.ISOLATED:
        refuse("an isolated hook cannot be wrapped: its implementations are called one by one", "contribute own answers")
    if not inspect.isgeneratorfunction(function):
        refuse("a wrapper must yield once", "write `answer = yield`, then return the amended answer")


def _check_parameters(plugin: str, hook: str, function: Callable[..., Any]) -> None:
    allowed = parameters_of(hook)
    form = f"{hook}({', '.join(allowed)})"
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise PluginError(
                f"parameter {parameter} cannot be filled: arguments are matched by their names",
                where=_where(plugin, hook),
                fix=f"name the parameters that you need, out of {form}",
            )
        if name not in allowed:
            near = difflib.get_close_matches(name, allowed, n=1)
            raise PluginError(
                f"the hook has no parameter {name!r}",
                where=_where(plugin, hook),
                fix=(f"did you mean {near[0]!r}? " if near else "") + f"the hook is {form}; leave out what you do not need",
            )


def _guard(plugin: str, hook: str, function: Callable[..., Any], *, wrapper: bool) -> Callable[..., Any]:
    """Attribute errors and check answers. pluggy reads the parameters through `__wrapped__`."""

    @functools.wraps(function)
    def answered(*args: Any, **kwargs: Any) -> Any:
        try:
            return check_answer(plugin, hook, function(*args, **kwargs))
        except HookError:
            raise
        except (Exception, SystemExit) as error:
            raise attributed(plugin, hook, error) from error

    @functools.wraps(function)
    def amended(*args: Any, **kwargs: Any) -> Generator[None, Any, Any]:
        try:
            answer = yield from function(*args, **kwargs)
            return _check_amended(plugin, hook, answer)
        except HookError:
            raise
        except (Exception, SystemExit) as error:
            raise attributed(plugin, hook, error) from error

    return amended if wrapper else answered


def attributed(plugin: str, hook: str, error: BaseException) -> HookError:
    """The error of an implementation, with the plugin and hook that it came from."""
    if isinstance(error, VimeError):
        return HookError(f"{type(error).__name__}: {error.what}", where=_where(plugin, hook), fix=error.fix)
    return HookError(
        f"{type(error).__name__}: {error}" if str(error) else type(error).__name__,
        where=_where(plugin, hook),
        fix=f"mend or update plugin {plugin}, or choose another --platform",
    )


def check_answer(plugin: str, hook: str, answer: Any) -> Any:
    """Check an implementation's answer against the rules; iterables come back as tuples. Raises HookError."""
    if answer is None:
        return None
    shape = shape_of(hook)
    if shape is Shape.VALUE:
        _check_value(plugin, hook, answer, place="the answer")
        return answer
    if shape is Shape.MAPPING:
        if not isinstance(answer, Mapping):
            _wrong(plugin, hook, f"the answer is a {type(answer).__name__}", f"a mapping from names to {expected(hook)}")
        for key, value in answer.items():
            if not isinstance(key, str):
                _wrong(plugin, hook, f"key {key!r} is a {type(key).__name__}", "a name (str)")
            _check_value(plugin, hook, value, place=f"the value of {key!r}")
        return answer
    if not isinstance(answer, Iterable) or isinstance(answer, (str, bytes, Mapping)):
        _wrong(plugin, hook, f"the answer is a {type(answer).__name__}", f"an iterable of {expected(hook)}")
    items = tuple(answer)
    for position, value in enumerate(items):
        _check_value(plugin, hook, value, place=f"item {position}")
    return items


def _check_amended(plugin: str, hook: str, answer: Any) -> Any:
    """A wrapper returns what it was given: one answer of a *first* hook, the list of contributions of an *all* hook."""
    if RULES[hook].kind is Kind.FIRST:
        return check_answer(plugin, hook, answer)
    if not isinstance(answer, list):
        _wrong(plugin, hook, f"the wrapper returned a {type(answer).__name__}", "the list of contributions, leaf first")
    return [check_answer(plugin, hook, part) for part in answer if part is not None]


def _check_value(plugin: str, hook: str, value: Any, *, place: str) -> None:
    if not isinstance(value, RULES[hook].returns):
        _wrong(plugin, hook, f"{place} is a {type(value).__name__}", expected(hook))


def expected(hook: str) -> str:
    """The types that a hook may answer with, for messages."""
    return " or ".join(kind.__name__ for kind in RULES[hook].returns)


def _wrong(plugin: str, hook: str, what: str, wanted: str) -> NoReturn:
    raise HookError(f"{what}, expected {wanted}", where=_where(plugin, hook), fix=f"return {wanted}")


def _where(plugin: str, hook: str) -> str:
    return f"plugin {plugin}, hook {hook}"
