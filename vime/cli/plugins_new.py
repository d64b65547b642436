"""`vime plugins new`: write the project of a platform plugin, with the facts to fill in marked and a conformance test."""

from __future__ import annotations

import argparse
import re
from importlib import resources
from importlib.metadata import version
from pathlib import Path
from string import Template
from typing import Any

from packaging.utils import canonicalize_name
from packaging.version import Version

from vime.errors import PluginError
from vime.hooks.api import range_of_this
from vime.platforms.base import BASE
from vime.platforms.policy import AUTO, CORE

TEMPLATE = "plugin_template"
_SUFFIX = ".tmpl"
_NAME = re.compile(r"[a-z][a-z0-9_]*")


def add_parser(actions: Any) -> None:
    """Add `new` to the actions of `plugins`."""
    parser = actions.add_parser("new", help="write the project of a new platform plugin", allow_abbrev=False)
    parser.add_argument("name", metavar="NAME", help="name of the platform, as in --platform NAME")
    parser.add_argument("--distribution", metavar="D", help="name of the Python distribution (default: NAME-vime)")
    parser.add_argument("--dir", type=Path, metavar="D", help="folder to write (default: the distribution's name)")
    parser.set_defaults(handler=new_plugin)


def new_plugin(args: argparse.Namespace) -> int:
    """Write the project. Raises PluginError for a name or folder that cannot be used."""
    distribution = args.distribution or f"{args.name}-vime"
    _check_names(args.name, distribution)
    folder = args.dir or Path(distribution)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise PluginError("there is something already", where=str(folder), fix="choose another folder with --dir")
    module = canonicalize_name(distribution).replace("-", "_")
    try:
        written = write_project(folder, name=args.name, distribution=distribution, module=module)
    except OSError as error:
        raise PluginError(
            f"cannot write: {error.strerror}", where=str(folder), fix="choose another folder with --dir"
        ) from None
    print(f"{len(written)} files in {folder}\n")
    print("next:")
    print(f"  pip install --editable {folder}")
    print(f"  VIME_PLUGINS={args.name} vime plugins list")
    print(f"  pytest {folder / 'tests'}")
    print("  fill in what is marked FILL IN, and run the test again")
    return 0


def write_project(folder: Path, *, name: str, distribution: str, module: str) -> list[Path]:
    """Write every file of the template; returns their paths. Raises OSError."""
    core = Version(version(CORE))
    values = {
        "name": name,
        "NAME": name.upper(),
        "Name": "".join(part.capitalize() for part in name.split("_")),
        "distribution": distribution,
        "module": module,
        "core": f">={core.major}.{core.minor},<{core.major}.{core.minor + 1}",
        "api": range_of_this(),
    }
    written: list[Path] = []
    for source, inside in _template_files():
        target = folder / _renamed(inside, module)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(Template(source.read_text(encoding="utf-8")).substitute(values), encoding="utf-8")
        written.append(target)
    return written


def _check_names(name: str, distribution: str) -> None:
    if not _NAME.fullmatch(name):
        fix = "use small letters, digits and underscores, a letter first"
        raise PluginError(f"{name!r} cannot be the name of a platform", where="command line", fix=fix)
    if name in (AUTO, BASE):
        raise PluginError(f"the name {name!r} is reserved", where="command line", fix="choose another name")
    if not _NAME.fullmatch(canonicalize_name(distribution).replace("-", "_")):
        fix = f"use letters, digits and hyphens, for example {name}-vime"
        raise PluginError(f"{distribution!r} cannot be the name of a distribution", where="command line", fix=fix)


def _template_files() -> list[tuple[Any, tuple[str, ...]]]:
    """(file, path inside the project), folders before what is in them."""
    found: list[tuple[Any, tuple[str, ...]]] = []
    waiting: list[tuple[Any, tuple[str, ...]]] = [(resources.files("vime.cli").joinpath(TEMPLATE), ())]
    while waiting:
        folder, above = waiting.pop(0)
        for entry in sorted(folder.iterdir(), key=lambda e: e.name):
            if entry.is_dir():
                waiting.append((entry, (*above, entry.name)))
            elif entry.name.endswith(_SUFFIX):
                found.append((entry, (*above, entry.name.removesuffix(_SUFFIX))))
    return found


def _renamed(inside: tuple[str, ...], module: str) -> Path:
    """`src/plugin.py` -> `src/<module>/plugin.py`."""
    return Path(inside[0], module, *inside[1:]) if inside[0] == "src" else Path(*inside)
