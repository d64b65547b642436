"""What goes wrong outside vime: a clear error in seconds, a non-zero exit, nothing left running."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from live_runs import alive, environment, write_run

SECONDS = 20.0


def fails(path: Path, *words: str, within_s: float = SECONDS, **env: str) -> str:
    """Run and expect failure; returns what was printed. Nothing that the run started may outlive it."""
    command = [sys.executable, "-m", "vime.cli.main", "run", str(path), *words]
    start = time.monotonic()
    process = subprocess.Popen(
        command, env=environment(**env), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    seen: dict[int, psutil.Process] = {}
    while process.poll() is None and time.monotonic() - start < within_s + 30:
        try:
            seen |= {p.pid: p for p in psutil.Process(process.pid).children(recursive=True)}
        except psutil.NoSuchProcess:
            break
        time.sleep(0.1)
    output, _ = process.communicate(timeout=5)
    assert process.returncode == 1, output
    assert time.monotonic() - start < within_s
    time.sleep(0.5)
    assert list(alive(list(seen.values()))) == []
    return output


def no_model(folder: Path) -> None:
    (folder / "model" / "config.json").unlink()


def bad_row(folder: Path) -> None:
    (folder / "prompts.jsonl").write_text('{"prompt": "1 + 1 =", "label": "2"}\n{"prompt": "2 + 2 ="}\n')


def no_data(folder: Path) -> None:
    (folder / "prompts.jsonl").unlink()


@pytest.mark.parametrize(
    ("words", "spoil", "expected"),
    [
        (("schedule.num_stepz=3",), None, ("schedule.num_stepz", "num_steps")),
        (("rollout.sampling.temperature=0",), None, ("temperature", "above 0")),
        (("trainer.optimizer.lr=fast",), None, ("trainer.optimizer.lr", "fast")),
        (("rollout.vllm.max_num_seq=4",), None, ("max_num_seq", "max_num_seqs")),
        ((), no_model, ("config.json",)),
        ((), no_data, ("prompts.jsonl", "no such")),
        ((), bad_row, ("prompts.jsonl:2", "label")),
        (("--platform", "gb20"), None, ("gb20", "cpu")),
        (("--topology", "cpu-colocat"), None, ("cpu-colocat", "cpu-colocate")),
        (("--resume",), None, ("no run to resume",)),
    ],
    ids=["key", "temperature", "number", "engine-key", "model", "data", "row", "platform", "topology", "resume"],
)
def test_found_before_anything_starts(
    tmp_path: Path, words: tuple[str, ...], spoil: Callable[[Path], None] | None, expected: tuple[str, ...]
) -> None:
    path = write_run(tmp_path)
    if spoil is not None:
        spoil(tmp_path)
    output = fails(path, *words)
    assert all(text in output for text in expected), output
    assert not (tmp_path / "run" / "logs").exists()


def test_impossible_placement_names_the_arithmetic(tmp_path: Path) -> None:
    topology = {
        "schema": "vime.topology/v1",
        "name": "odd",
        "pools": {"host": {"platform": "cpu", "device": "cpu"}},
        "roles": {
            "actor": {"kind": "train", "pool": "host", "devices": 3, "parallel": {"tp": 2}},
            "rollout": {"kind": "rollout", "pool": "host", "engines": 1},
        },
    }
    output = fails(write_run(tmp_path, topology=topology))
    assert "E202" in output
    assert "3" in output


def test_a_broken_plugin_is_an_error_when_asked_for(tmp_path: Path) -> None:
    """A platform whose module does not import is refused with the original exception; there is no fallback."""
    package = tmp_path / "site"
    info = package / "acme_vime-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-vime\nVersion: 1.0\nKeywords: vime-hooks>=1.0,<2\n")
    (info / "entry_points.txt").write_text("[vime.plugins]\nacme = acme_vime_plugin\n")
    (package / "acme_vime_plugin.py").write_text("import a_library_that_is_not_there\n")
    search = os.pathsep.join([str(package), environment()["PYTHONPATH"]])
    topology = {
        "schema": "vime.topology/v1",
        "name": "open",
        "pools": {"host": {"platform": "auto", "device": "cpu"}},
        "roles": {"actor": {"kind": "train", "pool": "host"}, "rollout": {"kind": "rollout", "pool": "host"}},
    }
    output = fails(write_run(tmp_path, topology=topology), "--platform", "acme", PYTHONPATH=search)
    assert "acme" in output
    assert "a_library_that_is_not_there" in output


def test_a_used_directory_is_not_overwritten(tmp_path: Path) -> None:
    path = write_run(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("")
    output = fails(path)
    assert "--resume" in output
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == ""


def test_an_engine_that_dies_at_start_gives_its_cause(tmp_path: Path) -> None:
    output = fails(write_run(tmp_path, rollout={"vllm": {"block_size": 7}}), within_s=60.0)
    assert "engine 0: died at start (exit code 1): ValueError: No common block size for 7" in output


def test_an_engine_that_never_answers_is_named(tmp_path: Path) -> None:
    output = fails(write_run(tmp_path, rollout={"start_timeout_s": 3.0}), within_s=60.0)
    assert "engine 0" in output or "trainer rank 0" in output
    assert "3 s" in output


@pytest.mark.slow
def test_a_stopped_engine_is_named_within_the_deadline(tmp_path: Path) -> None:
    """SIGSTOP of an engine in mid-run: the run ends with an error that names it, and nothing stays behind."""
    from live_runs import descendants, reached, start, wait_for

    path = write_run(tmp_path, schedule={"num_steps": 500}, weights={"timeout_s": 4.0}, rollout={"request_timeout_s": 4.0})
    process = start(path)
    wait_for(lambda: reached(tmp_path / "run", 2), timeout_s=120, what="step 2")
    family = descendants(process.pid)
    cores = [p for p in family if "EngineCore" in p.name() or "EngineCore" in " ".join(p.cmdline())]
    assert cores
    stopped = time.monotonic()
    for core in cores:
        core.suspend()
    assert process.wait(60) == 1
    assert time.monotonic() - stopped < 45
    assert "engine 0" in (tmp_path / "out.log").read_text()
    time.sleep(1.0)
    assert list(alive(family)) == []


def test_a_tensor_altered_after_loading_stops_the_run(tmp_path: Path) -> None:
    """A vLLM plugin spoils one weight after the second update: the bytes arrived whole, only the probe can see it."""
    package = tmp_path / "site"
    info = package / "spoil-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: spoil\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\nspoil = spoil_plugin:register\n")
    (package / "spoil_plugin.py").write_text(
        "from vime.weights import vllm_ext\n"
        "updates = []\n"
        "def spoil(model, *_):\n"
        "    updates.append(1)\n"
        "    if len(updates) == 2:\n"
        "        dict(model.named_parameters())['model.layers.0.mlp.down_proj.weight'].data.add_(0.5)\n"
        "def register():\n"
        "    if spoil not in vllm_ext.post_update_hooks:\n"
        "        vllm_ext.post_update_hooks.append(spoil)\n"
    )
    search = os.pathsep.join([str(package), environment()["PYTHONPATH"]])
    output = fails(write_run(tmp_path), within_s=90.0, PYTHONPATH=search, VLLM_PLUGINS="spoil")
    assert "probe" in output
    assert "engine 0" in output
