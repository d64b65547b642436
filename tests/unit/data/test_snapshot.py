"""Checkpoints on disk: whole or not there."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vime.data import disk
from vime.data.disk import FileSum, Retention
from vime.data.snapshot import begin_snapshot, commit_snapshot, latest_snapshot, load_snapshot
from vime.errors import CheckpointError


def payload(text: str):
    def write(folder: Path) -> None:
        (folder / "ranks").mkdir()
        (folder / "ranks" / "0.bin").write_text(text)
        (folder / "rng.bin").write_bytes(bytes(range(256)))

    return write


def write_snapshot(root: Path, step: int, write: Callable[[Path], None], *, state: Any, keep: Retention | None = None) -> Path:
    partial = begin_snapshot(root, step, state=state)
    write(partial)
    return commit_snapshot(partial, keep=keep)


def save(root: Path, step: int, *, text: str = "weights", keep: int = 2, keep_every: int = 0) -> Path:
    state = {"step": step, "nested": {"a": [1, None]}}
    return write_snapshot(root, step, payload(f"{text} {step}"), state=state, keep=Retention(keep, keep_every))


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def latest_step(root: Path) -> int | None:
    found = latest_snapshot(root)
    return None if found is None else found.step


# ---- writing and reading


def test_what_was_written_is_read(tmp_path: Path) -> None:
    root = tmp_path / "run" / "checkpoints"
    path = save(root, 12)
    found = latest_snapshot(root)
    assert found is not None
    assert (found.path, found.step, found.warnings) == (path, 12, ())
    assert found.state == {"step": 12, "nested": {"a": [1, None]}}
    assert (found.path / "ranks" / "0.bin").read_text() == "weights 12"
    manifest = json.loads((path / "manifest.json").read_text())
    assert sorted(manifest["files"]) == ["ranks/0.bin", "rng.bin", "state.json"]
    assert manifest["files"]["rng.bin"] == {
        "bytes": 256,
        "sha256": "40aff2e9d2d8922e47afd4648e6967497158785fbd1da870e7110266bf944880",
    }


def test_no_checkpoint_yet(tmp_path: Path) -> None:
    assert latest_snapshot(tmp_path / "absent") is None
    assert latest_snapshot(tmp_path) is None


def test_the_newest_by_number_wins_and_older_ones_are_pruned(tmp_path: Path) -> None:
    for step in (9, 99, 100, 100000001):
        save(tmp_path, step)
    assert names(tmp_path) == ["step-00000100", "step-100000001"]
    assert latest_step(tmp_path) == 100000001
    save(tmp_path, 100000002, keep=1)
    assert names(tmp_path) == ["step-100000002"]


def test_keep_more_than_there_are(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step, keep=5)
    assert names(tmp_path) == ["step-00000001", "step-00000002", "step-00000003"]


def test_the_same_step_again_replaces_after_it_is_whole(tmp_path: Path) -> None:
    save(tmp_path, 5, text="old")
    path = save(tmp_path, 5, text="new", keep=1)
    assert names(tmp_path) == [path.name]
    found = latest_snapshot(tmp_path)
    assert found is not None
    assert (found.path / "ranks" / "0.bin").read_text() == "new 5"
    assert found.step == 5


def test_a_rewound_run_leaves_no_later_checkpoint(tmp_path: Path) -> None:
    for step in (2, 4, 6):
        save(tmp_path, step, keep=3)
    save(tmp_path, 3, keep=3)
    assert names(tmp_path) == ["step-00000002", "step-00000003"]


def test_foreign_folders_and_files_are_ignored_and_kept(tmp_path: Path) -> None:
    foreign = ["step-12", "step-00000012-backup", "best", ".partial-step-00000001-mine"]
    for name in foreign:
        (tmp_path / name).mkdir()
    (tmp_path / "step-00000099").write_text("a file")
    save(tmp_path, 1, keep=1)
    save(tmp_path, 2, keep=1)
    assert names(tmp_path) == sorted([*foreign, "step-00000099", "step-00000002"])
    assert latest_step(tmp_path) == 2
    with pytest.raises(CheckpointError, match="not the folder of a checkpoint"):
        load_snapshot(tmp_path / "best")


def test_some_stay_beside_the_newest(tmp_path: Path) -> None:
    for step in range(2, 14, 2):
        save(tmp_path, step, keep_every=4)
    assert [int(name[-2:]) for name in names(tmp_path)] == [4, 8, 10, 12]
    save(tmp_path, 9, keep=1, keep_every=4)
    assert [int(name[-2:]) for name in names(tmp_path)] == [4, 8, 9]


def test_begin_and_commit_in_two_moves(tmp_path: Path) -> None:
    state = {"at": 7}
    partial = begin_snapshot(tmp_path, 7, state=state)
    state["at"] = 8
    payload("x")(partial)
    assert latest_snapshot(tmp_path) is None
    assert commit_snapshot(partial).name == "step-00000007"
    found = latest_snapshot(tmp_path)
    assert found is not None
    assert (found.step, found.state) == (7, {"at": 7})


def test_without_content_only_sizes_are_looked_at(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    (path / "rng.bin").write_bytes(bytes(256))
    assert load_snapshot(path, content=False).step == 1
    with pytest.raises(CheckpointError, match=r"content of rng.bin differs"):
        latest_snapshot(tmp_path)
    (path / "rng.bin").write_bytes(bytes(255))
    with pytest.raises(CheckpointError, match=r"rng.bin has 255 bytes, the manifest says 256"):
        load_snapshot(path, content=False)


def test_sums_of_writers_are_taken_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a writer hashed is not read again, and a later look finds what has changed since then."""
    partial = begin_snapshot(tmp_path, 1, state={})
    payload("x")(partial)
    known = disk.sync_file(partial / "rng.bin")
    read: list[str] = []
    original = disk.sha256
    monkeypatch.setattr(disk, "sha256", lambda path: read.append(path.name) or original(path))
    (partial / "rng.bin").write_bytes(bytes(256))
    path = commit_snapshot(partial, known={"rng.bin": known})
    assert sorted(read) == ["0.bin", "state.json"]
    with pytest.raises(CheckpointError, match=r"content of rng.bin differs"):
        load_snapshot(path)


