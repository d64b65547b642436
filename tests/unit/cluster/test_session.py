"""What stays of a local cluster's processes when it ends."""

from __future__ import annotations

import os
from pathlib import Path

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
