"""`vime check`: every finding with its place, without heavy packages."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Command = Callable[..., Any]


@pytest.fixture
def folder(tmp_path: Path, sizes: Path) -> Path:
    """A run file with a model folder and a data file that are all right."""
    (sizes / "tokenizer.json").write_text("{}")
    (sizes / "model.safetensors").write_bytes(b"")
    (tmp_path / "d.jsonl").write_text('{"prompt": "1 + 1 =", "label": "2"}\n')
    (tmp_path / "run.yaml").write_text(
        "run: {dir: out}\nmodel: {path: model}\ndata:\n  path: d.jsonl\nschedule: {num_steps: 2}\nreward: {kind: exact}\n"
    )
    return tmp_path


def test_a_good_run(command: Command, folder: Path) -> None:
    done = command("check", str(folder / "run.yaml"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "run.yaml: ok; colocate" in done.stdout
    assert "weights by host_shm" in done.stdout


def test_findings_of_every_part_at_once(command: Command, folder: Path) -> None:
    (folder / "model" / "model.safetensors").unlink()
    (folder / "d.jsonl").write_text('{"prompt": 1}\n')
    (folder / "run.yaml").write_text(
        "run: {dir: out}\nmodel: {path: model}\ndata:\n  path: d.jsonl\nschedule: {num_steps: 2}\nreward: {kind: exakt}\n"
        "topology:\n  pools: {p: {platform: cpu}}\n  roles:\n    actor: {kind: train, devices: 7, parallel: {tp: 2}}\n"
        "evaluation:\n  sets:\n    - {name: a, path: none.jsonl}\n"
    )
    done = command("check", str(folder / "run.yaml"))
    assert done.returncode == 1
    at = f"error: {folder}/run.yaml"
    assert f"{at}:2: model folder {folder}/model has no weights" in done.stdout
    assert f"{at}:6: unknown grader 'exakt'" in done.stdout
    assert f"{at}:10: E202 roles.actor.devices: 7 devices are not a multiple of tp 2" in done.stdout
    assert f"error: {folder}/d.jsonl:1" in done.stdout
    assert "none.jsonl" in done.stdout
    assert "5 error(s)" in done.stdout


def test_errors_of_the_run_file(command: Command, folder: Path) -> None:
    done = command("check", str(folder / "run.yaml"), "schedule.num_stepz=3", "rollout.batch_size=x")
    assert done.returncode == 1
    assert "error: override `schedule.num_stepz=3`: unknown key `schedule.num_stepz`" in done.stdout
    assert "did you mean `num_steps`?" in done.stdout
    assert "override `rollout.batch_size=x`: `rollout.batch_size`: expected a number, got 'x'" in done.stdout


def test_updates_in_flight_need_devices_of_their_own_and_a_run_that_is_ahead(command: Command, folder: Path) -> None:
    path = folder / "run.yaml"
    path.write_text(path.read_text() + "weights:\n  update: in_flight\n")
    done = command("check", str(path), "--topology", "cpu-colocate", "schedule.max_staleness=1")
    assert done.returncode == 1
    assert f"error: {path}:8: `weights.update: in_flight` keeps requests" in done.stdout
    assert "fix: use drain, or a topology whose engines have devices of their own, such as cpu-disaggregated" in done.stdout
    done = command("check", str(path), "--topology", "cpu-disaggregated", "schedule.max_staleness=1")
    assert (done.returncode, "warning" in done.stdout) == (0, False)
    done = command("check", str(path), "--topology", "cpu-disaggregated")
    assert f"warning: {path}:8: `weights.update` has no effect: at schedule.max_staleness 0" in done.stdout


def test_missing_files(command: Command, folder: Path) -> None:
    done = command("check", str(folder / "run.yaml"), "data.path=/none/d.jsonl", "model.path=/none/model")
    assert done.returncode == 1
    assert "override `model.path=/none/model`: model folder /none/model does not exist" in done.stdout
    assert "/none/d.jsonl" in done.stdout
    done = command("check", str(folder / "nothing.yaml"))
    assert done.returncode == 1
    assert "no such file" in done.stdout


def test_platform_and_topology_of_the_command_line(command: Command, folder: Path) -> None:
    words = [str(folder / "run.yaml"), "--topology", "cpu-disaggregated"]
    assert "cpu-disaggregated" in command("check", *words).stdout
    done = command("check", *words, "--platform", "cpux")
    assert done.returncode == 1
    assert "E105 pools.host.platform: cpu is pinned here, but cpux was asked for" in done.stdout


def test_a_topology_without_engines(command: Command, folder: Path) -> None:
    done = command("check", str(folder / "run.yaml"), "topology=cpu-train")
    assert done.returncode == 1
    assert "no rollout role, but the algorithm samples" in done.stdout
    assert command("check", str(folder / "run.yaml"), "topology=cpu-train", "algorithm.kind=sft").returncode == 0


def test_warnings_and_sources(command: Command, folder: Path) -> None:
    done = command("check", str(folder / "run.yaml"), "evaluation.every=3", "rollout.vllm.max_num_seqs=8", "--sources")
    assert done.returncode == 0
    assert "warning: override `evaluation.every=3`: `evaluation.every` has no effect" in done.stdout
    assert "note: rollout.vllm was checked against vllm: " in done.stdout
    assert "schedule.num_steps" in done.stdout


def test_it_needs_none_of_the_heavy_packages_installed(folder: Path) -> None:
    """They are not merely unimported: an import of any of them would fail."""
    code = (
        "import sys\n"
        "for name in ('torch', 'ray', 'vllm', 'megatron', 'transformers', 'vllm_router'): sys.modules[name] = None\n"
        "from vime.cli.main import main\n"
        f"sys.exit(main(['check', {str(folder / 'run.yaml')!r}, 'rollout.vllm.max_num_seqs=4']))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_folder_with_sizes_only_is_enough_for_a_plan(command: Command, folder: Path) -> None:
    for name in ("model.safetensors", "tokenizer.json"):
        (folder / "model" / name).unlink()
    done = command("check", str(folder / "run.yaml"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"warning: model folder {folder}/model has sizes only (config.json): a run needs a complete" in done.stdout


def test_such_a_folder_is_refused_by_a_run_before_anything_starts(command: Command, folder: Path) -> None:
    for name in ("model.safetensors", "tokenizer.json"):
        (folder / "model" / name).unlink()
    done = command("run", "--platform", "cpu", str(folder / "run.yaml"), "--topology", "cpu-colocate")
    assert done.returncode == 1
    assert f"model folder {folder}/model has no weights (*.safetensors) and no tokenizer" in done.stderr
    assert not (folder / "out").exists()