def test_a_writer_s_file_that_is_not_here_is_no_checkpoint(tmp_path: Path) -> None:
    for name, size in (("rng.bin", 255), ("other.bin", 1)):
        partial = begin_snapshot(tmp_path, 1, state={})
        payload("x")(partial)
        with pytest.raises(CheckpointError, match=f"{name} was written with {size} bytes, here it has"):
            commit_snapshot(partial, known={name: FileSum(size, "0")})
    assert latest_snapshot(tmp_path) is None


def test_a_state_that_is_not_json_is_refused(tmp_path: Path) -> None:
    save(tmp_path, 1)
    with pytest.raises(CheckpointError, match="state of step 2 is not JSON"):
        write_snapshot(tmp_path, 2, payload("x"), state={"a": {1, 2}})
    assert latest_step(tmp_path) == 1


def test_a_root_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot write") as caught:
        save(tmp_path / "file", 1)
    assert caught.value.where == str(tmp_path / "file")


# ---- torn ones


def cut(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def rewrite_manifest(path: Path) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), "files": {"state.json": {"bytes": 1}}}))


@pytest.mark.parametrize(
    ("name", "harm", "message"),
    [
        ("ranks/0.bin", cut, "0.bin has 4 bytes, the manifest says 9"),
        ("ranks/0.bin", flip, "content of ranks/0.bin differs"),
        ("ranks/0.bin", Path.unlink, "ranks/0.bin is missing"),
        ("state.json", flip, "content of state.json differs"),
        ("manifest.json", cut, "manifest.json is not JSON"),
        ("manifest.json", Path.unlink, "manifest.json is missing"),
        ("manifest.json", rewrite_manifest, "malformed entry"),
        ("manifest.json", lambda path: path.write_text("[]"), "not a JSON object"),
        ("manifest.json", lambda path: path.write_text("{}"), "does not describe step 2"),
    ],
)
def test_a_torn_checkpoint_is_skipped_loudly_for_the_one_before(tmp_path: Path, name: str, harm: Any, message: str) -> None:
    save(tmp_path, 1)
    torn = save(tmp_path, 2)
    harm(torn / name)
    found = latest_snapshot(tmp_path)
    assert found is not None
    assert found.step == 1
    assert len(found.warnings) == 1
    assert "step-00000002" in found.warnings[0]
    assert message in found.warnings[0]
    with pytest.raises(CheckpointError, match="step-00000002"):
        load_snapshot(torn)


