"""The link's halves, over a real socket."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from acme_accelerator.link import LinkEngine, LinkTrainer
from acme_accelerator.process import FRAME_VARIABLE
from vime.errors import DeadlineError, WeightSyncError
from vime.weights.fingerprint import digest
from vime.weights.manifest import build_manifest

WEIGHTS = {
    "embed": torch.arange(3000, dtype=torch.float32).view(30, 100),
    "norm": torch.full((7,), 2.5, dtype=torch.bfloat16),
    "head": torch.arange(12, dtype=torch.float32).view(3, 4),
}
MANIFEST = build_manifest((name, str(t.dtype).removeprefix("torch."), t.shape) for name, t in WEIGHTS.items())

MakeTrainer = Callable[..., LinkTrainer]


@pytest.fixture
def trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeTrainer]:
    monkeypatch.setenv(FRAME_VARIABLE, "1000")
    made: list[LinkTrainer] = []

    def make(**options: Any) -> LinkTrainer:
        made.append(LinkTrainer(run_id="r", manifest=MANIFEST, directory=tmp_path, **{"timeout_s": 10.0, **options}))
        return made[-1]

    yield make
    for half in made:
        half.close()


def joined(trainer: LinkTrainer, workers: int) -> list[LinkEngine]:
    offer = trainer.init_info(workers)
    engines = [LinkEngine() for _ in range(workers)]
    accepting = threading.Thread(target=trainer.connect)
    accepting.start()
    for worker, engine in enumerate(engines):
        engine.connect({**offer["info"], "manifest": offer["manifest"], "rank_offset": 0, "worker_rank": worker})
    accepting.join(10)
    return engines


def published(trainer: LinkTrainer, engines: list[LinkEngine], weights: dict[str, torch.Tensor]) -> list[dict[str, Any]]:
    staged = trainer.stage(weights.items(), version="0.1", fingerprint=True)
    got: list[dict[str, Any]] = [{} for _ in engines]
    takers = [
        threading.Thread(target=lambda e=e, into=into: into.update(e.receive(staged)))
        for e, into in zip(engines, got, strict=True)
    ]
    for taker in takers:
        taker.start()
    trainer.stream(weights.items())
    for taker in takers:
        taker.join(10)
    return got


def test_two_workers_get_every_bit_twice(trainer: MakeTrainer) -> None:
    half = trainer()
    engines = joined(half, 2)
    for weights in (WEIGHTS, {name: tensor * 3 for name, tensor in WEIGHTS.items()}):
        for got in published(half, engines, weights):
            assert list(got) == [spec.name for spec in MANIFEST.tensors]
            assert all(torch.equal(got[name], tensor) for name, tensor in weights.items())


def test_staging_reports_digests_of_what_is_sent(trainer: MakeTrainer) -> None:
    staged = trainer().stage(WEIGHTS.items(), version="0.4", fingerprint=True)
    assert (staged["version"], staged["tensors"]) == ("0.4", 3)
    assert staged["digests"] == {name: digest(tensor) for name, tensor in WEIGHTS.items()}


def test_a_loader_that_gives_up_leaves_nothing_on_the_socket(trainer: MakeTrainer) -> None:
    half = trainer()
    (engine,) = joined(half, 1)
    staged = half.stage(WEIGHTS.items(), version="0.1", fingerprint=False)
    sending = threading.Thread(target=half.stream, args=(WEIGHTS.items(),))
    sending.start()
    arriving: Any = engine.receive(staged)
    assert next(arriving)[0] == "embed"
    arriving.close()
    sending.join(10)
    (got,) = published(half, [engine], WEIGHTS)
    assert torch.equal(got["head"], WEIGHTS["head"])


def test_an_engine_that_restarts_is_served_from_what_was_kept(trainer: MakeTrainer) -> None:
    half = trainer()
    published(half, joined(half, 1), WEIGHTS)
    half.keep(WEIGHTS.items())
    (again,) = joined(half, 1)
    got: dict[str, Any] = {}
    taking = threading.Thread(target=lambda: got.update(again.receive({})))
    taking.start()
    half.stream(())
    taking.join(10)
    assert torch.equal(got["embed"], WEIGHTS["embed"])


def test_a_worker_that_does_not_come_is_named(trainer: MakeTrainer) -> None:
    half = trainer(timeout_s=0.1)
    half.init_info(2)
    with pytest.raises(DeadlineError, match=r"engine workers \[0, 1\] did not connect"):
        half.connect()


def test_a_stranger_is_not_let_in(trainer: MakeTrainer) -> None:
    half = trainer(timeout_s=0.3)
    offer = half.init_info(1)
    stranger = LinkEngine()
    info = {**offer["info"], "token": "guessed", "manifest": offer["manifest"], "rank_offset": 0, "worker_rank": 0}
    stranger.connect(info)
    with pytest.raises(DeadlineError):
        half.connect()
    with pytest.raises(WeightSyncError, match="tensor embed did not arrive"):
        list(stranger.receive({}))


def test_a_trainer_that_goes_names_the_tensor_that_is_missing(trainer: MakeTrainer) -> None:
    half = trainer()
    (engine,) = joined(half, 1)
    half.close()
    with pytest.raises(WeightSyncError, match="tensor embed did not arrive: the trainer hung up"):
        list(engine.receive({}))
    with pytest.raises(WeightSyncError, match="receive before connect"):
        engine.receive({})


def test_ends_that_cut_frames_differently_refuse_each_other(trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    offer = trainer().init_info(1)
    monkeypatch.setenv(FRAME_VARIABLE, "2000")
    with pytest.raises(WeightSyncError, match="frames of 1000 bytes, this worker of 2000"):
        LinkEngine().connect({**offer["info"], "manifest": offer["manifest"], "rank_offset": 0, "worker_rank": 0})


def test_the_socket_is_named_for_the_sweep_and_goes_with_the_half(trainer: MakeTrainer, tmp_path: Path) -> None:
    from vime.weights.transports.host_shm import sweep_segments

    half = trainer()
    (path,) = tmp_path.iterdir()
    assert sweep_segments("vime-", tmp_path).alive == (path.name,)
    path.rename(tmp_path / "vime-r-999999999-w")
    assert sweep_segments("vime-", tmp_path).removed == ("vime-r-999999999-w",)
    half.close()
    assert list(tmp_path.iterdir()) == []
