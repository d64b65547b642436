"""`vime plan`: a plan in words, as JSON, for this host and for a recording."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from vime.cli.main import main

Vime = Callable[..., "Done"]


class Done(NamedTuple):
    """What a command in this process did."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def vime(capsys: pytest.CaptureFixture[str]) -> Vime:
    """`vime(*words)`: run a command in this process."""

    def run(*words: str) -> Done:
        return Done(main(list(words)), *capsys.readouterr())

    return run


@pytest.fixture
def run_file(tmp_path: Path) -> str:
    model = tmp_path / "model"
    model.mkdir()
    shape = {
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
    (model / "config.json").write_text(json.dumps(shape))
    path = tmp_path / "run.yaml"
    path.write_text("run: {dir: out}\nmodel: {path: model}\ndata: {path: none.jsonl}\nschedule: {num_steps: 2}\n")
    return str(path)


def test_in_words(vime: Vime, run_file: str) -> None:
    done = vime("plan", run_file)
    assert done.returncode == 0, done.stderr
    for part in (
        "cpu-colocate: qwen3",
        "placement",
        "memory per device",
        "chosen    host_shm",
        "rejected  disk",
        "hooks asked",
    ):
        assert part in done.stdout


def test_as_json(vime: Vime, run_file: str) -> None:
    done = vime("plan", run_file, "--json", "--topology", "cpu-disaggregated")
    told = json.loads(done.stdout)
    assert [role["slots"] for role in told["roles"]] == [[[0, 0]], [[0, 1]], [[0, 2]]]
    assert told["transport"]["rejected"]


def test_for_a_recording(vime: Vime, run_file: str, tmp_path: Path) -> None:
    facts = {"hostname": "far", "arch": "x86_64", "cpus": [0, 1], "memory_bytes": 4 * 2**30, "numa": [], "software": {}}
    recording = tmp_path / "r.json"
    recording.write_text(json.dumps({"platform": "cpu", "origin": "synthetic", "date": "2026-01-01", "data": facts}))
    done = vime("plan", run_file, "--inventory", str(recording))
    assert "far[0]" in done.stdout, done.stderr
    small = {**facts, "memory_bytes": 2**20}
    recording.write_text(json.dumps({"platform": "cpu", "origin": "synthetic", "date": "2026-01-01", "data": small}))
    done = vime("plan", run_file, "--inventory", str(recording))
    assert done.returncode == 1
    assert "E251 pools.host" in done.stderr


def test_a_file_that_is_no_recording(vime: Vime, run_file: str, tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text("{}")
    done = vime("plan", run_file, "--inventory", str(tmp_path / "r.json"))
    assert done.returncode == 1
    assert "not a recording" in done.stderr
