"""Files of a checkpoint from their writers' hands: sums, copies, notes."""

from __future__ import annotations

import hashlib
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from vime.data import written
from vime.data.disk import FileSum
from vime.data.written import BackgroundWriter, FileCopy, HashedFile, collect_notes, leave_note, missing_notes, note_path
from vime.errors import CheckpointError

PARTS = [b"small", bytes(3 * 2**20), b"", b"\xff" * 2**20, b"end"]


def sum_of(data: bytes) -> FileSum:
    return FileSum(len(data), hashlib.sha256(data).hexdigest())


@pytest.mark.parametrize("kind", ["file", "copy"])
def test_what_comes_in_is_what_lies_there(tmp_path: Path, kind: str) -> None:
    """The writer may use its memory again as soon as `write` returns."""
    path = tmp_path / "file"
    sink: Any = HashedFile(path) if kind == "file" else FileCopy()
    for part in PARTS:
        lent = bytearray(part)
        assert sink.write(memoryview(lent)) == len(part)
        lent[:] = bytes(len(lent))
    assert sink.tell() == len(b"".join(PARTS))
    assert path.exists() == (kind == "file")
    found = sink.close() if kind == "file" else sink.write_to(path)
    assert path.read_bytes() == b"".join(PARTS)
    assert found == sum_of(b"".join(PARTS))


def test_notes_of_several_writers_become_sums_below_the_root(tmp_path: Path) -> None:
    notes = []
    for folder, writer in (("trainer", 0), ("trainer", 1), ("trainer-critic", 0)):
        (tmp_path / folder).mkdir(exist_ok=True)
        notes.append(note_path(tmp_path / folder, writer))
        assert missing_notes(notes) == notes[-1:]
        files = {f"__{writer}_0": sum_of(folder.encode())} if (folder, writer) != ("trainer", 1) else {}
        leave_note(tmp_path / folder, writer, files)
    assert missing_notes(notes) == []
    assert collect_notes(tmp_path, notes) == {
        "trainer/__0_0": sum_of(b"trainer"),
        "trainer-critic/__0_0": sum_of(b"trainer-critic"),
    }
    assert not list(tmp_path.glob("*/.*"))


def test_a_background_writer_writes_while_its_process_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release, writer = threading.Event(), BackgroundWriter()
    original = FileCopy.write_to

    def slow(self: FileCopy, path: Path) -> FileSum:
        assert release.wait(10)
        return original(self, path)

    monkeypatch.setattr(FileCopy, "write_to", slow)
    copy = FileCopy()
    copy.write(b"abc")
    writer.start(tmp_path, 3, {"a": copy})
    assert writer.busy
    assert missing_notes([note_path(tmp_path, 3)])
    with pytest.raises(CheckpointError, match="before this one is still being written"):
        writer.start(tmp_path, 3, {})
    release.set()
    writer.wait()
    assert not writer.busy
    assert (tmp_path / "a").read_bytes() == b"abc"
    assert collect_notes(tmp_path, [note_path(tmp_path, 3)]) == {"a": sum_of(b"abc")}
    writer.start(tmp_path, 3, {})
    writer.wait()
    assert collect_notes(tmp_path, [note_path(tmp_path, 3)]) == {}


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), MemoryError(), ValueError("odd")])
def test_a_writer_that_fails_says_so_and_leaves_room_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    class Full(HashedFile):
        def write(self, data: bytes | memoryview) -> int:
            super().write(data)
            raise error

    monkeypatch.setattr(written, "HashedFile", Full)
    copy, writer = FileCopy(), BackgroundWriter()
    copy.write(b"abc")
    writer.start(tmp_path, 0, {"a": copy})
    writer.wait()
    assert not (tmp_path / "a").exists()
    note = note_path(tmp_path, 0)
    assert json.loads(note.read_text())["error"]
    with pytest.raises(CheckpointError, match=r"cannot write: (.*No space left|MemoryError|odd)") as caught:
        collect_notes(tmp_path, [note])
    assert caught.value.where == str(tmp_path)
