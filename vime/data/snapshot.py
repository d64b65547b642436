"""Checkpoints as folders that are whole or not there: temporary name, fsync, manifest, rename; the old one goes last."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vime.errors import CheckpointError

SCHEMA = "vime.checkpoint/v1"
MANIFEST = "manifest.json"
STATE = "state.json"
CHECKSUM_LIMIT_BYTES = 2**30
"""Larger files are checked by size only: hashing runs at about 1.5 GiB/s a thread, and the trainer waits for it."""

_NAME = re.compile(r"step-(\d{8,})(?:\.(\d+))?")
_PARTIAL = re.compile(r"\.partial-step-\d{8,}-[0-9a-f]{32}")
_THREADS = 4


@dataclass(frozen=True)
class Snapshot:
    """A whole checkpoint. `warnings` name newer ones that were skipped because they are torn."""

    path: Path
    step: int
    state: Mapping[str, Any]
    warnings: tuple[str, ...] = ()


def write_snapshot(root: Path, step: int, write: Callable[[Path], None], *, state: Mapping[str, Any], keep: int = 2) -> Path:
    """Write a checkpoint and return its folder; `write` puts the payload into the folder it is given.

    Killed at any moment, this leaves the previous checkpoint loadable. Raises CheckpointError when the folder cannot be
    written, and whatever `write` raises.
    """
    partial = begin_snapshot(root, step)
    write(partial)
    return commit_snapshot(partial, state=state, keep=keep)


def begin_snapshot(root: Path, step: int) -> Path:
    """An empty folder for the payload of `step`. Nothing reads it before `commit_snapshot`."""
    partial = root / f".partial-step-{step:08d}-{uuid.uuid4().hex}"
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        raise _cannot_write(root, error) from error
    return partial


def commit_snapshot(partial: Path, *, state: Mapping[str, Any], keep: int = 2) -> Path:
    """Make a begun checkpoint whole, rename it into place, then remove what it replaces; return its folder.

    The `keep` newest stay. Checkpoints of later steps are removed: they belong to a run that was rewound to before them.
    Unfinished folders of runs that were killed are removed too; folders that are not ours are never touched.
    """
    root, step = partial.parent, int(partial.name.split("-")[2])
    try:
        text = json.dumps(state, indent=1, sort_keys=True)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"the state of step {step} is not JSON: {error}", where=str(partial)) from error
    try:
        _write_text(partial / STATE, text)
        files = _sync_tree(partial)
        _write_text(partial / MANIFEST, json.dumps({"schema": SCHEMA, "step": step, "files": files}, indent=1, sort_keys=True))
        _fsync(partial)
        final = _free_name(root, step)
        os.rename(partial, final)
        _fsync(root)
        _prune(root, newest=final, keep=keep)
    except OSError as error:
        raise _cannot_write(partial, error) from error
    return final


def latest_snapshot(root: Path) -> Snapshot | None:
    """The newest whole checkpoint, or None when there has never been one.

    Raises CheckpointError when there are checkpoints, but every one is torn: starting over is then for the user to decide.
    """
    warnings: list[str] = []
    for path in reversed(_snapshots(root)):
        try:
            return load_snapshot(path, warnings=tuple(warnings))
        except CheckpointError as error:
            warnings.append(f"skipped a torn checkpoint: {error.where}: {error.what}")
    if warnings:
        raise CheckpointError(
            "no checkpoint is whole:\n" + "\n".join(warnings),
            where=str(root),
            fix="restore one from a copy, or move these folders away to start from the beginning",
        )
    return None


def load_snapshot(path: Path, *, warnings: tuple[str, ...] = ()) -> Snapshot:
    """Check a checkpoint's files against its manifest and read its state. Raises CheckpointError where they differ."""
    match = _NAME.fullmatch(path.name)
    if match is None:
        raise CheckpointError("not the folder of a checkpoint", where=str(path), fix="name a folder such as step-00000100")
    manifest = _read_json(path / MANIFEST)
    step, files = int(match[1]), manifest.get("files")
    if manifest.get("schema") != SCHEMA or manifest.get("step") != step or not isinstance(files, dict) or STATE not in files:
        raise CheckpointError(f"{MANIFEST} does not describe step {step}", where=str(path))
    try:
        _verify(path, {name: (entry["bytes"], entry["sha256"]) for name, entry in files.items()})
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{MANIFEST} has a malformed entry: {error!r}", where=str(path)) from error
    return Snapshot(path, step, _read_json(path / STATE), warnings)


