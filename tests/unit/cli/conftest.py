"""Runs vime commands: in this process, or in one of their own with extra plugins on the path."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

from vime.cli.main import main

HEAVY = "torch ray vllm megatron transformers"
RUN = f"""
import sys
from vime.cli.main import main
try:
    code = main(sys.argv[1:])
except SystemExit as end:
    code = end.code
heavy = sorted(set({HEAVY.split()!r}) & set(sys.modules))
if heavy:
    sys.exit(f"the command imported {{heavy}}")
sys.exit(code)
"""

SHAPE = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_hidden_layers": 4,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 384,
    "vocab_size": 316,
    "tie_word_embeddings": True,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
}

Vime = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def vime(tmp_path: Path) -> Vime:
    """`vime(*words, env=)`: run a command and fail when it imported a heavy package."""

    def run(*words: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        clean = {name: value for name, value in os.environ.items() if name != "VIME_PLUGINS" and "proxy" not in name.lower()}
        site = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
        done = subprocess.run(
            [sys.executable, "-c", RUN, *words],
            capture_output=True,
            text=True,
            env={**clean, "PYTHONPATH": site, **(env or {})},
            timeout=60,
        )
        assert "the command imported" not in done.stderr
        return done

    return run


class Done(NamedTuple):
    """What a command in this process did."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """`command(*words)`: run a command in this process."""

    def run(*words: str) -> Done:
        code = main(list(words))
        told = capsys.readouterr()
        return Done(code, told.out, told.err)

    return run


@pytest.fixture
def sizes(tmp_path: Path) -> Path:
    """The folder `model` with the sizes of a small Qwen3, and no weights."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SHAPE))
    return folder


@pytest.fixture
def broken_plugin(tmp_path: Path) -> str:
    """A third-party plugin named `gadget` whose import fails."""
    info = tmp_path / "gadget_hardware-2.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: gadget-hardware\nVersion: 2.5\nKeywords: vime-hooks>=1.0,<2\n")
    (info / "entry_points.txt").write_text("[vime.plugins]\ngadget = gadget_hardware\n")
    (tmp_path / "gadget_hardware.py").write_text("import a_module_that_nobody_has\n")
    return "gadget"
