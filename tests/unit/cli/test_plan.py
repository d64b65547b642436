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
    path.write_text(
        "run: {dir: out}\nmodel: {path: model}\ndata: {path: none.jsonl}\nschedule: {num_steps: 2}\ntopology: cpu-colocate\n"
    )
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
        "answers of platforms and 4 rates: `vime plan CONFIG --verbose` prints them",
    ):
        assert part in done.stdout
    told = vime("plan", run_file, "--verbose").stdout
    assert "hooks asked" in told
    assert "cpu.memory_backend(actor)" in told
    assert "  host.host_link: " in told


def test_as_json(vime: Vime, run_file: str) -> None:
    done = vime("plan", run_file, "--json", "--topology", "cpu-disaggregated")
    told = json.loads(done.stdout)
    assert [role["slots"] for role in told["roles"]] == [[[0, 0]], [[0, 1]], [[0, 2]]]
    assert told["transport"]["rejected"]


def test_for_a_recording(vime: Vime, run_file: str, tmp_path: Path) -> None:
    done = vime("plan", run_file, "--inventory", recording(tmp_path))
    assert "far[0]" in done.stdout, done.stderr
    small = {"hostname": "far", "arch": "x86_64", "cpus": [0], "memory_bytes": 2**20, "numa": [], "software": {}}
    done = vime("plan", run_file, "--inventory", recording(tmp_path, data=small))
    assert done.returncode == 1
    assert "E251 pools.host" in done.stderr


def recording(folder: Path, name: str = "r.json", **changes: object) -> str:
    facts = {"hostname": "far", "arch": "x86_64", "cpus": [0, 1], "memory_bytes": 4 * 2**30, "numa": [], "software": {}}
    made = {"platform": "cpu", "origin": "synthetic", "date": "2026-01-01", "data": facts} | changes
    path = folder / name
    path.write_text(json.dumps({key: value for key, value in made.items() if value is not None}))
    return str(path)


def test_the_origin_of_a_recording_is_told(vime: Vime, run_file: str, tmp_path: Path) -> None:
    done = vime("plan", run_file, "--inventory", recording(tmp_path))
    assert "note: pool host is planned from" in done.stdout
    assert "(synthetic 2026-01-01, platform cpu)" in done.stdout


def test_a_recording_that_no_pool_can_use(vime: Vime, run_file: str, tmp_path: Path) -> None:
    done = vime("plan", run_file, "--inventory", recording(tmp_path, platform="gadget"))
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
def test_a_recording_is_checked(vime: Vime, run_file: str, tmp_path: Path, changes: dict[str, object], said: str) -> None:
    done = vime("plan", run_file, "--inventory", recording(tmp_path, **changes))
    assert done.returncode == 1
    assert f"r.json: not a recording: {said}" in done.stderr


def test_a_run_of_a_plan_is_the_same_plan_and_starts_nothing(vime: Vime, run_file: str, tmp_path: Path) -> None:
    (tmp_path / "none.jsonl").write_text('{"prompt": "1 + 1 =", "label": "2"}\n')
    words = (run_file, "--inventory", recording(tmp_path))
    assert vime("run", *words, "--dry-run").stdout == vime("plan", *words).stdout
    assert not (tmp_path / "out").exists()
    done = vime("run", *words)
    assert "--inventory is for plans; a run takes the hardware that is here" in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_device_that_nobody_can_take(vime: Vime, run_file: str) -> None:
    done = vime("plan", run_file, "--topology", "colocate", "--device", "cpus")
    assert "E104 no pool can take the device 'cpus'" in done.stderr
    assert "did you mean `cpu`?" in done.stderr
    assert "W281" in vime("plan", run_file, "--topology", "colocate", "--device", "cpu").stdout


def test_a_platform_that_the_topology_does_not_pin(vime: Vime, run_file: str) -> None:
    done = vime("plan", run_file, "--platform", "gadget")
    assert "E105 pools.host.platform: cpu is pinned here" in done.stderr
    assert "--topology colocate" in done.stderr


def test_every_part_of_the_plan_is_shown(vime: Vime, run_file: str) -> None:
    text = vime("plan", run_file).stdout
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


def test_a_file_that_is_no_recording(vime: Vime, run_file: str, tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text("{}")
    done = vime("plan", run_file, "--inventory", str(tmp_path / "r.json"))
    assert done.returncode == 1
    assert "not a recording" in done.stderr


def test_beside_a_run_that_was_measured(vime: Vime, run_file: str, tmp_path: Path) -> None:
    run = tmp_path / "earlier"
    run.mkdir()
    (run / "metrics.jsonl").write_text("")
    done = vime("plan", run_file, "--compare", str(run))
    assert done.returncode == 1
    assert "holds no row of kind memory, sync or wall" in done.stderr
    held = {"edge": "training", "device": {"actor": {"params": 1000}}, "host": {}}
    row = {"kind": "memory", "step": 1, "version": "0.1", "time": 1.0, "data": held}
    (run / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    done = vime("plan", run_file, "--compare", str(run))
    assert done.returncode == 0, done.stderr
    assert "training actor params" in done.stdout
    assert "placement" not in done.stdout
    told = json.loads(vime("plan", run_file, "--compare", str(run), "--json").stdout)
    assert [(one["what"], one["measured"]) for one in told] == [("training actor params", 1000)]
    assert told[0]["predicted"] > 1000


def test_an_assumption_about_a_step(vime: Vime, run_file: str) -> None:
    done = vime("plan", run_file, "--json", "--assume", "response_tokens=100", "--assume", "longest_tokens=200")
    assert done.returncode == 0, done.stderr
    step = json.loads(done.stdout)["step"]
    assert step["assumed"]["response_tokens"]["value"] == 100
    assert step["assumed"]["longest_tokens"]["provenance"] == "yours"
    done = vime("plan", run_file, "--assume", "respons_tokens=100")
    assert done.returncode == 1
    assert "no assumption is called 'respons_tokens'" in done.stderr
    assert "response_tokens" in done.stderr


def test_a_rate_that_a_platform_does_not_know_leaves_the_step_open(vime: Vime, run_file: str) -> None:
    done = vime("plan", run_file)
    assert "step of 32 x 8 responses: time unknown, without prefill, decode" in done.stdout
    assert "rate host.device_memory is unknown" in done.stdout