def _verify(path: Path, files: Mapping[str, tuple[int, str | None]]) -> None:
    for name, (expected, _) in files.items():
        try:
            found = (path / name).stat().st_size
        except OSError:
            raise CheckpointError(f"{name} is missing", where=str(path)) from None
        if found != expected:
            raise CheckpointError(f"{name} has {found} bytes, the manifest says {expected}", where=str(path))
    hashed = [name for name, (_, digest) in files.items() if digest is not None]
    with ThreadPoolExecutor(_THREADS) as pool:
        for name, digest in zip(hashed, pool.map(_sha256, [path / name for name in hashed]), strict=True):
            if digest != files[name][1]:
                raise CheckpointError(f"the content of {name} differs from its checksum", where=str(path))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        raise CheckpointError(f"{path.name} is missing or cannot be read", where=str(path.parent)) from None
    except ValueError as error:
        raise CheckpointError(f"{path.name} is not JSON: {error}", where=str(path.parent)) from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path.name} is not a JSON object", where=str(path.parent))
    return value


def _write_text(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_tree(folder: Path) -> dict[str, dict[str, Any]]:
    """Flush every file and folder below `folder` to the disk; return the manifest's entries."""
    paths = sorted(p for p in folder.rglob("*") if p.is_file())
    with ThreadPoolExecutor(_THREADS) as pool:
        entries = dict(zip([p.relative_to(folder).as_posix() for p in paths], pool.map(_sync_file, paths), strict=True))
    for directory in (p for p in folder.rglob("*") if p.is_dir()):
        _fsync(directory)
    return entries


def _sync_file(path: Path) -> dict[str, Any]:
    _fsync(path)
    size = path.stat().st_size
    return {"bytes": size, "sha256": _sha256(path) if size <= CHECKSUM_LIMIT_BYTES else None}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _snapshots(root: Path) -> list[Path]:
    """Our folders under `root`, oldest first; a second one of the same step is newer."""
    if not root.is_dir():
        return []
    return sorted((p for p in root.iterdir() if _NAME.fullmatch(p.name) and p.is_dir()), key=_age)


def _age(path: Path) -> tuple[int, int]:
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1]), int(match[2] or 0)


def _free_name(root: Path, step: int) -> Path:
    """A name that is not taken: an older checkpoint of the same step must stay until this one is whole."""
    taken = [generation for other, generation in map(_age, _snapshots(root)) if other == step]
    return root / (f"step-{step:08d}.{max(taken) + 1}" if taken else f"step-{step:08d}")


def _looks_whole(path: Path) -> bool:
    """Manifest and sizes agree; content is not read."""
    try:
        files = _read_json(path / MANIFEST)["files"]
        return all((path / name).stat().st_size == entry["bytes"] for name, entry in files.items())
    except (CheckpointError, OSError, KeyError, TypeError, AttributeError):
        return False


def _prune(root: Path, *, newest: Path, keep: int) -> None:
    older = [path for path in _snapshots(root) if path != newest and _age(path)[0] < _age(newest)[0]]
    whole = [path for path in older if _looks_whole(path)]
    kept = {newest, *whole[-(keep - 1) :]} if keep > 1 else {newest}
    for path in root.iterdir():
        if path not in kept and path.is_dir() and (_PARTIAL.fullmatch(path.name) or _NAME.fullmatch(path.name)):
            shutil.rmtree(path)


def _cannot_write(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"cannot write: {error}", where=str(path), fix="check free space and permissions of run.dir")
