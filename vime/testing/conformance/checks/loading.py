"""Importing and registering a plugin."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from functools import cache
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import InvalidSpecifier
from packaging.utils import canonicalize_name

from vime.errors import PluginError
from vime.hooks.api import API, API_TEXT, KEYWORD, admits, declared_range, range_of_this
from vime.hooks.markers import PluginInfo
from vime.platforms.lineage import Platform, Plugin
from vime.platforms.strict import implementations
from vime.testing.conformance.registry import NotRun, check, fail, require
from vime.testing.conformance.subject import Subject

IMPORT_LIMIT_S = 3.0
CHILD_LIMIT_S = 60.0
_CORE = "vime"

_IMPORT = """
import json, os, sys, time
name, answer = sys.argv[1:]
import vime.hooks, vime.platforms.lineage, vime.platforms.host
before, start = set(sys.modules), time.perf_counter()
__import__(name)
seconds = time.perf_counter() - start
tops = sorted({module.partition(".")[0] for module in set(sys.modules) - before})
with open(answer, "w") as file:
    json.dump({"seconds": seconds, "modules": tops}, file)
"""

_AGAIN = """
import importlib, json, sys
name, answer = sys.argv[1:]
from vime.platforms.lineage import Plugin
module = importlib.import_module(name)
first = sorted(hook.hook for hook in Plugin.of(module).hooks)
second = sorted(hook.hook for hook in Plugin.of(importlib.reload(module)).hooks)
with open(answer, "w") as file:
    json.dump({"first": first, "second": second}, file)
