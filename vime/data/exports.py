"""Models that a run writes on its way, as Hugging Face folders by step that are whole or not there."""

from __future__ import annotations

import os
from pathlib import Path

from vime.data import disk
from vime.data.disk import Retention


def begin_export(root: Path, step: int) -> Path:
    """An empty folder for the model of `step`. Raises CheckpointError when it cannot be made."""
    partial = disk.partial_folder(root, step)
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        raise disk.cannot_write(root, error) from error
    return partial


def commit_export(partial: Path, *, keep: Retention) -> Path:
    """Flush a written folder, give it its name, remove what it replaces and what `keep` leaves out; return the folder.

    Of one step the last one stays, and those of later steps go: they are of a run that was rewound to before them. Raises
    CheckpointError when the disk refuses.
    """
    root, step = partial.parent, disk.step_of(partial)
    assert step is not None
    final = root / f"step-{step:08d}"
    try:
        disk.flush_tree(partial)
        if final.exists():
            os.rename(final, disk.partial_folder(root, step))
        os.rename(partial, final)
        disk.fsync(root)
        older = [path for path in disk.whole_folders(root) if disk.age(path)[0] < step]
        disk.remove_others(root, {final, *keep.kept(older)})
    except OSError as error:
        raise disk.cannot_write(partial, error) from error
    return final
