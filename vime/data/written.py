"""Files of a checkpoint as their writers make them: hashed on the way, at once or from a copy, and told of by a note.

A writer is a process somewhere on the shared file system that the checkpoint lies on. Whoever waits for it reads its note,
so that no process has to answer while it trains.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Protocol

from vime.data.disk import FileSum
from vime.errors import CheckpointError

_BESIDE_BYTES = 2**20
"""From this size on, hashing runs beside writing instead of after it."""


class Sink(Protocol):
    """Where a writer puts a file's content, in order."""

    def write(self, data: bytes | memoryview) -> int:
        """Take a copy; the number of bytes."""
        ...

    def flush(self) -> None: ...

    def tell(self) -> int:
        """Bytes so far."""
        ...


class HashedFile:
    """A file on the disk, hashed while it is written. `close` flushes it and tells its sum."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self._sum = hashlib.sha256()
        self._bytes = 0
        self._beside = ThreadPoolExecutor(1)

    def write(self, data: bytes | memoryview) -> int:
        """See `Sink`. Raises OSError, as `close` does."""
        size = len(data)
        if size < _BESIDE_BYTES:
            self._sum.update(data)
            self._file.write(data)
        else:
            hashed = self._beside.submit(self._sum.update, data)
            self._file.write(data)
            hashed.result()
        self._bytes += size
        return size

    def flush(self) -> None:
        """What is written is on the disk only after `close`."""

    def tell(self) -> int:
        return self._bytes

    def close(self) -> FileSum:
        """Flush to the disk."""
        with self._file:
            self._file.flush()
            os.fsync(self._file.fileno())
        self._beside.shutdown()
        return FileSum(self._bytes, self._sum.hexdigest())


class FileCopy:
    """A file's content in memory until `write_to` puts it on the disk."""

    def __init__(self) -> None:
        self._chunks: deque[bytes] = deque()
        self._bytes = 0

    def write(self, data: bytes | memoryview) -> int:
        """See `Sink`."""
        self._chunks.append(bytes(data))
        self._bytes += len(data)
        return len(data)

    def flush(self) -> None:
        """Nothing to do."""

    def tell(self) -> int:
        return self._bytes

    def write_to(self, path: Path) -> FileSum:
        """Write and forget the content. Raises OSError."""
        file = HashedFile(path)
        while self._chunks:
            file.write(self._chunks.popleft())
        return file.close()


# ---- notes


def note_path(folder: Path, writer: int) -> Path:
    """The note of a writer, such as a rank, about what it wrote to `folder`."""
    return folder / f".written-{writer:05d}.json"


def leave_note(folder: Path, writer: int, files: Mapping[str, FileSum] | str) -> None:
    """Tell that these files, by name, are on the disk; or why they are not. The note appears whole. Raises OSError."""
    content = {"error": files} if isinstance(files, str) else {"files": {name: asdict(found) for name, found in files.items()}}
    path = note_path(folder, writer)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(content), encoding="utf-8")
    partial.replace(path)


def missing_notes(notes: Sequence[Path]) -> list[Path]:
    """Those that are not there yet."""
    return [note for note in notes if not note.exists()]


def collect_notes(root: Path, notes: Sequence[Path]) -> dict[str, FileSum]:
    """Read notes and remove them -> sums by path below `root`. Raises CheckpointError naming a writer that failed."""
    found: dict[str, FileSum] = {}
    for note in notes:
        content = json.loads(note.read_text(encoding="utf-8"))
        if "error" in content:
            raise CheckpointError(f"cannot write: {content['error']}", where=str(note.parent), fix="check the disk")
        folder = note.parent.relative_to(root)
        found |= {(folder / name).as_posix(): FileSum(**entry) for name, entry in content["files"].items()}
    for note in notes:
        note.unlink()
    return found


class BackgroundWriter:
    """Writes copies to the disk in a thread of this process, one checkpoint at a time, and leaves a note of each."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is still being written."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, folder: Path, writer: int, copies: Mapping[str, FileCopy]) -> None:
        """Begin to write files, by name, into a folder. Raises CheckpointError while the one before is not done."""
        if self.busy:
            raise CheckpointError("the checkpoint before this one is still being written", where=str(folder))
        job = threading.Thread(target=_write, args=(folder, writer, dict(copies)), name="checkpoint-writer", daemon=True)
        self._thread = job
        job.start()

    def wait(self) -> None:
        """Until what was begun is on the disk, or its note tells why it is not."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None


def _write(folder: Path, writer: int, copies: Mapping[str, FileCopy]) -> None:
    try:
        leave_note(folder, writer, {name: copy.write_to(folder / name) for name, copy in copies.items()})
    except Exception as error:  # noqa: BLE001 - this is a thread's end; its reader learns of an error from the note alone
        for name in copies:  # The note must find room where a file did not.
            (folder / name).unlink(missing_ok=True)
        leave_note(folder, writer, str(error) or type(error).__name__)
