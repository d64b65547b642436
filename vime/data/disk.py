"""What keeps a folder whole on the disk: flushed files and their sums, names by step, and which of them stay."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from vime.errors import CheckpointError

THREADS = 8
"""That hash side by side, each about 1.5 GiB/s."""

_NAME = re.compile(r"step-(\d{8,})(?:\.(\d+))?")
_PARTIAL = re.compile(r"\.partial-step-(\d{8,})-[0-9a-f]{32}")


@dataclass(frozen=True)
class FileSum:
    """What a file must have. Without `sha256` its size only."""

    bytes: int
    sha256: str | None


@dataclass(frozen=True)
class Retention:
    """Which folders stay: the `newest` (None: all), and those of steps that `every` divides (0: no others)."""

    newest: int | None = 2
    every: int = 0

    def kept(self, older: Sequence[Path]) -> set[Path]:
        """Of folders from the oldest on, beside one that is newer than all of them."""
        if self.newest is None:
            return set(older)
        last = older[-(self.newest - 1) :] if self.newest > 1 else ()
        return {*last, *(path for path in older if self.every and age(path)[0] % self.every == 0)}


# ---- folders by step


def partial_folder(root: Path, step: int) -> Path:
    """A name for a folder that is not whole yet."""
    return root / f".partial-step-{step:08d}-{uuid.uuid4().hex}"


def step_of(path: Path) -> int | None:
    """Of a whole folder's name, or of a partial one's; None for names that are not ours."""
    match = _NAME.fullmatch(path.name) or _PARTIAL.fullmatch(path.name)
    return int(match[1]) if match else None


def whole_folders(root: Path) -> list[Path]:
    """Our folders under `root`, oldest first; a second one of the same step is newer."""
    if not root.is_dir():
        return []
    return sorted((p for p in root.iterdir() if _NAME.fullmatch(p.name) and p.is_dir()), key=age)


def age(path: Path) -> tuple[int, int]:
    """(step, how many of that step came before) of a whole folder's name."""
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1]), int(match[2] or 0)


def rename_into_place(partial: Path) -> Path:
    """Give a flushed folder the name of its step. An older folder of that step stays until this one has its name."""
    root, step = partial.parent, step_of(partial)
    assert step is not None
    taken = [generation for other, generation in map(age, whole_folders(root)) if other == step]
    final = root / (f"step-{step:08d}.{max(taken) + 1}" if taken else f"step-{step:08d}")
    fsync(partial)
    os.rename(partial, final)
    fsync(root)
    return final


def remove_others(root: Path, kept: set[Path]) -> None:
    """Remove whole and partial folders of ours."""
    for path in root.iterdir():
        if path not in kept and path.is_dir() and step_of(path) is not None:
            shutil.rmtree(path)


# ---- files


def write_text(path: Path, text: str) -> None:
    """Write and flush."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_tree(folder: Path, known: Mapping[str, FileSum]) -> dict[str, FileSum]:
    """Flush every file and folder below `folder` to the disk; return the sums of all files, by path inside it.

    `known` are those that their writers took and flushed. Raises CheckpointError where such a file is not what it should be.
    """
    names = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
    for name, expected in known.items():
        found = (folder / name).stat().st_size if name in names else None
        if found != expected.bytes:
            raise CheckpointError(
                f"{name} was written with {expected.bytes} bytes, here it has {found}",
                where=str(folder),
                fix="put run.dir on a file system that all nodes share",
            )
    others = [name for name in names if name not in known]
    with ThreadPoolExecutor(THREADS) as pool:
        sums = dict(zip(others, pool.map(sync_file, [folder / name for name in others]), strict=True))
    for directory in (p for p in folder.rglob("*") if p.is_dir()):
        fsync(directory)
    return {**sums, **known}


def flush_tree(folder: Path) -> None:
    """Flush a folder and everything below it."""
    for path in (*folder.rglob("*"), folder):
        fsync(path)


def sync_file(path: Path) -> FileSum:
    """Flush a file and read its sum."""
    fsync(path)
    return FileSum(path.stat().st_size, sha256(path))


def sha256(path: Path) -> str:
    """Of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fsync(path: Path) -> None:
    """Flush a file or a folder's list of names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def cannot_write(path: Path, error: OSError) -> CheckpointError:
    """The error for a disk that refuses."""
    return CheckpointError(f"cannot write: {error}", where=str(path), fix="check free space and permissions of run.dir")