"""


def in_child(subject: Subject, code: str, name: str) -> tuple[dict[str, Any], str]:
    """Run code with the plugin's module name in a fresh process: its JSON answer and what it printed. Fails where it dies."""
    answer = subject.folder / f"{name}.json"
    path = os.pathsep.join(entry or os.getcwd() for entry in (*subject.search_path, *sys.path))
    done = subprocess.run(
        [sys.executable, "-c", code, str(subject.module), str(answer)],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        check=False,
        text=True,
        timeout=CHILD_LIMIT_S,
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        fail(f"importing {subject.module} in a fresh process ends with exit code {done.returncode}: {last}", "mend the import")
    return json.loads(answer.read_text()), done.stdout


@cache
def packages_of(distribution: str) -> frozenset[str]:
    """Top-level packages of a distribution and of everything that it requires without extras."""
    wanted, seen, found = [distribution], set[str](), set[str]()
    while wanted:
        name = canonicalize_name(wanted.pop())
        if name in seen:
            continue
        seen.add(name)
        try:
            owner = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        found |= {file.parts[0].partition(".")[0] for file in owner.files or ()}
        parsed = [Requirement(text) for text in owner.requires or ()]
        wanted += [r.name for r in parsed if r.marker is None or r.marker.evaluate({"extra": ""})]
    return frozenset(found)


@check("C01", title="import is light and silent")
def import_is_light(subject: Subject) -> None:
    """In a fresh process the plugin's module imports only the standard library, vime, what vime itself requires, and its
    lineage's own packages; no library of a vendor, no torch. It takes less than three seconds and prints nothing."""
    if subject.module is None:
        raise NotRun("the plugin is an object in memory")
    found, printed = in_child(subject, _IMPORT, "import")
    own = {module.partition(".")[0] for module in (subject.module, *(p.module for p in _lineage_modules(subject)))}
    allowed = sys.stdlib_module_names | packages_of(_CORE) | own | {_CORE}
    alien = [top for top in found["modules"] if top not in allowed]
    require(not alien, f"importing {subject.module} imports {', '.join(alien)}", "import it inside the function that needs it")
    slow = f"importing {subject.module} takes {found['seconds']:.1f} s, allowed are {IMPORT_LIMIT_S:g} s"
    require(found["seconds"] < IMPORT_LIMIT_S, slow, "move work out of the module into the hooks")
    require(not printed, f"importing {subject.module} prints {printed[:80]!r}", "print nothing at import")


def _lineage_modules(subject: Subject) -> list[Any]:
    points = {point.name: point for point in importlib.metadata.entry_points(group="vime.plugins")}
    return [points[name] for name in subject.platform.lineage if name in points]


@check("C02", title="metadata is complete")
def metadata_is_complete(subject: Subject) -> None:
    """VIME_PLUGIN carries the entry point's name and a parent. The distribution's metadata states a range of the hook API that
    contains this version and not the next major one, and requires a vime that this one satisfies."""
    info = getattr(subject.namespace, "VIME_PLUGIN", None)
    if not isinstance(info, PluginInfo):
        fail("the module has no VIME_PLUGIN", "add VIME_PLUGIN = PluginInfo(name, parent=...)")
    require(
        info.name == subject.name, f"VIME_PLUGIN is named {info.name!r}, the entry point {subject.name!r}", "make them equal"
    )
    require(info.parent, "VIME_PLUGIN names no parent", "name one; base is the parent of most")
    if subject.distribution is None or canonicalize_name(subject.distribution) == _CORE:
        return
    _range_suits(subject.distribution)
    parsed = [Requirement(text) for text in importlib.metadata.requires(subject.distribution) or []]
    needs = [r for r in parsed if canonicalize_name(r.name) == _CORE and (r.marker is None or r.marker.evaluate({"extra": ""}))]
    require(needs, f"{subject.distribution} does not require {_CORE}", f"add {_CORE} with a range to its dependencies")
    version = importlib.metadata.version(_CORE)
    require(needs[0].specifier, f"{subject.distribution} requires any {_CORE}", "give the range of versions it was tested with")
    admits = needs[0].specifier.contains(version, prereleases=True)
    require(admits, f"{subject.distribution} requires {needs[0]}, this is {version}", "install a version that supports it")


def _range_suits(distribution: str) -> None:
    """Fail unless the metadata states a range of the hook API with this version in it and the next major one out of it."""
    keywords = ",".join(importlib.metadata.metadata(distribution).get_all("Keywords") or ())
    supported = declared_range(keywords)
    write = f'write "{KEYWORD}{range_of_this()}" among the keywords of pyproject.toml'
    if supported is None:
        fail(f"the metadata of {distribution} states no range of the hook API", write)
    try:
        here, beyond = admits(supported), admits(supported, (API[0] + 1, 0))
    except InvalidSpecifier:
        fail(f"{supported!r} in the keyword {KEYWORD} is no version range", write)
    require(here, f"{KEYWORD}{supported} leaves out hook API {API_TEXT}", "state the range you were written for")
    require(not beyond, f"{KEYWORD}{supported} has no end before {API[0] + 1}, where anything may change", write)


@check("C03", title="registration is strict")
def registration_is_strict(subject: Subject) -> None:
    """Every function named vime_* is a marked implementation of a known hook with known parameters, and no wrapper of the
    old style."""
    try:
        found = implementations(subject.name, subject.namespace)
    except PluginError as error:
        fail(error.what, error.fix or "mend the hook")
    require(found, "the plugin implements no hook", "mark the implementations with @hookimpl")


@check("C04", title="registers twice")
def registers_twice(subject: Subject) -> None:
    """The plugin can be registered a second time in a process, and imported again, with the same hooks."""
    above = subject.platform.plugins[:-1]
    try:
        first, second = (_hooks(Platform((*above, Plugin.of(subject.namespace)))) for _ in range(2))
    except PluginError as error:
        raise NotRun(f"the plugin cannot be registered ({error.what}); C03 reports it") from error
    require(first == second, f"the second registration has hooks {second}, the first {first}", "make the hooks when imported")
    if subject.module is None:
        return
    found, _ = in_child(subject, _AGAIN, "again")
    what = f"imported again the module has hooks {found['second']}, before {found['first']}"
    require(found["first"] == found["second"], what, "do nothing at import that cannot be done twice")


def _hooks(platform: Platform) -> list[str]:
    return sorted(hook.hook for hook in platform.plugins[-1].hooks)
