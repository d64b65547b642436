"""Starting, watching and ending servers, against a stand-in process."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from vime.cluster.guardian import guardian_command
from vime.errors import DeadlineError, EngineError
from vime.rollout.engine import EngineServer, EngineSpec
from vime.rollout.launcher import Child, child_env, group_members


@pytest.fixture
def servers() -> Iterator[list[EngineServer]]:
    started: list[EngineServer] = []
    yield started
    for server in started:
        server.stop(1.0)


def make(
    servers: list[EngineServer], tmp_path: Path, behaviour: str = "serve", *, port: int = 0, prefix: tuple[str, ...] = ()
) -> EngineServer:
    env = {"FAKE_ENGINE": behaviour, "FAKE_ENGINE_MARK": str(tmp_path / "mark")}
    spec = EngineSpec(
        tmp_path,
        "float32",
        tmp_path / "engine.log",
        "mine",
        16,
        env=env,
        launch="vime.testing.engine_server",
        name="engine 3",
        command_prefix=prefix,
    )
    server = EngineServer(spec, port=port)
    servers.append(server)
    server.start()
    return server


async def test_a_server_of_this_run_becomes_ready_and_ends_without_a_trace(servers: list[EngineServer], tmp_path: Path) -> None:
    server = make(servers, tmp_path)
    await server.wait_ready(20)
    assert server.alive()
    assert await server.healthy()
    group = server.group
    server.stop()
    server.stop()
    assert not server.alive()
    assert group_members(group) == []


async def test_a_server_of_another_run_is_refused(servers: list[EngineServer], tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = make(servers, tmp_path, "foreign", port=port)
    with pytest.raises(EngineError, match=f"engine 3: the server at http://127.0.0.1:{port} is not an engine of this run"):
        await server.wait_ready(20)
    assert not server.alive()


async def test_a_dead_server_gives_the_cause_in_its_log(servers: list[EngineServer], tmp_path: Path) -> None:
    server = make(servers, tmp_path, "crash")
    with pytest.raises(EngineError, match=r"engine 3: died at start \(exit code 1\): ValueError: No common block size for 16"):
        await server.wait_ready(20)


async def test_a_port_that_is_taken_after_all_is_exchanged(servers: list[EngineServer], tmp_path: Path) -> None:
    server = make(servers, tmp_path, "taken")
    await server.wait_ready(20)
    assert not server.url.endswith(f":{(tmp_path / 'mark').read_text()}")


async def test_a_silent_server_is_a_deadline_that_names_it(servers: list[EngineServer], tmp_path: Path) -> None:
    server = make(servers, tmp_path, "mute")
    pid = server.pid
    with pytest.raises(DeadlineError, match=rf"engine 3 \(pid {pid}\): does not answer .* within 1\.5 s \(running\)"):
        await server.wait_ready(1.5)
    assert not server.alive()


async def test_a_child_that_ignores_the_signal_is_killed_with_the_group(servers: list[EngineServer], tmp_path: Path) -> None:
    server = make(servers, tmp_path, "stubborn")
    await server.wait_ready(20)
    group = server.group
    assert len(group_members(group)) == 2
    assert server.stop(grace_s=0.3) < 3
    assert group_members(group) == []


async def test_a_stopped_process_is_ended_too(servers: list[EngineServer], tmp_path: Path) -> None:
    server = make(servers, tmp_path)
    await server.wait_ready(20)
    os.kill(server.pid, signal.SIGSTOP)
    assert not await server.healthy(timeout_s=0.3)
    assert server.alive()
    assert server.stop() < 5


def test_an_unstarted_server_has_no_address(tmp_path: Path) -> None:
    server = EngineServer(EngineSpec(tmp_path, "float32", tmp_path / "log", "t", 16))
    with pytest.raises(EngineError, match="is not started"):
        _ = server.url


@pytest.mark.parametrize("seconds", [None, 0.3])
async def test_a_guarded_server_leaves_no_segment_however_it_is_stopped(
    servers: list[EngineServer], tmp_path: Path, seconds: float | None
) -> None:
    """One that ends by itself, and one that is killed because it does not: its guardian is left the time to clean up."""
    segment = f"vime-stop-{os.getpid()}"
    prefix = (*guardian_command(), sys.executable, "-c", _HOLDER, f"/dev/shm/{segment}")
    server = make(servers, tmp_path, "serve" if seconds is None else "stubborn", prefix=prefix)
    await server.wait_ready(20)
    group = server.group
    assert len(group_members(group)) >= 2
    assert segment in os.listdir("/dev/shm")
    assert server.stop(*([] if seconds is None else [seconds])) < 5
    assert group_members(group) == []
    assert segment not in os.listdir("/dev/shm")


_HOLDER = "import os, sys; os.set_inheritable(os.open(sys.argv[1], os.O_CREAT | os.O_RDWR, 0o600), True); "
_HOLDER += "os.execv(sys.argv[2], sys.argv[2:])"
"""Holds a file open and becomes the server."""


# ---- children


def run(code: str, tmp_path: Path, prefix: tuple[str, ...] = ()) -> Child:
    child = Child(
        [sys.executable, "-c", code], name="child", log_path=tmp_path / "child.log", env=child_env({}), command_prefix=prefix
    )
    deadline = time.monotonic() + 10
    while child.alive() and time.monotonic() < deadline:
        time.sleep(0.01)
    return child


def test_a_log_is_kept_per_process(tmp_path: Path) -> None:
    run("print('first')", tmp_path)
    second = run("print('a'); print('b'); print('c')", tmp_path)
    assert second.log_tail(2) == "b\nc"
    assert "first" not in second.log_text()


@pytest.mark.parametrize(
    ("code", "prefix", "expected"),
    [
        ("raise SystemExit(3)", (), "exit code 3"),
        ("import os; os.kill(os.getpid(), 9)", (), "signal SIGKILL"),
        ("raise SystemExit(0)", ("/usr/bin/env", "A=1"), "exit code 0"),
        ("raise SystemExit(137)", (), "signal SIGKILL"),
    ],
)
def test_the_end_of_a_child_is_told(code: str, prefix: tuple[str, ...], expected: str, tmp_path: Path) -> None:
    assert run(code, tmp_path, prefix).exit_text() == expected


def test_a_command_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="engine 1 cannot be started"):
        Child([str(tmp_path / "no-such-program")], name="engine 1", log_path=tmp_path / "log", env={})
