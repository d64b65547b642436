"""Checkpoints as folders that are whole or not there: temporary name, fsync, manifest, rename; the old one goes last."""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vime.data import disk
from vime.data.disk import FileSum, Retention
from vime.errors import CheckpointError

SCHEMA = "vime.checkpoint/v1"
MANIFEST = "manifest.json"
STATE = "state.json"


@dataclass(frozen=True)
class Snapshot:
    """A whole checkpoint. `warnings` name newer ones that were skipped because they are torn."""

    path: Path
    step: int
    state: Mapping[str, Any]
    warnings: tuple[str, ...] = ()


def begin_snapshot(root: Path, step: int, *, state: Mapping[str, Any]) -> Path:
    """A folder with the state, for the payload of `step`. Nothing reads it before `commit_snapshot`.

    Killed at any moment until then and in it, a run has the checkpoint before. Raises CheckpointError for a state that is not
    JSON and for a folder that cannot be written.
    """
    partial = disk.partial_folder(root, step)
    try:
        text = json.dumps(state, indent=1, sort_keys=True)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"the state of step {step} is not JSON: {error}", where=str(partial)) from error
    try:
        partial.mkdir(parents=True)
        disk.write_text(partial / STATE, text)
    except OSError as error:
        raise disk.cannot_write(root, error) from error
    return partial


def commit_snapshot(partial: Path, *, known: Mapping[str, FileSum] | None = None, keep: Retention | None = None) -> Path:
    """Make a begun checkpoint whole, rename it into place, then remove what it replaces; return its folder.

    `known` are sums of files, by path inside the folder, that their writers took and flushed; the others are read for theirs.
    The two newest stay, or what `keep` says. Checkpoints of later steps are removed: they belong to a run that was rewound to
    before them. Unfinished folders of runs that were killed are removed too; folders that are not ours are never touched.
    """
    try:
        files = {name: asdict(found) for name, found in disk.sync_tree(partial, known or {}).items()}
        manifest = {"schema": SCHEMA, "step": disk.step_of(partial), "files": files}
        disk.write_text(partial / MANIFEST, json.dumps(manifest, indent=1, sort_keys=True))
        final = disk.rename_into_place(partial)
        older = [path for path in disk.whole_folders(final.parent) if disk.age(path)[0] < disk.age(final)[0]]
        kept = (keep or Retention()).kept([path for path in older if _looks_whole(path)])
        disk.remove_others(final.parent, {final, *kept})
    except OSError as error:
        raise disk.cannot_write(partial, error) from error
    return final


def latest_snapshot(root: Path, *, content: bool = True) -> Snapshot | None:
    """The newest whole checkpoint, or None when there has never been one; see `load_snapshot`.

    Raises CheckpointError when there are checkpoints, but every one is torn: starting over is then for the user to decide.
    """
    warnings: list[str] = []
    for path in reversed(disk.whole_folders(root)):
        try:
            return load_snapshot(path, content=content, warnings=tuple(warnings))
        except CheckpointError as error:
            warnings.append(f"skipped a torn checkpoint: {error.where}: {error.what}")
    if warnings:
        raise CheckpointError(
            "no checkpoint is whole:\n" + "\n".join(warnings),
            where=str(root),
            fix="restore one from a copy, or move these folders away to start from the beginning",
        )
    return None


def load_snapshot(path: Path, *, content: bool = True, warnings: tuple[str, ...] = ()) -> Snapshot:
    """Check a checkpoint's files against its manifest and read its state.

    All files are read, or without `content` only their sizes looked at. Raises CheckpointError where they differ.
    """
    step = disk.step_of(path)
    if step is None or path.name.startswith("."):
        raise CheckpointError("not the folder of a checkpoint", where=str(path), fix="name a folder such as step-00000100")
    manifest = _read_json(path / MANIFEST)
    files = manifest.get("files")
    if manifest.get("schema") != SCHEMA or manifest.get("step") != step or not isinstance(files, dict) or STATE not in files:
        raise CheckpointError(f"{MANIFEST} does not describe step {step}", where=str(path))
    try:
        sums = {name: FileSum(entry["bytes"], entry["sha256"]) for name, entry in files.items()}
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{MANIFEST} has a malformed entry: {error!r}", where=str(path)) from error
    _verify(path, sums, content=content)
    return Snapshot(path, step, _read_json(path / STATE), warnings)


def _verify(path: Path, files: Mapping[str, FileSum], *, content: bool) -> None:
    for name, expected in files.items():
        try:
            found = (path / name).stat().st_size
        except OSError:
            raise CheckpointError(f"{name} is missing", where=str(path)) from None
        if found != expected.bytes:
            raise CheckpointError(f"{name} has {found} bytes, the manifest says {expected.bytes}", where=str(path))
    hashed = [name for name, expected in files.items() if content and expected.sha256 is not None]
    with ThreadPoolExecutor(disk.THREADS) as pool:
        for name, digest in zip(hashed, pool.map(disk.sha256, [path / name for name in hashed]), strict=True):
            if digest != files[name].sha256:
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


def _looks_whole(path: Path) -> bool:
    """Manifest and sizes agree; content is not read."""
    try:
        load_snapshot(path, content=False)
    except CheckpointError:
        return False
    return True
