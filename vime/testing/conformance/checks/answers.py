"""What holds for the answers of all hooks alike."""

from __future__ import annotations

import builtins
import functools
import operator
import os
import pickle
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from vime.errors import PluginError
from vime.hooks.specs import RULES
from vime.testing.conformance.questions import Question, each_answer, questions
from vime.testing.conformance.registry import check, fail, require
from vime.testing.conformance.subject import Subject

_FACTS = "vime.facts."
_MAY_BE_NONE = ("vime_fixture",)
HEAVY = ("torch", "vllm", "megatron", "ray", "transformers", "numpy")
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


@check("C05", title="every hook answers")
def every_hook_answers(subject: Subject) -> None:
    """Every hook answers every question of a plan and of a run, on the machines and on nominal nodes, whose vendor facts,
    links and software are empty."""
    with closing(questions(subject)) as asked:
        for question in asked:
            try:
                answer = question.put(subject)
            except PluginError as error:
                fail(f"{question.hook} fails for {question.about}: {error.what}", error.fix or f"let {question.hook} answer")
            absent = answer is None and question.hook not in _MAY_BE_NONE
            require(
                not absent, f"{question.hook} has no answer for {question.about}", "answer, or leave the hook to the parent"
            )


@check("C06", title="answers are plain values")
def answers_are_plain(subject: Subject) -> None:
    """Every field of an answer has its declared type; answers hold facts and plain values only, and are equal after they
    have been pickled."""

    def look(question: Question, answer: Any) -> None:
        at = f"the answer of {question.hook} for {question.about}"
        for value in _values(answer):
            try:
                _adapter(RULES[question.hook].returns).validate_python((value,))
            except ValidationError as error:
                first = error.errors()[0]
                place = ".".join(str(part) for part in first["loc"][1:])
                fail(f"{at}: field {place}: {first['msg']}", "give the field its declared type")
        if (alien := next(_aliens(answer), None)) is not None:
            fail(f"{at} holds a {type(alien).__module__}.{type(alien).__qualname__}", "return facts and plain values only")
        try:
            same = pickle.loads(pickle.dumps(answer)) == answer
        except Exception as error:  # noqa: BLE001  pickling may raise anything
            fail(f"{at} cannot be pickled: {error}", "return facts and plain values only")
        require(same, f"{at} is not equal after pickling", "return values that compare by content")

    each_answer(subject, look)


@functools.cache
def _adapter(kinds: tuple[type, ...]) -> TypeAdapter[Any]:
    union: Any = functools.reduce(operator.or_, kinds)
    one: Any = tuple.__class_getitem__(union)
    return TypeAdapter(one, config=ConfigDict(strict=True, revalidate_instances="always"))


def _values(answer: Any) -> list[Any]:
    """The single values of an answer: of a mapping, of several contributions, or the answer itself."""
    if answer is None:
        return []
    if isinstance(answer, Mapping):
        return list(answer.values())
    return list(answer) if isinstance(answer, tuple) else [answer]


def _aliens(value: Any) -> Iterator[Any]:
    """Values that are neither plain nor facts of vime."""
    if value is None or type(value) in (bool, int, float, str, bytes):
        return
    if isinstance(value, Enum) or is_dataclass(value):
        if not type(value).__module__.startswith(_FACTS):
            yield value
        elif is_dataclass(value):
            for one in fields(value):
                yield from _aliens(getattr(value, one.name))
    elif type(value) in (tuple, list, set, frozenset):
        for item in value:
            yield from _aliens(item)
    elif type(value) is dict:
        for pair in value.items():
            yield from _aliens(pair)
    else:
        yield value


@check("C07", title="same question same answer")
def same_question_same_answer(subject: Subject) -> None:
    """Every hook gives an equal answer when it is asked the same thing again (doctor may find something else: C34)."""

    def look(question: Question, answer: Any) -> None:
        if question.hook == "vime_doctor_checks":
            return
        try:
            again = question.put(subject)
        except PluginError as error:
            fail(
                f"{question.hook} fails when it is asked again for {question.about}: {error.what}",
                "keep no state between calls",
            )
        what = f"{question.hook} answers differently the second time for {question.about}: {shown(answer)}, then {shown(again)}"
        require(again == answer, what, "derive the answer from the arguments only")

    each_answer(subject, look)


