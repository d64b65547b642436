"""Both halves of every transport in one process."""

import os
import subprocess
import sys
import threading
import time

import pytest
import torch

from vime.errors import DeadlineError, WeightSyncError
from vime.weights.fingerprint import digest
from vime.weights.manifest import build_manifest
from vime.weights.transports.base import TransferContext
from vime.weights.transports.collective import CollectiveEngine, CollectiveTrainer
from vime.weights.transports.disk import DiskEngine, DiskTrainer
from vime.weights.transports.host_shm import HostShmEngine, HostShmTrainer, sweep_segments


def make_weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    names = [f"layers.{i}.{part}.weight" for i in range(3) for part in ("q_proj", "k_proj", "v_proj", "o_proj", "norm")]
    return {name: torch.randn(7, 5, generator=generator) for name in names} | {
        "head": torch.randn(3, generator=generator).bfloat16()
    }


def manifest_of(weights):
    return build_manifest((name, str(t.dtype).removeprefix("torch."), t.shape) for name, t in weights.items())


def assert_same(received, weights):
    received = dict(received)
    assert received.keys() == weights.keys()
    assert all(torch.equal(received[name], weights[name]) for name in weights)


def engine_info(offer, **more):
    return {**offer["info"], "manifest": offer["manifest"], "rank_offset": 0, "worker_rank": 0, **more}


@pytest.fixture
def shm(tmp_path):
    weights = make_weights(0)
    half = HostShmTrainer(run_id="unit", manifest=manifest_of(weights), directory=tmp_path)
    yield half, weights
    half.close()


def test_shared_memory_always_holds_the_last_published_weights(shm):
    half, weights = shm
    engine = HostShmEngine()
    engine.connect(engine_info(half.init_info(1)))
    for seed in (1, 2):
        weights = make_weights(seed)
        staged = half.stage(weights.items(), version=f"0.{seed}", fingerprint=True)
        assert_same(engine.receive(staged), weights)
        assert staged["digests"] == {name: digest(t) for name, t in weights.items()}
    restarted = HostShmEngine()
    restarted.connect(engine_info(half.init_info(1)))
    assert_same(restarted.receive({}), weights)


def test_several_ranks_write_parts_of_one_segment(shm, tmp_path):
    first, weights = shm
    context = TransferContext("unit", manifest_of(weights), 1, "127.0.0.1", tmp_path, 0, 1.0, lead=first.init_info(0))
    second = HostShmTrainer.from_context(context)
    items = list(weights.items())
    counts = [
        first.stage(items[:4], version="0.1", fingerprint=False)["tensors"],
        second.stage(items[4:], version="0.1", fingerprint=False)["tensors"],
    ]
    assert counts == [4, len(items) - 4]
    engine = HostShmEngine()
    engine.connect(engine_info(first.init_info(1)))
    assert_same(engine.receive({}), weights)
    second.close()
    assert first.path.exists()
    first.close()
    assert not first.path.exists()
    with pytest.raises(WeightSyncError, match="is closed"):
        first.stage([], version="0.1", fingerprint=False)


def test_what_does_not_fit_the_manifest_is_named(shm):
    half, weights = shm
    for wrong, words in [
        ([("other", torch.zeros(1))], "other is not in the manifest"),
        ([("head", torch.zeros(3))], r"head is torch\.float32\[3\], its manifest entry torch\.bfloat16\[3\]"),
        ([("head", weights["head"]), ("head", weights["head"])], "head was sent twice"),
    ]:
        with pytest.raises(WeightSyncError, match=words):
            half.stage(wrong, version="0.1", fingerprint=False)


def test_a_segment_that_is_absent_or_too_small_is_an_error(shm, tmp_path):
    half, _ = shm
    info = engine_info(half.init_info(1))
    with pytest.raises(WeightSyncError, match="share /dev/shm"):
        HostShmEngine().connect({**info, "path": str(tmp_path / "absent")})
    (tmp_path / "small").write_bytes(b"x")
    with pytest.raises(WeightSyncError, match="has 1 bytes"):
        HostShmEngine().connect({**info, "path": str(tmp_path / "small")})


