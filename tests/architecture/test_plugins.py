"""What a platform plugin of this repository may know: the hook API, and of other plugins nothing, except gb200 of cuda."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PLUGINS = ("ascend", "cuda", "gb200", "rocm")
PARENTS = {"gb200": {"vime_cuda"}}
MODULES = {f"vime_{name}" for name in PLUGINS}
MAY_IMPORT = (
    *("vime.hooks", "vime.facts", "vime.errors", "vime.platforms.host", "vime.planning.masks"),
    *("vime.memory", "vime.weights", "vime.trainer.runtime", "vime.trainer.device_runtime"),
)
ONLY_IN_TESTING = ("vime.testing",)
SHAPE = ("plugin", "probe", "inventory", "process", "trainer", "engine", "memory", "weights", "perf", "doctor")
HEAVY = {"torch", "ray", "vllm", "megatron", "pynvml", "amdsmi", "torch_npu", "acl", "transformers", "mindspeed"}


def sources(name: str) -> list[Path]:
    return sorted((ROOT / "plugins" / name / "src").rglob("*.py"))


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """Absolute module names; `from a import b` counts as `a.b` where that is a module of ours."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            deeper = node.module in ("vime", "vime.platforms", "vime.trainer")
            yield from ((node.lineno, f"{node.module}.{alias.name}" if deeper else node.module) for alias in node.names)


def within(module: str, prefixes: tuple[str, ...]) -> bool:
    return any(module == prefix or module.startswith(f"{prefix}.") for prefix in prefixes)


def breaches(name: str, path: Path) -> list[str]:
    """Imports that a plugin's module may not have, as `line: module`."""
    own = {f"vime_{name}"} | PARENTS.get(name, set())
    found: list[str] = []
    for line, module in imported(path):
        root = module.partition(".")[0]
        if root in MODULES and root not in own:
            found.append(f"{line}: {module}")
        if root == "vime":
            allowed = MAY_IMPORT + ONLY_IN_TESTING if "testing" in path.parts else MAY_IMPORT
            if not within(module, allowed):
                found.append(f"{line}: {module}")
    return found


@pytest.mark.parametrize("name", PLUGINS)
def test_plugins_import_the_hook_api_and_nothing_else_of_vime(name: str) -> None:
    assert len(sources(name)) >= len(SHAPE)
    assert {path.name: found for path in sources(name) if (found := breaches(name, path))} == {}


def test_the_import_check_sees_what_it_must(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text("import vime_cuda.probe\nfrom vime.platforms import host, cpu\nfrom vime.config import schema\n")
    assert breaches("rocm", path) == ["1: vime_cuda.probe", "2: vime.platforms.cpu", "3: vime.config"]
    assert breaches("gb200", path) == ["2: vime.platforms.cpu", "3: vime.config"]


@pytest.mark.parametrize("name", PLUGINS)
def test_plugins_have_one_shape(name: str) -> None:
    folder = ROOT / "plugins" / name
    package = folder / "src" / f"vime_{name}"
    assert {path.stem for path in package.glob("*.py")} >= set(SHAPE)
    assert (folder / "README.md").read_text().count("\n") > 20
    assert list((folder / "tests").glob("test_*.py"))
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    assert project["name"] == f"vime-{name}"
    assert project["entry-points"]["vime.plugins"] == {name: f"vime_{name}.plugin"}


@pytest.mark.parametrize("name", PLUGINS)
def test_plugins_import_nothing_heavy(name: str) -> None:
    code = f"import sys, vime_{name}.plugin; print(sorted({HEAVY!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", PLUGINS)
def test_hook_implementations_only_name_where_their_answer_is_made(name: str) -> None:
    tree = ast.parse((ROOT / "plugins" / name / "src" / f"vime_{name}" / "plugin.py").read_text())
    hooks = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("vime_")]
    assert hooks
    for hook in hooks:
        assert hook.end_lineno is not None
        assert hook.end_lineno - hook.lineno <= 5, f"{name}: {hook.name} is longer than five lines"


def test_the_core_lists_its_plugins_as_extras() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for name in PLUGINS:
        version = tomllib.loads((ROOT / "plugins" / name / "pyproject.toml").read_text())["project"]["version"]
        assert extras[name] == [f"vime-{name}=={version}"]
