"""When a run writes a checkpoint."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from vime.cluster.checkpoints import RunCheckpoints
from vime.config.schema import CheckpointSection
from vime.types import PolicyVersion, StepReport

STEPS = 5


async def write(directory: Path) -> None:
    """Of a rank with nothing to write."""
    await asyncio.to_thread((directory / "trainer").mkdir, parents=True)


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({}, [5]),
        ({"last": False}, []),
        ({"every": 2}, [2, 4, 5]),
        ({"every": 2, "last": False}, [2, 4]),
        ({"every": 5, "last": False}, [5]),
    ],
)
def test_due_steps(tmp_path: Path, section: dict[str, Any], expected: list[int]) -> None:
    saved: list[int] = []
    checkpoints = RunCheckpoints(
        tmp_path,
        write,
        CheckpointSection(**section),
        is_last=lambda step: step == STEPS,
        state=lambda _: {},
        saved=lambda version, _: saved.append(version.step),
    )

    async def train() -> None:
        for step in range(1, STEPS + 1):
            await checkpoints.save_if_due(StepReport(step, PolicyVersion(0, step), {}, {}))

    asyncio.run(train())
    assert saved == expected
