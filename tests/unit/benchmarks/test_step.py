"""The run files of `vime bench step` and its table."""

from __future__ import annotations

import argparse
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import yaml

from vime.benchmarks import step
from vime.benchmarks.engines import Clock, Here
from vime.cli.bench import parser_of
from vime.config.load import load_config
from vime.config.schema import WeightsSection
from vime.errors import DeadlineError
from vime.weights.protocol import is_due


def bench(*words: str, virtual: bool = False, limit_s: float = 100.0) -> step.Bench:
    args = parser_of("step").parse_args(words)
    args.response = args.response or 64
    node = SimpleNamespace(virtual=virtual, devices=(None, None))
    here = SimpleNamespace(node=node, capabilities=SimpleNamespace(default_dtype="bfloat16"))
    return step.Bench(args, cast("Here", here), Clock(limit_s))


def loaded(tmp_path: Path, made: step.Bench, residency: str) -> Any:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(made.run_file(residency, tmp_path, tmp_path / "model")))
    return load_config(path).config


@pytest.mark.parametrize("residency", step.RESIDENCIES)
@pytest.mark.parametrize("virtual", [True, False], ids=["host", "device"])
def test_run_files_load(tmp_path: Path, residency: str, virtual: bool) -> None:
    config = loaded(tmp_path, bench("--steps", "4", "--kv-gib", "0.5", virtual=virtual), residency)
    assert config.schedule.num_steps == 4
    assert not config.checkpoint.last
    assert config.model.dtype == "bfloat16"
    bounds = {"kv_cache_memory_bytes": 2**29, "gpu_memory_utilization": 0.2, "max_num_seqs": 128, "enforce_eager": True}
    assert config.rollout.vllm == ({} if virtual else bounds)


def test_recompute_is_vimes_own_unless_asked(tmp_path: Path) -> None:
    default = loaded(tmp_path, bench(), "park").trainer.recompute
    assert "recompute" not in bench().run_file("park", tmp_path, tmp_path)["trainer"]
    assert loaded(tmp_path, bench("--recompute", "full"), "park").trainer.recompute == "full" != default


def test_every_publication_of_a_measured_run_is_probed(tmp_path: Path) -> None:
    checks = WeightsSection.model_validate(bench().run_file("park", tmp_path, tmp_path)["weights"])
    assert all(is_due(checks.probe, count) for count in range(1, 30))
    assert [is_due(checks.fingerprint, count) for count in (1, 2, 20)] == [True, False, False]


def test_a_run_is_stopped_early_enough_to_end_within_the_limit() -> None:
    made = bench(limit_s=10.0)
    assert made.deadline() - step.time.monotonic() == pytest.approx(8.0, abs=0.5)
    with pytest.raises(DeadlineError, match="--limit"):
        bench(limit_s=0.0).deadline()


def part(**changes: Any) -> dict[str, Any]:
    known = {"predicted": 2.0, "measured": 3.0, "ratio": 1.5, "note": "median of 2"}
    compared = [{"what": "update", "unit": "s", **known}, {"what": "params", "unit": "bytes", **known, "measured": 3 * 2**20}]
    return {
        "ok": True,
        "ended": "exit code 0",
        "seconds": 50.0,
        "plan": {"residency": "park"},
        "steps": [{"step": 1}],
        "walls": [{"step": 1, "seconds": {"wall": 4.0, "generate": 3.0, "train": 0.5}}],
        "syncs": [{"step": 0, "seconds": {"sync": 0.4, "sync/update": 0.25}, "metrics": {"sync/probe_abs_diff": 2e-7}}],
        "transport": "disk",
        "losses": [{"step": 1, "loss": 0.25, "grad_norm": 1.5}],
        "staleness": [{"mean": 0.25, "max": 1, "groups_by_steps": {"0": 3, "1": 1}}],
        "log_prob_differences": [[3e-7, 1e-6]],
        "predicted": compared,
        "device_gib_by_phase": {"serving": {"predicted": 2.0, "measured": None, "ratio": None}},
        "useful_share": 0.875,
        **changes,
    }


def test_the_table_ends_with_the_share_and_shows_what_is_unknown() -> None:
    lines = list(step.report({"words": {"ok": True}, "auto": part()}))
    assert lines[0] == "auto (park): exit code 0 after 50 s, weights by disk"
    assert any("loss 0.25, grad_norm 1.5; groups behind: 3 by 0, 1 by 1" in line for line in lines)
    assert any("update 0.250" in line and "probe 2.00e-07" in line for line in lines)
    assert any(line.split()[-3:] == ["2.000", "-", "-"] for line in lines)
    assert any("params, MiB" in line and "3.000" in line and "median of 2" in line for line in lines)
    assert "0.875" in lines[-1]


def test_a_comparison_that_failed_is_told() -> None:
    lines = list(step.report({"park": part(predicted={"exit_code": 1, "tail": ["vime plan: no rows"]})}))
    assert any("no rows" in line for line in lines)


def test_a_run_that_failed_shows_its_last_words() -> None:
    failed = part(ok=False, ended="exit code 1", logs={"driver.log": ["vime run: no memory"]}, error="the run ended")
    assert "vime run: no memory" in list(step.report({"park": failed}))[-1]
    assert list(step.report({"park": {"ok": False, "error": "no weights"}})) == ["park failed: no weights"]


def test_rates_of_a_publication_by_hand() -> None:
    seconds = {"sync": 2.0, "sync/hold": 1.5, "sync/update": 0.25}
    found = step.rates({"metrics": {"perf/update_weights_wire_bytes": 1e9}, "seconds": seconds})
    assert found == {"update_gb_per_s": 4.0, "whole_gb_per_s": 0.5, "without_hold_gb_per_s": 2.0}
    assert step.rates({"metrics": {}, "seconds": {"sync": 0.0}}) == {}


def test_apart_is_one_run_of_disjoint_devices(tmp_path: Path) -> None:
    config = loaded(tmp_path, bench("--layout", "apart", "--max-staleness", "1", "--transport", "collective"), "apart")
    assert config.schedule.max_staleness == 1
    assert isinstance(config.topology, dict)
    assert config.topology["share"] == []
    assert config.topology["sync"][0]["require"] == ["collective"]


def test_words_of_the_command() -> None:
    args = parser_of("step").parse_args(["--drill", "kill", "negative", "--set", "run.seed=7"])
    assert isinstance(args, argparse.Namespace)
    assert args.drill == ["kill", "negative"]
    assert args.overrides == ["run.seed=7"]
