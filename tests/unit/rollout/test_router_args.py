from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vime.errors import ConfigError, EngineError
from vime.rollout.router import RouterServer, RouterSpec, router_cause, router_command

SPEC = RouterSpec(Path("router.log"), ("http://127.0.0.1:1", "http://127.0.0.1:2"), request_timeout_s=90.4, start_timeout_s=7)


def value_of(command: list[str], option: str) -> str:
    return command[command.index(option) + 1]


def test_the_command_listens_on_loopback_and_knows_its_engines() -> None:
    command = router_command(SPEC, 5000, 5001)
    assert command[1:3] == ["-m", "vllm_router.launch_router"]
    assert command[command.index("--worker-urls") + 1 :] == ["http://127.0.0.1:1", "http://127.0.0.1:2"]
    for option, value in {
        "--host": "127.0.0.1",
        "--port": "5000",
        "--prometheus-host": "127.0.0.1",
        "--prometheus-port": "5001",
        "--policy": "round_robin",
        "--request-timeout-secs": "90",
        "--worker-startup-timeout-secs": "7",
    }.items():
        assert value_of(command, option) == value
    assert "--worker-urls" not in router_command(replace(SPEC, worker_urls=()), 1, 2)


def test_the_users_section_passes_through_above_the_defaults() -> None:
    args: dict[str, Any] = {
        "policy": "consistent_hash",
        "disable-retries": True,
        "disable_circuit_breaker": False,
        "request_id_headers": ["x-a", "x-b"],
        "log_dir": None,
    }
    command = router_command(replace(SPEC, args=args), 1, 2)
    assert value_of(command, "--policy") == "consistent_hash"
    assert command.count("--policy") == 1
    assert "--disable-retries" in command
    assert not {"--disable-circuit-breaker", "--log-dir"} & set(command)
    start = command.index("--request-id-headers")
    assert command[start : start + 3] == ["--request-id-headers", "x-a", "x-b"]


@pytest.mark.parametrize(("key", "instead"), [("worker_urls", "registers"), ("request-timeout-secs", "request_timeout_s")])
def test_keys_that_vime_owns_are_refused(key: str, instead: str) -> None:
    with pytest.raises(ConfigError, match=rf"rollout\.router\.{key.replace('-', '_')} is set by vime\n  fix: .*{instead}"):
        router_command(replace(SPEC, args={key: 1}), 1, 2)


def test_the_telling_line_of_a_log_is_found() -> None:
    assert router_cause("INFO start\nvllm-router: error: unrecognized arguments: --x\n") == (
        "vllm-router: error: unrecognized arguments: --x"
    )
    assert router_cause("INFO start\nINFO bye\n") == "INFO bye"


async def test_a_router_that_dies_at_start_says_why(tmp_path: Path) -> None:
    router = RouterServer(replace(SPEC, log_path=tmp_path / "router.log", args={"polcy": "random"}))
    router.start()
    try:
        with pytest.raises(EngineError, match=r"died at start \(exit code 2\): .*unrecognized arguments: --polcy random"):
            await router.wait_ready(20)
    finally:
        router.stop()
