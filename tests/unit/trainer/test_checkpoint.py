"""A rank's checkpoint that is written while the rank trains on, and what is refused on loading."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from vime.config.schema import OptimizerSection, TrainerSection
from vime.data.disk import sync_file
from vime.data.written import FileCopy, collect_notes, missing_notes, note_path
from vime.errors import CheckpointError
from vime.memory.residency import TRAINER_TAGS
from vime.types import TrainSample, UpdateWork

VOCAB = 50


def work(seed: int) -> UpdateWork:
    draw = random.Random(seed)

    def sample(reward: float) -> TrainSample:
        ids = tuple(draw.randrange(VOCAB) for _ in range(6))
        return TrainSample(ids[:3], ids[3:], (-4.0, -3.9, -3.8), (1, 1, 1), reward, (0.0, 1.0, 0.0, 1.0))

    samples = tuple(sample(reward) for reward in (0.0, 1.0, 0.0, 1.0))
    return UpdateWork((samples,), num_rollouts=4, num_tokens=12)


def weights(worker: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in worker.weights()}


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Nothing is written from a copy before this is set."""
    release, original = threading.Event(), FileCopy.write_to

    def late(self: FileCopy, path: Path) -> Any:
        assert release.wait(30)
        return original(self, path)

    monkeypatch.setattr(FileCopy, "write_to", late)
    return release


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_written_late_is_the_state_of_the_save(worker_of, tmp_path: Path, held: threading.Event, dtype: str) -> None:
    """Steps and a parked rank in between change nothing of it."""
    section = TrainerSection(optimizer=OptimizerSection(lr=1e-2, weight_decay=0.1))
    worker = worker_of(dtype=dtype, trainer=section)
    worker.train_step([work(0)])
    worker.save(tmp_path / "checkpoint", background=True)
    note = note_path(tmp_path / "checkpoint", 0)
    rows = [worker.train_step([work(k)]) for k in (1, 2)]
    end = weights(worker)
    worker.park(TRAINER_TAGS)
    assert missing_notes([note])
    assert not list((tmp_path / "checkpoint").glob("*.distcp"))
    held.set()
    resumed = worker_of(dtype=dtype, trainer=section, from_scratch_seed=8)  # the one before ends, which waits
    assert collect_notes(tmp_path, [note]) == {"checkpoint/__0_0.distcp": sync_file(tmp_path / "checkpoint" / "__0_0.distcp")}
    resumed.load(tmp_path / "checkpoint")
    assert [resumed.train_step([work(k)]) for k in (1, 2)] == rows
    assert all(torch.equal(tensor, end[name]) for name, tensor in weights(resumed).items())


def test_both_ways_write_the_same_bytes(worker_of, tmp_path: Path) -> None:
    worker = worker_of()
    worker.train_step([work(0)])
    worker.save(tmp_path / "at-once")
    worker.save(tmp_path / "late", background=True)
    worker.save(tmp_path / "later", background=True)  # waits for the one before
    worker.close()
    sums = [
        {name.partition("/")[2]: found for name, found in collect_notes(tmp_path, [note_path(tmp_path / kind, 0)]).items()}
        for kind in ("at-once", "late", "later")
    ]
    assert sums[0] == sums[1] == sums[2] == {"__0_0.distcp": sync_file(tmp_path / "at-once" / "__0_0.distcp")}


def test_a_checkpoint_without_its_bytes_is_refused(worker_of, tmp_path: Path, held: threading.Event) -> None:
    """As of a process that is killed while it writes."""
    worker = worker_of()
    worker.save(tmp_path / "checkpoint", background=True)
    with pytest.raises(CheckpointError, match="cannot read the checkpoint"):
        worker.load(tmp_path / "checkpoint")
    held.set()


def test_a_checkpoint_of_another_type_says_what_to_write(worker_of, tmp_path: Path) -> None:
    worker_of().save(tmp_path / "checkpoint")
    with pytest.raises(CheckpointError, match="of a model in float32, this run's is in bfloat16") as caught:
        worker_of(dtype="bfloat16").load(tmp_path / "checkpoint")
    assert caught.value.fix == "set model.dtype: float32"
