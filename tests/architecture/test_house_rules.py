"""The house rules that a reader can rely on, checked over the sources."""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import time
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "vime").rglob("*.py"))
ALL_SOURCES = [*SOURCES, *sorted((ROOT / "plugins").glob("*/src/**/*.py"))]
VENDOR_WORDS = (
    *("cuda", "nccl", "npu", "hccl", "rocm", "hip", "rccl", "nvlink", "nvml", "nvidia", "amd", "ascend", "mindspeed"),
    *("gb200", "h200", "h100", "a100", "mi300x", "hopper", "blackwell"),
)
VENDOR = re.compile(rf"(?<![a-z0-9])({'|'.join(VENDOR_WORDS)})(?![a-z0-9])", re.IGNORECASE)
VENDOR_EXCEPTIONS = ("vime/compat/", "vime/platforms/cpu/host_facade.py")
FORBIDDEN_FOLDERS = {"utils", "common", "misc", "core", "backends", "helpers"}


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def words(source: str) -> Iterator[tuple[int, str]]:
    """Names and strings of a module; underscores separate words."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.NAME, tokenize.STRING, tokenize.COMMENT):
            yield token.start[0], token.string.replace("_", " ")


def vendor_words(source: str) -> list[str]:
    return [f"{line}: {match.group(0)}" for line, text in words(source) for match in VENDOR.finditer(text)]


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_core_names_no_vendor(path: Path) -> None:
    if relative(path).startswith(VENDOR_EXCEPTIONS):
        pytest.skip("answers to names that others chose")
    assert vendor_words(path.read_text()) == []


def test_the_vendor_check_sees_names_strings_and_comments() -> None:
    found = vendor_words("x.is_cuda_alike  # on a GB200\ny = 'backend: nccl'\nship = 'championship'\n")
    assert found == ["1: cuda", "1: GB200", "2: nccl"]


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


@pytest.mark.parametrize("path", ALL_SOURCES, ids=relative)
def test_functions_are_short_and_typed(path: Path) -> None:
    for node in functions(path):
        assert node.end_lineno is not None
        assert node.end_lineno - node.lineno < 80, f"{relative(path)}:{node.lineno} {node.name} is over 80 lines"
        for argument in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]:
            if argument.arg not in ("self", "cls"):
                assert argument.annotation is not None, (
                    f"{relative(path)}:{node.lineno} {node.name}({argument.arg}) has no type"
                )


@pytest.mark.parametrize("path", ALL_SOURCES, ids=relative)
def test_files_are_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 500


def test_the_loop_is_one_page() -> None:
    assert len((ROOT / "vime" / "loop.py").read_text().splitlines()) <= 80


def test_no_folder_hides_its_purpose() -> None:
    folders = {p.name for p in (ROOT / "vime").rglob("*") if p.is_dir()}
    assert folders & FORBIDDEN_FOLDERS == set()


ONLY_IN = {
    "ray": ("vime/cluster/",),
    "vllm": (
        "vime/rollout/engine.py",
        "vime/weights/vllm_ext.py",
        "vime/weights/flat_answer.py",
        "vime/weights/vllm_platform.py",
        "vime/platforms/cpu/",
        "vime/benchmarks/bare.py",
    ),
    "megatron": ("vime/trainer/megatron/", "vime/platforms/cpu/"),
}


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_large_libraries_stay_in_their_folder(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        modules = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            modules = [node.module]
        for module in modules:
            allowed = ONLY_IN.get(module.partition(".")[0])
            if allowed is not None:
                assert relative(path).startswith(allowed), f"{relative(path)} imports {module}"


def test_import_layers() -> None:
    done = subprocess.run([Path(sys.executable).with_name("lint-imports")], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:]


def test_ruff() -> None:
    ruff = Path(sys.executable).with_name("ruff")
    for command in (["check", "."], ["format", "--check", "."]):
        done = subprocess.run([ruff, *command], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-4000:]


def test_help_is_quick() -> None:
    def once() -> float:
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "vime.cli.main", "--help"], cwd=ROOT, check=True, capture_output=True)
        return time.perf_counter() - start

    assert min(once() for _ in range(3)) < 0.5


@pytest.mark.parametrize("command", ["check", "plan", "plugins", "doctor", "topology", "data", "report", "run"])
def test_commands_import_nothing_heavy(command: str) -> None:
    code = (
        "import sys, importlib; importlib.import_module('vime.cli.main');"
        f"importlib.import_module('vime.cli.{command}');"
        "print(sorted({'torch', 'ray', 'vllm', 'megatron', 'transformers', 'reasoning_gym'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("path", sorted((ROOT / "examples").rglob("*.yaml")), ids=relative)
def test_examples_load(path: Path) -> None:
    from vime.config.load import dump_resolved, load_config

    loaded = load_config(path)
    assert loaded.warnings == ()
    assert "schedule" in dump_resolved(loaded.config)


def test_shipped_topologies_load_and_readme_names_only_real_commands() -> None:
    from vime.cli.main import COMMANDS
    from vime.topology.load import load_topology, shipped_names

    assert {"cpu-colocate", "cpu-disaggregated", "cpu-train"} <= set(shipped_names())
    for name in shipped_names():
        assert load_topology(name).topology.name == name
    named = set(re.findall(r"\bvime ([a-z]+)\b", (ROOT / "README.md").read_text()))
    assert named - {"post"} <= set(COMMANDS)
