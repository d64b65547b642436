"""The hook API as a text file: hooks, the values that they exchange, and the objects that factories build.

`hook_api.txt` is what plugins are written against. `python tests/architecture/test_hook_api.py` writes it anew.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import importlib
import inspect
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vime.hooks.api import API_TEXT
from vime.hooks.markers import PluginInfo
from vime.hooks.specs import RULES, VimeSpecs, hook_names

GOLDEN = Path(__file__).with_name("hook_api.txt")
BUILT = (
    *("vime.trainer.runtime:DeviceRuntime", "vime.trainer.runtime:BindsHost", "vime.trainer.runtime:BindsSockets"),
    *("vime.memory.protocol:TrainerMemory", "vime.weights.transports.exporters:Exporter"),
    *("vime.weights.transports.base:TrainerHalf", "vime.weights.transports.base:EngineHalf"),
    *("vime.weights.transports.base:TransferContext", "vime.weights.transports.base:Manifest"),
    "vime.weights.transports.base:TensorSpec",
)
"""What the callable that a factory names must return, and the values that such an object is given."""

HELP = f"""
The hook API is not what tests/architecture/hook_api.txt says. Decide which of these it is:
  a hook, a keyword parameter or a field with a default was added, at the end: a minor version. Raise the second number of
    vime.hooks.api.API (now {API_TEXT}); plugins stay as they are.
  anything was removed, renamed, reordered or got another type, default or meaning, or a Protocol asks for one method more:
    a major version. Raise the first number, add what plugin authors must do to docs/decisions, and change the ranges of
    plugins/*/pyproject.toml and tests/contract/acme_accelerator.
An optional ability of an object is a Protocol of its own that is asked for with isinstance (as BindsHost): a minor version.
Then write the file anew, `python tests/architecture/test_hook_api.py`, with docs/hooks.md, and let both be reviewed.
"""


def render() -> str:
    """The whole API; signatures and annotations as they are written in the source."""
    lines = [f"hook API {API_TEXT}"]
    for name in hook_names():
        rule = RULES[name]
        kinds = [str(rule.kind), *(word for word in ("required", "runtime") if getattr(rule, word))]
        lines += ["", f"hook {name}{inspect.signature(getattr(VimeSpecs, name))}", f"  {', '.join(kinds)}"]
    for found in sorted({*exchanged(), PluginInfo}, key=lambda one: (one.__module__, one.__qualname__)):
        lines += ["", *described(found)]
    for target in BUILT:
        module, _, name = target.partition(":")
        lines += ["", *described(getattr(importlib.import_module(module), name))]
    return "\n".join(lines) + "\n"


def exchanged() -> set[type]:
    """Every class of vime.facts in a hook's signature, and in the fields of those."""
    waiting: list[Any] = []
    for name in hook_names():
        waiting += typing.get_type_hints(getattr(VimeSpecs, name)).values()
        waiting += RULES[name].returns
    found: set[type] = set()
    while waiting:
        hint = waiting.pop()
        waiting += typing.get_args(hint)
        if isinstance(hint, type) and hint.__module__.startswith("vime.facts") and hint not in found:
            found.add(hint)
            if dataclasses.is_dataclass(hint):
                waiting += typing.get_type_hints(hint).values()
    return found


def described(one: type) -> Iterator[str]:
    yield f"{kind_of(one)} {one.__module__}.{one.__qualname__}"
    if issubclass(one, enum.Enum):
        yield from (f"  {member.name} = {member.value!r}" for member in one)
    elif dataclasses.is_dataclass(one):
        yield from (f"  {field.name}: {field.type}{default_of(field)}" for field in dataclasses.fields(one))
    else:
        yield from (f"  {name}: {hint}" for name, hint in one.__annotations__.items())
    yield from methods(one)


def kind_of(one: type) -> str:
    if issubclass(one, enum.Enum):
        return "enum"
    return "value" if dataclasses.is_dataclass(one) else "protocol"


def default_of(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        return f" = {field.default!r}"
    if field.default_factory is not dataclasses.MISSING:
        return f" = {field.default_factory()!r}"
    return ""


def methods(one: type) -> Iterator[str]:
    for name, member in vars(one).items():
        plain = member.__func__ if isinstance(member, classmethod | staticmethod) else member
        if isinstance(plain, property):
            yield f"  {name} -> {inspect.signature(plain.fget).return_annotation}"  # type: ignore[arg-type]
        elif inspect.isfunction(plain) and not name.startswith("_"):
            yield f"  {name}{inspect.signature(plain)}"


def test_the_api_is_the_one_that_plugins_are_written_for() -> None:
    kept, here = GOLDEN.read_text().splitlines(), render().splitlines()
    changed = "\n".join(difflib.unified_diff(kept, here, "hook_api.txt", "the source", n=2, lineterm=""))
    assert not changed, f"{changed}\n{HELP}"


def test_what_a_change_would_touch_is_in_the_file() -> None:
    text = GOLDEN.read_text()
    for line in (
        "hook vime_transports(self, edge: 'Edge', side: 'Side') -> 'Iterable[TransportOffer]'",
        "value vime.facts.process.RoleRequest",
        "  mode: EnvMode = <EnvMode.DEFAULT: 'default'>",
        "  build(self, **extra: 'Any') -> 'Any'",
        "  streams: bool",
        "  bind_host(self, node_device: 'int') -> 'None'",
        "  WITHOUT = 'without'",
    ):
        assert line in text.splitlines(), line
    assert not {name for name in hook_names() if f"hook {name}(" not in text}


if __name__ == "__main__":
    GOLDEN.write_text(render())
    sys.stdout.write(f"{GOLDEN}: hook API {API_TEXT}\n")
