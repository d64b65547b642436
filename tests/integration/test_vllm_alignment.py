"""vLLM swallows what its platform plugins raise; an engine that resolved another platform says so before it loads a model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vime.errors import EngineError
from vime.rollout.engine import EngineServer, EngineSpec, engine_env
from vime.rollout.launcher import group_members
from vime.testing.tiny_models import make_tiny_qwen3

CPU = "vllm.platforms.cpu.CpuPlatform"
RAISES = "def register():\n    raise ImportError('libdummy.so: cannot open shared object file')\n"
RESOLVES = """
def register():
    return 'dummy_platform.DummyPlatform'

def __getattr__(name):
    if name != 'DummyPlatform':
        raise AttributeError(name)
    from vllm.platforms.cpu import CpuPlatform
    return type(name, (CpuPlatform,), {'__module__': __name__, '__qualname__': name})
"""


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EngineSpec:
    """An engine whose vLLM finds a platform plugin `dummy` of distribution `dummy-hardware`."""
    site = tmp_path / "site"
    info = site / "dummy_hardware-3.1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: dummy-hardware\nVersion: 3.1\n")
    (info / "entry_points.txt").write_text("[vllm.platform_plugins]\ndummy = dummy_platform:register\n")
    monkeypatch.setenv("PYTHONPATH", str(site))
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    make_tiny_qwen3(tmp_path / "model", seed=1)
    log = tmp_path / "engine.log"
    return EngineSpec(tmp_path / "model", "float32", log, "mine", 64, entry_points=("vime", "dummy"), name="engine 0")


def write_platform(spec: EngineSpec, source: str) -> None:
    (spec.model_path.parent / "site" / "dummy_platform.py").write_text(source)


async def failure(spec: EngineSpec) -> str:
    """What a server that cannot start says; none of its processes is left when it has said it."""
    server = EngineServer(spec)
    server.start()
    group = server.group
    try:
        with pytest.raises(EngineError) as caught:
            await server.wait_ready(120)
        assert group_members(group) == []
    finally:
        server.stop()
    return str(caught.value)


async def test_a_platform_plugin_that_raises_is_named_with_its_exception(spec: EngineSpec) -> None:
    write_platform(spec, RAISES)
    text = await failure(replace(spec, expected_platform="dummy_platform.DummyPlatform"))
    expected = (
        "engine 0: died at start (exit code 1): vime expects vLLM's platform dummy_platform.DummyPlatform, "
        f"vLLM resolved {CPU} (VLLM_PLUGINS 'vime,dummy')"
    )
    assert expected in text
    assert "platform plugin dummy (dummy-hardware 3.1) raised ImportError: libdummy.so: cannot open" in text
    assert "Loading" not in spec.log_path.read_text().partition("vime expects")[2]


def told(spec: EngineSpec) -> dict[str, Any]:
    """What the stand-alone form says in the engine's environment."""
    command = [sys.executable, "-m", "vime.weights.vllm_platform"]
    done = subprocess.run(command, env=engine_env(spec), capture_output=True, text=True, timeout=60, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def test_a_platform_that_another_plugin_took_over(spec: EngineSpec) -> None:
    """One that `VLLM_PLUGINS` does not admit is not even imported."""
    write_platform(spec, RESOLVES)
    site = spec.model_path.parent / "site"
    (site / "shut_out.py").write_text("import os\nos.abort()\n")
    points = site / "dummy_hardware-3.1.dist-info" / "entry_points.txt"
    points.write_text(points.read_text() + "shut = shut_out:register\n")
    answer = told(replace(spec, expected_platform="vllm.platforms.xpu.XPUPlatform"))
    assert answer["resolved"] == "dummy_platform.DummyPlatform"
    assert CPU in answer["classes"]
    assert {(p["name"], p["admitted"], p["platform"]) for p in answer["plugins"]} == {
        ("dummy", True, "dummy_platform.DummyPlatform"),
        ("shut", False, None),
    }


def test_doctor_finds_it_without_a_run(spec: EngineSpec, tmp_path: Path) -> None:
    write_platform(spec, RAISES)
    env = {**os.environ, "VLLM_PLUGINS": "dummy"}
    command = [sys.executable, "-m", "vime.cli.main", "doctor", "--platform", "cpu", "--engine", "--json"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=90)
    found = {check["id"]: check for check in json.loads(done.stdout)["checks"]}
    assert found["engine.platform"]["severity"] == "warning"
    assert CPU in found["engine.platform"]["finding"]
    assert "raised ImportError: libdummy.so" in found["engine.platform"]["finding"]
