from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vime.errors import ConfigError, EngineError, Errors
from vime.facts.engine import IN_FLIGHT_ROUTES, NEEDED_ROUTES, RELEASES, TOKEN_ROUTE, VERSION_ROUTE
from vime.facts.process import Parallel, VllmDefaults
from vime.rollout import engine
from vime.rollout.engine import EngineSpec, check_routes, engine_command, engine_env, find_cause, flag, merge_engine_args
from vime.testing.engine_server import CRASH_LOG

OLD, NEW = RELEASES
SPEC = EngineSpec(Path("/models/m"), "float32", Path("engine.log"), "token", max_model_len=128, features=NEW)


def words(command: list[str], option: str) -> list[str]:
    """The words between an option and the next one."""
    start = command.index(option) + 1
    rest = command[start:]
    return rest[: next((i for i, word in enumerate(rest) if word.startswith("--")), len(rest))]


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("enforce_eager", True, ["--enforce-eager"]),
        ("enable_prefix_caching", False, ["--no-enable-prefix-caching"]),
        ("disable_log_stats", False, []),
        ("max_num_seqs", 64, ["--max-num-seqs", "64"]),
        ("revision", None, []),
        ("logits_processors", ["a", "b"], ["--logits-processors", "a", "b"]),
        ("logits_processors", [], []),
        ("middleware", ["m.A", "m.B"], ["--middleware", "m.A", "--middleware", "m.B"]),
        ("compilation_config", {"level": 0}, ["--compilation-config", '{"level": 0}']),
        ("lora_modules", [{"name": "x"}], ["--lora-modules", '{"name": "x"}']),
    ],
)
def test_an_argument_becomes_words(key: str, value: Any, expected: list[str]) -> None:
    assert flag(key, value) == expected


def test_the_command_serves_the_model_on_loopback_with_what_vime_needs() -> None:
    spec = replace(SPEC, parallel=Parallel(tp=2, dp=2), seed=5, args={"enforce_eager": True, "block_size": 32})
    command = engine_command(spec, 4321)
    assert command[:3] == [sys.executable, "-m", "vllm.entrypoints.launchers.api_server.entry"]
    for option, value in {
        "--model": "/models/m",
        "--host": "127.0.0.1",
        "--port": "4321",
        "--dtype": "float32",
        "--seed": "5",
        "--tensor-parallel-size": "2",
        "--data-parallel-size": "2",
        "--max-model-len": "128",
        "--block-size": "32",
        "--logprobs-mode": "processed_logprobs",
        "--weight-transfer-config": '{"backend": "vime"}',
        "--middleware": "vime.weights.gate.Gate",
    }.items():
        assert words(command, option) == [value]
    assert "--enable-scale-out" in command
    assert "--pipeline-parallel-size" not in command
    assert "--api-key" not in command


def test_a_server_that_others_reach_has_a_door_around_its_gate() -> None:
    command = engine_command(replace(SPEC, host="10.0.0.7"), 4321)
    assert words(command, "--host") == ["10.0.0.7"]
    at = [i for i, word in enumerate(command) if word == "--middleware"]
    assert [command[i + 1] for i in at] == ["vime.weights.gate.Gate", "vime.weights.door.Door"]


@pytest.mark.parametrize(
    ("version", "launch", "flagged"),
    [
        ("0.26.0", "vllm.entrypoints.openai.api_server", False),
        ("0.32.0", "vllm.entrypoints.launchers.api_server.entry", True),
        (None, "vllm.entrypoints.launchers.api_server.entry", True),
    ],
)
def test_the_server_is_the_one_of_the_release_that_is_installed(
    monkeypatch: pytest.MonkeyPatch, version: str | None, launch: str, flagged: bool
) -> None:
    monkeypatch.setattr(engine, "installed_version", lambda package: version if package == "vllm" else None)
    command = engine_command(replace(SPEC, features=None, args={"enable_scale_out": True}), 1)
    assert command[2] == launch
    assert command.count("--enable-scale-out") == flagged


def test_a_platforms_own_server_goes_before_the_releases() -> None:
    assert engine_command(replace(SPEC, launch="mine.server", features=OLD), 1)[2] == "mine.server"


def test_a_server_without_a_route_that_vime_calls_is_refused() -> None:
    check_routes((), where="engine 3")
    check_routes([*NEEDED_ROUTES, "/health"], where="engine 3")
    with pytest.raises(EngineError, match=rf"engine 3: this vLLM's server has no route {TOKEN_ROUTE}\n  fix: .*0\.26 or 0\.32"):
        check_routes(sorted(NEEDED_ROUTES - {TOKEN_ROUTE}), where="engine 3")


