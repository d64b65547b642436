"""Names inside a run directory."""

from __future__ import annotations

from pathlib import Path

from vime.errors import DataError

RESOLVED = "resolved.yaml"
METRICS = "metrics.jsonl"
SAMPLES = "samples.jsonl"
REPORT = "report.html"
PLAN = "plan.json"
LOGS = "logs"
TENSORBOARD = "tensorboard"
CHECKPOINTS = "checkpoints"
EXPORTS = "exports"


def require_run(directory: Path) -> Path:
    """The directory, if a run has written there. Raises DataError otherwise."""
    where = str(directory)
    if not directory.is_dir():
        problem = "is not a directory" if directory.exists() else "does not exist"
        raise DataError(f"the run directory {problem}", where=where, fix="give the directory that `run.dir` names")
    if not (directory / METRICS).is_file():
        fix = "give the directory that `run.dir` names; metrics appear once a run has started"
        raise DataError(f"not a run directory: it holds no {METRICS}", where=where, fix=fix)
    return directory