def shown(value: Any) -> str:
    """A value in few words."""
    text = repr(value)
    return text if len(text) <= 160 else f"{text[:157]}..."


@check("C08", hooks=["vime_capabilities", "vime_ray_binding", "vime_perf_model"], title="derived facts are pure")
def derived_facts_are_pure(subject: Subject) -> None:
    """Capabilities, binding, profiles and rates come from their arguments: no heavy import, no file written, no process
    started, no library loaded, no change of the environment."""
    with closing(questions(subject)) as asked:
        for question in asked:
            if question.hook not in ("vime_profiles", "vime_capabilities", "vime_ray_binding", "vime_perf_model"):
                continue
            with watched() as seen:
                try:
                    question.put(subject)
                except PluginError:
                    continue
            what = f"{question.hook} for {question.about} {seen[0] if seen else ''}"
            require(not seen, what, "derive the answer from the inventory; look at hardware in vime_inventory")


_EVENTS = {
    "subprocess.Popen": "starts a process",
    "os.system": "starts a process",
    "socket.connect": "opens a connection",
    "os.putenv": "changes the environment",
    "os.unsetenv": "changes the environment",
    "os.mkdir": "makes a folder",
    "os.remove": "removes a file",
    "os.rename": "renames a file",
}
_watching: list[list[str]] = []
_hooked: list[bool] = []


@contextmanager
def watched() -> Iterator[list[str]]:
    """What code of the block does to the world outside, in words."""
    seen: list[str] = []
    if not _hooked:
        sys.addaudithook(_audit)
        _hooked.append(True)
    original = builtins.__import__
    builtins.__import__ = _importer(original, seen)
    _watching.append(seen)
    try:
        yield seen
    finally:
        _watching.remove(seen)
        builtins.__import__ = original


def _importer(original: Callable[..., Any], seen: list[str]) -> Callable[..., Any]:
    def imported(name: str, *rest: Any, **named: Any) -> Any:
        top = name.partition(".")[0]
        if top in HEAVY and not (rest and (rest[0] or {}).get("__name__", "").partition(".")[0] in HEAVY):
            seen.append(f"imports {top}")
        return original(name, *rest, **named)

    return imported


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    """Audit hooks stay for the life of the process; this one notes nothing outside a watched block."""
    if not _watching:
        return
    if event in _EVENTS:
        _watching[-1].append(_EVENTS[event])
    elif event == "ctypes.dlopen" and arguments[0]:
        _watching[-1].append(f"loads library {arguments[0]}")
    elif event == "open" and isinstance(arguments[0], str) and "__pycache__" not in arguments[0]:
        mode, flags = arguments[1], arguments[2]
        if (isinstance(mode, str) and set(mode) & set("wax+")) or (isinstance(flags, int) and flags & _WRITES):
            _watching[-1].append(f"writes {arguments[0]}")


@check("C09", title="answers are quick")
def answers_are_quick(subject: Subject) -> None:
    """All facts about one node, and all answers for one trainer and one engine on it, take less than two seconds together."""
    if not subject.cases:
        return
    name = subject.cases[0].name
    spent: dict[str, float] = {}
    with closing(questions(subject)) as asked:
        for question in asked:
            if question.hook != "vime_profiles" and not question.about.startswith(name):
                continue
            start = time.perf_counter()
            try:
                question.put(subject)
            except PluginError:
                continue
            spent[question.hook] = max(spent.get(question.hook, 0.0), time.perf_counter() - start)
    total = sum(spent.values())
    if total > subject.budget_s:
        slowest = max(spent, key=lambda hook: spent[hook])
        most = f"{slowest} takes {spent[slowest]:.1f} s"
        fail(
            f"the hooks take {total:.1f} s for {name}, allowed are {subject.budget_s:g} s; {most}",
            "read slow facts once in vime_inventory and put them into the inventory",
        )