def test_a_sweep_removes_only_own_segments_of_dead_processes(tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", "pass"])
    dead.wait()
    ours, living, other_run = f"vime-my-run-{dead.pid}-w", f"vime-my-run-{os.getpid()}-w", f"vime-other-{dead.pid}-w"
    for name in (ours, living, other_run, "psm_12345", "vime-my-run-notes"):
        (tmp_path / name).write_bytes(b"")
    sweep = sweep_segments("vime-my-run-", tmp_path)
    assert (sweep.removed, sweep.alive) == ((ours,), (living,))
    assert set(sweep.foreign) == {other_run, "psm_12345", "vime-my-run-notes"}
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([living, other_run, "psm_12345", "vime-my-run-notes"])


def test_disk_files_appear_whole_and_old_versions_go(tmp_path):
    weights = make_weights(0)
    ranks = [DiskTrainer(run_id="unit", manifest=manifest_of(weights), rank=r, directory=tmp_path) for r in (0, 1)]
    engine = DiskEngine()
    engine.connect(engine_info(ranks[0].init_info(1)))
    for version in range(4):
        weights = make_weights(version)
        items = list(weights.items())
        parts = [
            rank.stage(part, version=f"0.{version}", fingerprint=False)
            for rank, part in zip(ranks, (items[:5], items[5:]), strict=True)
        ]
        assert_same(engine.receive({"files": parts[0]["files"] | parts[1]["files"]}), weights)
    root = tmp_path / "vime-unit-weights"
    assert sorted(p.name for p in root.iterdir()) == ["v0.2", "v0.3"]
    assert not [p for p in root.rglob("*") if p.suffix == ".part"]
    with pytest.raises(WeightSyncError, match="no file holds tensor head"):
        list(engine.receive({"files": {k: v for k, v in (parts[0]["files"] | parts[1]["files"]).items() if k != "head"}}))
    ranks[0].close()
    assert not root.exists()


def test_a_torn_file_on_disk_names_the_tensor(tmp_path):
    weights = {"a": torch.zeros(4)}
    half = DiskTrainer(run_id="unit", manifest=manifest_of(weights), directory=tmp_path)
    staged = half.stage(weights.items(), version="0.1", fingerprint=False)
    engine = DiskEngine()
    engine.connect(engine_info(half.init_info(1)))
    with open(staged["files"]["a"], "r+b") as file:
        file.truncate(10)
    with pytest.raises(WeightSyncError, match="cannot read tensor a"):
        list(engine.receive(staged))


@pytest.mark.parametrize("bucket_bytes", [1, 200, 1 << 20])
def test_a_broadcast_reaches_every_worker_in_buckets(bucket_bytes):
    weights = make_weights(0)
    half = CollectiveTrainer(manifest=manifest_of(weights), bucket_bytes=bucket_bytes, timeout_s=20)
    silent = CollectiveTrainer(manifest=manifest_of(weights), rank=1)
    offer = half.init_info(2)
    results: dict[int, list] = {0: [], 1: []}

    def work(worker: int) -> None:
        engine = CollectiveEngine()
        engine.connect(engine_info(offer, rank_offset=worker))
        results[worker] = [dict(engine.receive({})) for _ in range(2)]
        engine.close()

    threads = [threading.Thread(target=work, args=(n,)) for n in results]
    for thread in threads:
        thread.start()
    half.connect()
    sent = [make_weights(seed) for seed in (1, 2)]
    for update in sent:
        assert silent.stage(iter(()), version="0.1", fingerprint=True) == {"version": "0.1", "tensors": 0}
        silent.stream(iter(()))
        staged = half.stage(update.items(), version="0.1", fingerprint=True)
        assert staged["digests"] == {name: digest(tensor) for name, tensor in update.items()}
        half.stream(update.items())
    for thread in threads:
        thread.join(20)
    for received in results.values():
        for got, update in zip(received, sent, strict=True):
            assert_same(got.items(), update)
    half.close()


def test_a_worker_that_gives_up_does_not_hold_the_trainer_and_the_next_update_arrives():
    weights = make_weights(0)
    half = CollectiveTrainer(manifest=manifest_of(weights), bucket_bytes=200, timeout_s=20)
    offer = half.init_info(1)
    received = []

    def work() -> None:
        engine = CollectiveEngine()
        engine.connect(engine_info(offer))
        stream = engine.receive({})
        next(stream)
        stream.close()
        received.append(dict(engine.receive({})))

    thread = threading.Thread(target=work)
    thread.start()
    half.connect()
    for seed in (1, 2):
        half.stream(make_weights(seed).items())
    thread.join(20)
    assert_same(received[0].items(), make_weights(2))
    half.close()


def served_by(half, send):
    """What one worker that joins now receives while `send()` runs, or the error it gets."""
    offer = half.init_info(1)
    received = {}

    def work() -> None:
        engine = CollectiveEngine()
        engine.connect(engine_info(offer))
        try:
            received.update(engine.receive({}))
        except WeightSyncError as error:
            received["error"] = str(error)

    thread = threading.Thread(target=work)
    thread.start()
    half.connect()
    try:
        send()
    finally:
        thread.join(20)
    return received


def test_an_engine_that_joins_later_gets_what_was_kept():
    weights = make_weights(0)
    half = CollectiveTrainer(manifest=manifest_of(weights), bucket_bytes=200, timeout_s=20)
    assert_same(served_by(half, lambda: half.stream(weights.items())).items(), weights)
    half.keep(weights.items())
    for tensor in weights.values():
        tensor.zero_()
    assert_same(served_by(half, lambda: half.stream(())).items(), make_weights(0))
    half.close()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda w: dict(reversed(w.items())), "tensor head came where layers.0.q_proj.weight was due"),
        (lambda w: {k: v for k, v in w.items() if k != "head"}, "tensor head was due and did not come"),
        (lambda w: {**w, "more": torch.zeros(1)}, "tensor more came where nothing was due"),
    ],
)
def test_what_does_not_follow_the_manifest_ends_a_broadcast_and_frees_the_workers(change, words):
    half = CollectiveTrainer(manifest=manifest_of(make_weights(0)), bucket_bytes=200, timeout_s=20)
    unread = iter(change(make_weights(1)).items())
    began = time.monotonic()
    with pytest.raises(WeightSyncError, match=words):
        served_by(half, lambda: half.stream(unread))
    assert time.monotonic() - began < 10, "the worker did not wait for its own deadline"
    assert list(unread) == [], "for other ranks the rest is a collective, which has to end"
    with pytest.raises(WeightSyncError, match="stream before connect"):
        half.stream(make_weights(1).items())
    half.close()


def test_workers_that_do_not_come_are_named_at_the_deadline():
    half = CollectiveTrainer(manifest=manifest_of({"a": torch.zeros(1)}), timeout_s=0.3)
    half.init_info(2)
    with pytest.raises(DeadlineError, match=r"ranks \[1, 2\] of 1\.\.2 did not connect within 0\.3 s"):
        half.connect()
    half.close()
