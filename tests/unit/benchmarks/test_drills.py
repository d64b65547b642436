"""What drills plant, and what they accept as survival."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vime.benchmarks import drills, faults

# ---- faults


@pytest.fixture
def fault(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Set the fault of this process; counts begin anew."""

    def planted(**content: Any) -> None:
        monkeypatch.setenv(faults.FAULT_ENV, json.dumps(content))
        monkeypatch.setattr(faults, "_updates", {"loaded": 0, "transit": 0})

    return planted


def test_a_planted_fault_is_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/somewhere/else")
    monkeypatch.setenv("VLLM_PLUGINS", "theirs")
    env = faults.plant(tmp_path / "site", "transit", update=2, tensor="a.weight")
    assert env["PYTHONPATH"].split(os.pathsep) == [str(tmp_path / "site"), "/somewhere/else"]
    assert env["VLLM_PLUGINS"] == "theirs,vime_drill"
    (found,) = [
        point
        for distribution in importlib.metadata.distributions(path=[str(tmp_path / "site")])
        for point in distribution.entry_points
    ]
    assert (found.group, found.name, found.load()) == ("vllm.general_plugins", "vime_drill", faults.register)


class Half:
    """Yields two tensors, and says whether it was closed."""

    closed = False
    name = "real"

    def receive(self, info: Any) -> Iterator[tuple[str, Any]]:
        import torch

        try:
            yield "layers.0.a.weight", torch.arange(4.0)
            yield "layers.1.a.weight", torch.arange(4.0)
        finally:
            self.closed = True


class Built:
    def __init__(self) -> None:
        self.half = Half()

    def build(self) -> Half:
        return self.half


def test_one_bit_of_one_tensor_changes_in_the_asked_update_only(fault: Any) -> None:
    import torch

    fault(kind="transit", update=2, tensor="1.a.weight")
    built = Built()
    half = faults.spoiling(lambda protocol: built)("host_shm").build()
    assert half.name == "real"
    rounds = [dict(half.receive({})) for _ in range(3)]
    same = [{name: torch.equal(tensor, torch.arange(4.0)) for name, tensor in got.items()} for got in rounds]
    whole = {"layers.0.a.weight": True, "layers.1.a.weight": True}
    assert same == [whole, {**whole, "layers.1.a.weight": False}, whole]
    assert built.half.closed


def test_leaving_early_closes_the_real_half(fault: Any) -> None:
    fault(kind="transit", update=9, tensor="x")
    built = Built()
    arriving = faults.spoiling(lambda protocol: built)("host_shm").build().receive({})
    next(arriving)
    arriving.close()
    assert built.half.closed


def test_a_loaded_parameter_is_altered_once(fault: Any) -> None:
    import torch

    fault(kind="loaded", update=2, tensor="weight")
    model = torch.nn.Linear(3, 2, bias=False)
    before = model.weight.detach().clone()
    changed = []
    for _ in range(3):
        faults.spoil_loaded(model, None)
        changed.append(not torch.equal(model.weight, before))
    assert changed == [False, True, True]
    assert torch.allclose(model.weight - before, torch.full((2, 3), 0.5))


def test_an_engine_that_was_not_planted_loads_nothing() -> None:
    """`register` in a process without the variable imports no part of vLLM."""
    env = {name: value for name, value in os.environ.items() if name != faults.FAULT_ENV}
    code = "import sys; from vime.benchmarks.faults import register; register(); print('vllm' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=env)
    assert done.stdout.strip() == "False"


# ---- verdicts


def rows(*, restarted: float = 25.0, second_step: float = 30.0) -> list[dict[str, Any]]:
    return [
        {"kind": "event", "step": 1, "time": 22.0, "data": {"name": "engine_died"}},
        {"kind": "event", "step": 1, "time": restarted, "data": {"name": "engine_restarted"}},
        {"kind": "step", "step": 2, "time": second_step, "data": {}},
    ]


def seen(**changes: Any) -> dict[str, Any]:
    return {
        "killed_at_s": 10.0,
        "gone_after_s": 0.1,
        "ended": "exit code 0",
        "events": [{"t": 12.0, "name": "engine_died"}, {"t": 15.0, "name": "engine_restarted"}],
        "groups": {1: [0, 1], 2: [3, 2], 3: [4, 5]},
        "versions": {1: ["0.0"], 2: ["0.1"], 3: ["0.2"]},
        "log_prob_differences": {1: 1e-7, 2: 1.5e-7, 3: 1e-7},
        "probes": {0: 1e-7, 1: 2e-7},
        "device_gib_before": 30.0,
        "device_gib": [(9.9, 30.0), (10.3, 31.0), (11.0, 14.0), (14.0, 29.0), (16.0, 2.0)],
        "engine_gib_planned": 16.0,
        **changes,
    }


def broken(content: dict[str, Any], lines: list[dict[str, Any]] | None = None) -> list[str]:
    checks = drills.survival_checks(content, rows() if lines is None else lines, steps=3, batch=2)
    return [name for name, held in checks.items() if not held]


def test_a_run_that_survived_passes_and_tells_how_long_it_took() -> None:
    content = seen()
    assert broken(content) == []
    assert (content["noticed_after_s"], content["serving_after_s"]) == (2.0, 5.0)
    assert content["device_gib_freed"] == pytest.approx(16.0)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"ended": "exit code 1"}, "the run finished"),
        ({"groups": {1: [0, 1], 2: [1, 2], 3: [4, 5]}}, "every group was trained once"),
        ({"groups": {1: [0, 1], 2: [2, 3]}}, "every step was trained"),
        ({"gone_after_s": None}, "the killed process is gone"),
        ({"events": [{"t": 12.0, "name": "engine_died"}]}, "the engine came back"),
        ({"versions": {1: ["0.0"], 2: ["0.0", "0.1"], 3: ["0.2"]}}, "all tokens are of the last published weights"),
        ({"log_prob_differences": {1: 1e-7, 2: 0.4, 3: 1e-7}}, "log-probs stay as near as in other steps"),
        ({"log_prob_differences": {}}, "log-probs stay as near as in other steps"),
        ({"probes": {0: 1e-7, 1: None}}, "every publication was probed"),
        ({"device_gib": [(11.0, 29.0), (14.0, 29.0)]}, "the device's memory came back"),
    ],
)
def test_each_way_not_to_survive_is_seen(changes: dict[str, Any], expected: str) -> None:
    assert expected in broken(seen(**changes))


def test_a_batch_that_was_whole_before_the_restart_is_no_drill() -> None:
    assert broken(seen(), rows(restarted=40.0)) == ["it came back in mid-rollout"]


def test_a_host_has_no_device_memory_to_come_back() -> None:
    assert broken(seen(device_gib_before=None, device_gib=None)) == []


def test_the_error_is_the_last_thing_a_run_says() -> None:
    assert drills.error_of("step 1\nvime run: engine 0: log-probs differ\n  fix: look\n").startswith("vime run: engine 0")
    assert drills.error_of("step 1\nstep 2\n") == ""


def test_the_table_counts_drills_and_shows_what_did_not_hold() -> None:
    good = {"ok": True, "checks": {"a": True}, "seconds": 3.0}
    bad = {"ok": False, "checks": {"b": False}, "seconds": 3.0, "logs": {"driver.log": ["the end"]}}
    lines = list(drills.report({"words": {"ok": True}, "one": good, "two": bad, "three": {"ok": False, "error": "no model"}}))
    assert lines[-1] == "1 of 2 drills passed"
    assert "  NOT b" in lines
    assert any(line.endswith("the end") for line in lines)
    assert "three: no model" in lines
