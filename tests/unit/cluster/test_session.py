"""What stays of a local cluster's processes when it ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from vime.cluster import session
from vime.cluster.guardian import descendants, guardian_command, still_running
from vime.cluster.session import keep_process_logs


def written(folder: Path, name: str, text: str, *, age: float = 0.0) -> None:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(text)
    os.utime(path, (1e9 - age, 1e9 - age))


def test_ends_of_what_processes_printed_are_kept(tmp_path: Path) -> None:
    written(tmp_path / "ray", "worker-1-1-7.err", "x" * 100 + "the cause\n")
    written(tmp_path / "ray", "worker-1-1-7.out", "")
    written(tmp_path / "ray", "raylet.out", "raylet\n")
    written(tmp_path / "ray", "agent-1.log", "not asked for")
    keep_process_logs(tmp_path / "ray", tmp_path / "logs" / "ray", file_bytes=10)
    kept = {path.name: path.read_text() for path in (tmp_path / "logs" / "ray").iterdir()}
    assert kept == {"worker-1-1-7.err": "the cause\n", "raylet.out": "raylet\n"}


def test_the_whole_is_bounded_and_the_newest_errors_come_first(tmp_path: Path) -> None:
    for number in range(5):
        written(tmp_path / "ray", f"worker-{number}.out", "o" * 10)
        written(tmp_path / "ray", f"worker-{number}.err", "e" * 10, age=number)
    keep_process_logs(tmp_path / "ray", tmp_path / "kept", total_bytes=25)
    kept = {path.name: path.stat().st_size for path in (tmp_path / "kept").iterdir()}
    assert kept == {"worker-0.err": 10, "worker-1.err": 10, "worker-2.err": 5}


def test_a_session_without_a_folder_leaves_nothing(tmp_path: Path) -> None:
    keep_process_logs(tmp_path / "absent", tmp_path / "kept")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("deaf", [False, True])
def test_a_head_is_ended_with_all_below_it(deaf: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that does not listen: what is below its guardian is killed, and the guardian ends by itself."""
    monkeypatch.setattr(session, "PATIENCE_S", 1.0)
    code = "import signal, subprocess, time;"
    code += "signal.signal(signal.SIGTERM, signal.SIG_IGN);" if deaf else ""
    code += "subprocess.Popen(['sleep', '60'], start_new_session=True); print('up', flush=True); time.sleep(60)"
    command = [*guardian_command(), sys.executable, "-c", code]
    head = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert head.stdout is not None
    assert head.stdout.readline() == "up\n"
    family = descendants(head.pid)
    assert len(family) == 3
    session.end_head(head)
    assert head.returncode == 128 + (9 if deaf else 15)
    assert not still_running(family)
