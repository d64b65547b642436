"""What a benchmark's engine is started with, its limit, its record."""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest

from vime.benchmarks import bare
from vime.benchmarks.engines import Clock, as_trainer, bounded, look, model_of, open_record, plan_run, table, with_logs
from vime.benchmarks.shapes import SHAPES, write_model
from vime.cli.bench import parser_of
from vime.errors import ConfigError, DeadlineError, EngineError
from vime.platforms.cpu.engine import ARGS


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_model(folder / "tiny-float32", SHAPES["tiny"], device="cpu", dtype="float32")
    return folder


@pytest.fixture
def asked(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return parser_of("rollout").parse_args(["--models", str(models), "--out", str(tmp_path)])


@pytest.fixture
def planned(asked: argparse.Namespace) -> Any:
    here = look(asked)
    return plan_run(asked, here, model_of(asked, here, Clock(60)), tokens=(20, 12))


def test_the_engine_is_a_runs_with_the_lengths_that_are_asked(planned: Any) -> None:
    spec = planned.spec
    assert dict(spec.args) == ARGS
    assert spec.max_model_len == 32
    assert spec.expected_platform == "vllm.platforms.cpu.CpuPlatform"
    assert "guardian.py" in " ".join(spec.command_prefix)
    assert planned.told()["transport"] == "host_shm"


def test_values_of_the_run_file_reach_the_engine(asked: argparse.Namespace) -> None:
    asked.overrides = ["rollout.vllm.max_num_seqs=7"]
    here = look(asked)
    planned = plan_run(asked, here, model_of(asked, here, Clock(60)))
    assert planned.spec.args["max_num_seqs"] == 7


def test_weights_that_are_there_are_not_drawn_again(asked: argparse.Namespace, models: Path) -> None:
    before = (models / "tiny-float32" / "model.safetensors").stat().st_mtime_ns
    assert model_of(asked, look(asked), Clock(60)) == models / "tiny-float32"
    assert (models / "tiny-float32" / "model.safetensors").stat().st_mtime_ns == before


def test_weights_that_cannot_be_written_are_said(asked: argparse.Namespace, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    asked.models = tmp_path / "file"
    with pytest.raises(ConfigError, match="no weights of shape tiny"):
        model_of(asked, look(asked), Clock(60))


def test_the_floor_has_the_servers_arguments(planned: Any) -> None:
    words = bare.llm_arguments(planned.spec)
    assert words.items() >= ARGS.items()
    assert (words["max_model_len"], words["dtype"], words["logprobs_mode"]) == (32, "float32", "processed_logprobs")


def test_a_floor_that_fails_tells_its_cause_and_keeps_its_log(
    planned: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The child is the real one; the vLLM that it finds refuses every model."""
    sources = {
        "vllm/__init__.py": "class LLM:\n    def __init__(self, model):\n        raise ValueError(f'refused: {model}')\n",
        "vllm/engine/__init__.py": "",
        "vllm/engine/arg_utils.py": "import dataclasses\n\n\n@dataclasses.dataclass\nclass EngineArgs:\n    model: str\n",
    }
    for name, source in sources.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(source)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(EngineError, match=f"ended with exit code 1: ValueError: refused: {planned.config.model.path}"):
        bare.ask(planned, {"work": "sleep"}, Clock(30))
    assert planned.logs()["bare-sleep.log"][-1].startswith("ValueError")


def test_as_trainer_sets_the_trainers_environment(planned: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in planned.plan.actor.env:
        monkeypatch.delenv(name, raising=False)
    as_trainer(planned)
    import os

    assert os.environ.items() >= dict(planned.plan.actor.env).items()


def test_a_part_that_takes_too_long_is_ended_with_the_limit_in_the_error() -> None:
    clock = Clock(0.2)

    async def body() -> dict[str, Any]:
        await asyncio.sleep(30)
        return {}

    with pytest.raises(DeadlineError, match=r"0\.2 s are over"):
        bounded(body, clock)
    with pytest.raises(DeadlineError):
        clock.left()


def test_a_failed_part_keeps_error_and_last_lines_of_logs(planned: Any) -> None:
    logs = planned.folder / "run" / "logs"
    logs.mkdir(parents=True)
    (logs / "engine-0.log").write_text("".join(f"line {i}\n" for i in range(500)))

    def work() -> dict[str, Any]:
        raise EngineError("it broke")

    found = with_logs(work, planned)
    assert found["ok"] is False
    assert "it broke" in found["error"]
    assert found["logs"]["engine-0.log"][-1] == "line 499"
    assert len(found["logs"]["engine-0.log"]) == 100


def test_a_record_goes_on_with_the_same_words_only(asked: argparse.Namespace) -> None:
    record = open_record(asked, "rollout")
    record.run("one", lambda: {"value": 1})
    assert open_record(asked, "rollout").parts["one"]["value"] == 1
    asked.limit = 5.0
    assert "one" in open_record(asked, "rollout").parts
    asked.prompts = 3
    assert "one" not in open_record(asked, "rollout").parts
    assert json.loads((asked.out / "bench-rollout.json").read_text())["parts"]["one"]["ok"]


def test_a_table_is_aligned() -> None:
    text = table("title", [("long name", 12345.6, "unit"), ("x", 0.5), ("alone",)])
    assert text.splitlines() == ["title", "-----", "long name  12,346  unit", "x             0.5", "alone"]
