"""`vime plan`: a plan in words, as JSON, for this host and for a recording."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Command = Callable[..., Any]


@pytest.fixture
def run_file(tmp_path: Path, sizes: Path) -> str:
    path = tmp_path / "run.yaml"
    path.write_text(
        "run: {dir: out}\nmodel: {path: model}\ndata: {path: none.jsonl}\nschedule: {num_steps: 2}\ntopology: cpu-colocate\n"
    )
    return str(path)


def test_in_words(command: Command, run_file: str) -> None:
    done = command("plan", run_file)
    assert done.returncode == 0, done.stderr
    for part in (
        "cpu-colocate: qwen3",
        "placement",
        "memory per device",
        "chosen    host_shm",
        "rejected  disk",
        "answers of platforms and 4 rates: `vime plan CONFIG --verbose` prints them",
    ):
        assert part in done.stdout
    told = command("plan", run_file, "--verbose").stdout
    assert "hooks asked" in told
    assert "cpu.memory_backend(actor)" in told
    assert "  host.host_link: " in told


def test_as_json(command: Command, run_file: str) -> None:
    done = command("plan", run_file, "--json", "--topology", "cpu-disaggregated")
    told = json.loads(done.stdout)
    assert [role["slots"] for role in told["roles"]] == [[[0, 0]], [[0, 1]], [[0, 2]]]
    assert told["transport"]["rejected"]


def test_for_a_recording(command: Command, run_file: str, tmp_path: Path) -> None:
    done = command("plan", run_file, "--inventory", recording(tmp_path))
    assert "far[0]" in done.stdout, done.stderr
    small = {"hostname": "far", "arch": "x86_64", "cpus": [0], "memory_bytes": 2**20, "numa": [], "software": {}}
    done = command("plan", run_file, "--inventory", recording(tmp_path, data=small))
    assert done.returncode == 1
    assert "E251 pools.host" in done.stderr


def recording(folder: Path, name: str = "r.json", **changes: object) -> str:
    facts = {"hostname": "far", "arch": "x86_64", "cpus": [0, 1], "memory_bytes": 4 * 2**30, "numa": [], "software": {}}
    made = {"platform": "cpu", "origin": "synthetic", "date": "2026-01-01", "data": facts} | changes
    path = folder / name
    path.write_text(json.dumps({key: value for key, value in made.items() if value is not None}))
    return str(path)


def test_the_origin_of_a_recording_is_told(command: Command, run_file: str, tmp_path: Path) -> None:
    done = command("plan", run_file, "--inventory", recording(tmp_path))
    assert "note: pool host is planned from" in done.stdout
    assert "(synthetic 2026-01-01, platform cpu)" in done.stdout


def test_a_recording_that_no_pool_can_use(command: Command, run_file: str, tmp_path: Path) -> None:
    done = command("plan", run_file, "--inventory", recording(tmp_path, platform="gadget"))
    assert "no pool of cpu-colocate is of the platform of" in done.stderr
    assert "fix: give --platform gadget" in done.stderr


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"origin": "guessed"}, "origin must be recorded or synthetic, not 'guessed'"),
        ({"date": "yesterday"}, "date must be like 2026-01-31, not 'yesterday'"),
        ({"platform": None}, "key 'platform' is missing"),
        ({"host": 1}, "key 'host' is unknown"),
        ({"data": [], "platform": ""}, "platform must be a name; data must be an object"),
    ],
)
def test_a_recording_is_checked(command: Command, run_file: str, tmp_path: Path, changes: dict[str, object], said: str) -> None:
    done = command("plan", run_file, "--inventory", recording(tmp_path, **changes))
    assert done.returncode == 1
    assert f"r.json: not a recording: {said}" in done.stderr


def test_a_run_of_a_plan_is_the_same_plan_and_starts_nothing(command: Command, run_file: str, tmp_path: Path) -> None:
    (tmp_path / "none.jsonl").write_text('{"prompt": "1 + 1 =", "label": "2"}\n')
    words = (run_file, "--inventory", recording(tmp_path))
    assert command("run", *words, "--dry-run").stdout == command("plan", *words).stdout
    assert not (tmp_path / "out").exists()
    done = command("run", *words)
    assert "--inventory is for plans; a run takes the hardware that is here" in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_device_that_nobody_can_take(command: Command, run_file: str) -> None:
    done = command("plan", run_file, "--topology", "colocate", "--device", "cpus")
    assert "E104 no pool can take the device 'cpus'" in done.stderr
    assert "did you mean `cpu`?" in done.stderr
    assert "W281" in command("plan", run_file, "--topology", "colocate", "--device", "cpu").stdout


def test_a_platform_that_the_topology_does_not_pin(command: Command, run_file: str) -> None:
    done = command("plan", run_file, "--platform", "gadget")
    assert "E105 pools.host.platform: cpu is pinned here" in done.stderr
    assert "--topology colocate" in done.stderr


def test_every_part_of_the_plan_is_shown(command: Command, run_file: str) -> None:
    text = command("plan", run_file).stdout
    for part in (
        "platform cpu -> base",
        "scheduling\n  pool host: Ray resource vime_cpu_slot, labels none",
        "sleep of rollout: level 0",
        "trainer actor\n  runtime",
        "collective of actor\n  backend  gloo",
        "engine arguments",
        "  enforce_eager                 true                        platform cpu",
    ):
        assert part in text


def test_a_file_that_is_no_recording(command: Command, run_file: str, tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text("{}")
    done = command("plan", run_file, "--inventory", str(tmp_path / "r.json"))
    assert done.returncode == 1
    assert "not a recording" in done.stderr


def test_beside_a_run_that_was_measured(command: Command, run_file: str, tmp_path: Path) -> None:
    run = tmp_path / "earlier"
    run.mkdir()
    (run / "metrics.jsonl").write_text("")
    done = command("plan", run_file, "--compare", str(run))
    assert done.returncode == 1
    assert "holds no row of kind memory, sync or wall" in done.stderr
    held = {"edge": "training", "device": {"actor": {"params": 1000}}, "host": {}}
    row = {"kind": "memory", "step": 1, "version": "0.1", "time": 1.0, "data": held}
    (run / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    done = command("plan", run_file, "--compare", str(run))
    assert done.returncode == 0, done.stderr
    assert "training actor params" in done.stdout
    assert "placement" not in done.stdout
    told = json.loads(command("plan", run_file, "--compare", str(run), "--json").stdout)
    assert [(one["what"], one["measured"]) for one in told] == [("training actor params", 1000)]
    assert told[0]["predicted"] > 1000


def test_an_assumption_about_a_step(command: Command, run_file: str) -> None:
    done = command("plan", run_file, "--json", "--assume", "response_tokens=100", "--assume", "longest_tokens=200")
    assert done.returncode == 0, done.stderr
    step = json.loads(done.stdout)["step"]
    assert step["assumed"]["response_tokens"]["value"] == 100
    assert step["assumed"]["longest_tokens"]["provenance"] == "yours"
    done = command("plan", run_file, "--assume", "respons_tokens=100")
    assert done.returncode == 1
    assert "no assumption is called 'respons_tokens'" in done.stderr
    assert "response_tokens" in done.stderr


def test_a_rate_that_a_platform_does_not_know_leaves_the_step_open(command: Command, run_file: str) -> None:
    done = command("plan", run_file)
    assert "step of 32 x 8 responses: time unknown, without prefill, decode" in done.stdout
    assert "rate host.device_memory is unknown" in done.stdout
