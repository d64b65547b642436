"""A publication that loses weights, or does nothing, fails the benchmark; ratios by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from vime.benchmarks import moves, sync
from vime.errors import ProbeError, WeightSyncError
from vime.weights.manifest import unpack_manifest
from vime.weights.transports.base import TransferContext
from vime.weights.transports.device_ipc import DeviceIpcEngine, DeviceIpcTrainer

SIZES: moves.Sizes = (("a.weight", (40, 3)), ("b.weight", (25, 5)))
WHERE = moves.Where("cpu", "float32")


class Engine:
    """Stands for an `EngineControl`: receives by the real half; its log-probs follow the tensors that it took over."""

    name = "engine 0"
    held_bytes: Mapping[str, int] = {}

    def __init__(self, takes: Sequence[str]) -> None:
        self.takes, self.weights = takes, WHERE.drawn(SIZES, 9)
        self.half = DeviceIpcEngine()

    async def world_size(self) -> int:
        return 1

    async def init(self, info: Mapping[str, Any]) -> None:
        inner = {**info["info"], "manifest": unpack_manifest(info["manifest"]), "rank_offset": 0, "worker_rank": 0}
        await asyncio.to_thread(self.half.connect, inner)

    async def shut(self, pause: str | None = "drain") -> None: ...

    async def open(self, version: str, *, resume: bool = False) -> None: ...

    async def resume(self) -> None: ...

    async def close(self) -> None:
        self.half.close()

    async def update(self, info: Mapping[str, Any], *, version: str) -> Mapping[str, float]:
        arrived = await asyncio.to_thread(lambda: [(n, t.clone()) for n, t in self.half.receive(info["staged"])])
        self.weights |= {name: tensor for name, tensor in arrived if name in self.takes}
        return {"update": 0.5}

    async def probe(self, sequences: Any) -> list[list[float]]:
        return [[float(tensor.double().sum()) for tensor in self.weights.values()]]


def series(engine: Engine, folder: Path) -> tuple[sync.Series, sync.LocalTrainer]:
    from vime.weights.protocol import ProbeSettings, Publisher

    manifest = moves.manifest_of(SIZES, "float32")
    context = TransferContext("bench", manifest, 0, "127.0.0.1", folder, 1 << 20, 20.0, lead={})
    trainer = sync.LocalTrainer(DeviceIpcTrainer.from_context(context, **sync.ON_HOST[0].options), manifest)
    publisher = Publisher(trainer, probe=ProbeSettings(((1, 2),), "float32"))
    publisher.set_engines([engine])  # pyright: ignore[reportArgumentType]
    return sync.Series(publisher, engine, trainer, [WHERE.drawn(SIZES, seed) for seed in (1, 2)], ((1, 2),)), trainer


async def test_publications_that_arrive_pass(tmp_path: Path) -> None:
    found, trainer = series(Engine(["a.weight", "b.weight"]), tmp_path)
    checked = await found.check()
    assert checked["log_prob_differences"]["one set from itself"] == 0
    row = await found.publish(fingerprint=False)
    assert row["engine_s"] == {"update": 0.5}
    assert row["keep_s"] > 0
    assert row["seconds"]["total"] == pytest.approx(sum(v for k, v in row["seconds"].items() if k != "total"))
    await found.check_last()
    await found.publisher.close()
    trainer.close()


async def test_publications_that_do_nothing_fail(tmp_path: Path) -> None:
    found, trainer = series(Engine([]), tmp_path)
    with pytest.raises(ProbeError, match="do not follow"):
        await found.check()
    trainer.close()


async def test_an_engine_that_stops_following_fails_at_the_end(tmp_path: Path) -> None:
    engine = Engine(["a.weight", "b.weight"])
    found, trainer = series(engine, tmp_path)
    await found.check()
    engine.takes = []
    await found.publish(fingerprint=False)
    with pytest.raises(ProbeError):
        await found.check_last()
    await found.publisher.close()
    trainer.close()


async def test_no_log_probs_come_from_a_trainer_that_is_none(tmp_path: Path) -> None:
    _, trainer = series(Engine([]), tmp_path)
    with pytest.raises(WeightSyncError, match="without a probe"):
        await trainer.probe_log_probs([[1]])
    trainer.close()


def test_ratios_and_report_by_hand() -> None:
    row = {"seconds": {"hold": 1.0, "update": 2.0, "total": 3.0}, "engine_s": {"update": 1.5}, "keep_s": 0.25}
    parts = {
        "copies": {"ok": True, "on_device_s": 0.5, "from_host_s": 4.0, "to_host_s": 4.0}
        | {f"{n}_bytes_per_s": 1e9 for n in ("on_device", "to_host", "from_host")},
        "publications": {"ok": True, "bytes": 2e9, "transport": "t", "medians": {"plain": row, "fingerprint": row}}
        | {"rates": sync.rates(int(2e9), row["seconds"])},
        "stream from tensors": {"ok": True, "stream_s": 1.0, "stream_bytes_per_s": 2e9},
        "stream from host": {"ok": True, "stream_s": 6.0, "stream_bytes_per_s": 2e9},
    }
    found = sync.ratios(parts)
    assert found["publication / copy on device"] == 6.0
    assert found["the engine's update / copy on device"] == 3.0
    assert found["stream between processes / copy on device"] == 2.0
    assert found["stream from the host's copy / copy from host"] == 1.5
    last = sync.report({**parts, "ratios": {"ok": True, **found}}).splitlines()[-1]
    assert last.split() == ["publication", "/", "copy", "on", "device", "6", "of", "the", "floor's", "time"]
    assert "1 GB/s" in " ".join(sync.report(parts).split())
    failed = sync.report({"publications": {"ok": False, "error": "it broke"}})
    assert "publications failed: it broke" in failed


def test_two_devices_have_floors_of_their_own() -> None:
    row = {"seconds": {"hold": 1.0, "update": 2.0, "total": 3.0}, "engine_s": {"update": 1.5}, "keep_s": 0.25}
    stream = {"ok": True, "stream_s": 1.0, "stream_bytes_per_s": 2e9}
    copies = {"ok": True, "on_device_s": 0.5, "from_host_s": 4.0, "to_host_s": 4.0}
    parts = {
        "copies": copies,
        "publications": {"ok": True, "bytes": 2e9, "medians": {"plain": row, "fingerprint": row}},
        "copy between": {"ok": True, "bytes_per_s": 4e9},
        "broadcast": {"ok": True, "bytes_per_s": 2e9},
        "stream from tensors": stream,
        "stream from host": stream,
    }
    found = sync.ratios(parts)
    assert found["update / copy between devices"] == 4.0
    assert found["publication / copy between devices"] == 6.0
    assert found["update / broadcast between processes"] == 2.0
    assert list(found)[-1] == "publication / broadcast between processes"
    assert sync.rates(int(2e9), row["seconds"]) == {"update_gb_per_s": 1.0, "publication_gb_per_s": pytest.approx(2 / 3)}


def test_medians_by_phase() -> None:
    rows = [{"seconds": {"a": v, "b": 1.0}, "engine_s": {"u": v}, "keep_s": v} for v in (1.0, 5.0, 2.0)]
    assert sync.summary(rows) == {"seconds": {"a": 2.0, "b": 1.0}, "engine_s": {"u": 2.0}, "keep_s": 2.0}