def test_a_server_that_tells_no_versions_is_refused_where_updates_meet_requests() -> None:
    check_routes([*NEEDED_ROUTES], where="engine 3")
    check_routes([*NEEDED_ROUTES, *IN_FLIGHT_ROUTES], where="engine 3", in_flight=True)
    with pytest.raises(EngineError, match=rf"engine 3: .* no route {VERSION_ROUTE}: it .*\n  fix: set weights.update: drain"):
        check_routes([*NEEDED_ROUTES, *IN_FLIGHT_ROUTES - {VERSION_ROUTE}], where="engine 3", in_flight=True)


def test_a_length_given_by_the_user_wins() -> None:
    assert words(engine_command(replace(SPEC, args={"max_model_len": "4k"}), 1), "--max-model-len") == ["4k"]


@pytest.mark.parametrize(
    ("key", "instead"),
    [
        ("model", "model.path"),
        ("tensor-parallel-size", r"parallel\.tp"),
        ("dtype", r"model\.dtype"),
        ("seed", r"run\.seed"),
        ("logprobs_mode", "after temperature"),
        ("middleware", "gate"),
        ("weight_transfer_config", "topology sync"),
        ("no_enable_scale_out", "tokens"),
    ],
)
def test_keys_that_vime_owns_are_refused_with_what_to_use(key: str, instead: str) -> None:
    with pytest.raises(ConfigError, match=rf"rollout\.vllm\.{key} is set by vime\n  fix: use .*{instead}"):
        merge_engine_args(VllmDefaults(), {key: 1}, {})


def test_several_refused_keys_are_reported_together() -> None:
    with pytest.raises(Errors, match=r"(?s)rollout\.vllm\.host.*rollout\.vllm\.port"):
        merge_engine_args(VllmDefaults(), {"host": "0.0.0.0", "port": 1}, {})


def test_the_user_overrides_defaults_and_null_removes_one() -> None:
    defaults = VllmDefaults(args={"max_num_seqs": 256, "block_size": 32, "enforce_eager": True})
    merged = merge_engine_args(defaults, {"max-num-seqs": 8, "block_size": None}, {"enable_sleep_mode": True})
    assert merged == {"max_num_seqs": 8, "enforce_eager": True, "enable_sleep_mode": True}


def test_the_environment_is_clean_marked_and_keeps_secrets_off_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", "http://proxy:1")
    monkeypatch.setenv("RAY_ADDRESS", "somewhere")
    monkeypatch.setenv("VLLM_PLUGINS", "mine,vime")
    spec = replace(SPEC, api_key="secret", env={"OMP_NUM_THREADS": "1"}, entry_points=("vime", "vime_cpu"))
    env = engine_env(spec)
    assert "https_proxy" not in env
    assert "RAY_ADDRESS" not in env
    assert env["NO_PROXY"] == "127.0.0.1,localhost"
    assert env["VLLM_PLUGINS"] == "vime,vime_cpu,mine"
    assert (env["VIME_ENGINE"], env["VIME_RUN_TOKEN"], env["VLLM_API_KEY"]) == ("1", "token", "secret")
    assert (env["VLLM_SERVER_DEV_MODE"], env["OMP_NUM_THREADS"]) == ("1", "1")
    assert "secret" not in " ".join(engine_command(spec, 1))


def test_without_plugins_none_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    assert engine_env(SPEC)["VLLM_PLUGINS"] == ""


def test_the_cause_is_the_first_error_not_the_tail() -> None:
    assert find_cause(CRASH_LOG) == "ValueError: No common block size for 16."


def test_a_usage_error_and_the_findings_of_a_validation_error_are_causes() -> None:
    assert find_cause("usage: x\nentry.py: error: unrecognized arguments: --blok-size 3\n") == (
        "entry.py: error: unrecognized arguments: --blok-size 3"
    )
    log = "pydantic_core.ValidationError: 1 validation error for C\n  Value error, too small\nnoise\n"
    assert find_cause(log) == "pydantic_core.ValidationError: 1 validation error for C\n  Value error, too small"


def test_a_log_without_errors_has_no_cause() -> None:
    assert find_cause("INFO starting\nUserWarning: old\n") is None