def test_only_torn_checkpoints_are_an_error_and_not_a_fresh_start(tmp_path: Path) -> None:
    for path in [save(tmp_path, 1), save(tmp_path, 2)]:
        cut(path / "state.json")
    with pytest.raises(CheckpointError, match=r"no checkpoint is whole:(.|\n)*step-00000002(.|\n)*step-00000001"):
        latest_snapshot(tmp_path)


def test_a_torn_checkpoint_does_not_take_the_place_of_a_whole_one(tmp_path: Path) -> None:
    save(tmp_path, 1)
    cut(save(tmp_path, 2) / "ranks" / "0.bin")
    save(tmp_path, 3)
    assert names(tmp_path) == ["step-00000001", "step-00000003"]


# ---- killed while saving


def effects() -> list[tuple[Any, str]]:
    """Every call through which saving changes the disk."""
    return [
        (os, "open"),
        (os, "fsync"),
        (os, "rename"),
        (os, "mkdir"),
        (os, "unlink"),
        (os, "rmdir"),
        (Path, "open"),
        (Path, "mkdir"),
        (Path, "write_text"),
        (disk, "sync_file"),
    ]


def save_until(root: Path, calls: int, *, torn_write: bool) -> int:
    """Save step 3 in a child process that dies after `calls` effects; returns its exit code (0: it finished)."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        count = 0

        def counted(original: Any) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                nonlocal count
                if count == calls and not torn_write:
                    os._exit(9)
                result = original(*args, **kwargs)
                if count == calls:
                    os._exit(9)
                count += 1
                return result

            return call

        disk.THREADS = 1
        for owner, name in effects():
            setattr(owner, name, counted(getattr(owner, name)))
        save(root, 3)
        os._exit(0)
    finally:
        os._exit(1)


@pytest.mark.parametrize("torn_write", [False, True], ids=["before-the-call", "after-the-call"])
def test_killed_at_any_write_the_previous_checkpoint_loads(
    tmp_path: Path, torn_write: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)  # flushing needs a power cut to matter, and costs most of the time
    outcomes = []
    for calls in range(200):
        root = tmp_path / str(calls)
        save(root, 1)
        save(root, 2)
        code = save_until(root, calls, torn_write=torn_write)
        assert code in (0, 9)
        found = latest_snapshot(root)
        assert found is not None
        assert found.warnings == ()
        assert (found.path / "ranks" / "0.bin").read_text() == f"weights {found.step}"
        outcomes.append(found.step)
        save(root, 4)
        assert [name for name in names(root) if name.startswith(".")] == []
        assert latest_step(root) == 4
        if code == 0:
            break
    assert outcomes == sorted(outcomes)
    assert set(outcomes) == {2, 3}
    assert outcomes.count(2) > 15


def test_a_payload_that_fails_leaves_the_previous_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, 1)

    def fail(folder: Path) -> None:
        payload("half")(folder)
        raise RuntimeError("rank 3 is gone")

    with pytest.raises(RuntimeError, match="rank 3"):
        write_snapshot(tmp_path, 2, fail, state={})
    assert latest_step(tmp_path) == 1
