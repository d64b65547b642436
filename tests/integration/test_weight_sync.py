"""Publishing to real vLLM engines on the host: a tied model on one worker, an untied one on two tensor-parallel workers."""

import asyncio
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import pytest
import torch
from engine_env import ENV

from vime.errors import DeadlineError, ProbeError, WeightSyncError
from vime.facts.process import Factory, Parallel
from vime.platforms.cpu.engine import ARGS
from vime.rollout.engine import ENGINE_NEEDS, EngineServer, EngineSpec
from vime.testing.reference_trainer import ReferenceTrainer
from vime.testing.tiny_models import make_tiny_qwen3
from vime.types import PolicyVersion
from vime.weights.control import EngineControl, Identity
from vime.weights.hosts import ANYWHERE
from vime.weights.probe import probe_ids
from vime.weights.protocol import ProbeSettings, Publisher
from vime.weights.transports.base import TransferContext
from vime.weights.transports.collective import CollectiveTrainer
from vime.weights.transports.device_ipc import DeviceIpcTrainer
from vime.weights.transports.disk import DiskTrainer
from vime.weights.transports.host_shm import HostShmTrainer

pytestmark = pytest.mark.timeout(180)
VOCAB = 320
TOKEN = "weight-sync-tests"


@dataclass
class Served:
    """A running engine and the folder it was started from."""

    server: EngineServer
    model_path: Path
    refusals: dict[str, str] = field(default_factory=dict)

    def control(self, timeout_s: float = 60.0, cls: type[EngineControl] = EngineControl) -> EngineControl:
        return cls(self.server.url, api_key="key", run_token=TOKEN, timeout_s=timeout_s, name=self.server.spec.name)


async def offer_wrong_manifests(served: Served) -> None:
    """What a fresh engine says to manifests that do not fit its model, and whether it still serves afterwards."""
    trainer = ReferenceTrainer(served.model_path, shm)
    async with served.control() as control:
        await control.open("start")
        offer = (await trainer.init_info({ANYWHERE: 1}))[ANYWHERE]
        rows = offer["manifest"]
        wrong = {
            "prefix": [["module." + row[0], *row[1:]] for row in rows],
            "extra": [*rows, ["mtp.lm_head.weight", *rows[0][1:]]],
            "missing": [row for row in rows if "layers.1.self_attn.v_proj" not in row[0]],
            "shape": [[*row[:2], [7], *row[3:]] if row[0] == "model.norm.weight" else row for row in rows],
        }
        for kind, manifest in wrong.items():
            with pytest.raises(WeightSyncError) as caught:
                await control.init({**offer, "manifest": manifest})
            served.refusals[kind] = str(caught.value)
    status, _ = await generate(served)
    served.refusals["status"] = f"{status} {(await identity_of(served)).version}"
    trainer.close()


async def identity_of(served: Served) -> Identity:
    async with served.control() as control:
        return await control.identity()


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Served]]:
    folder = tmp_path_factory.mktemp("engines")
    served = {}
    for name, tied, tp in (("tied", True, 1), ("untied-tp2", False, 2)):
        path = make_tiny_qwen3(folder / name, tied=tied, vocab_size=VOCAB, layers=3)
        spec = EngineSpec(
            model_path=path,
            dtype="float32",
            log_path=folder / f"{name}.log",
            run_token=TOKEN,
            max_model_len=256,
            parallel=Parallel(tp=tp),
            args={**ARGS, **ENGINE_NEEDS, "worker_extension_cls": "vime.testing.reference_trainer.SpoilingWorker"},
            env=ENV,
            entry_points=("vime", "vime_cpu"),
            api_key="key",
            name=name,
            halves={"device_ipc": Factory("vime.weights.transports.device_ipc:DeviceIpcEngine")},
        )
        served[name] = Served(EngineServer(spec), path)
    try:
        for engine in served.values():
            engine.server.start()
        for engine in served.values():
            asyncio.run(engine.server.wait_ready(120))
            asyncio.run(offer_wrong_manifests(engine))
        yield served
    finally:
        for engine in served.values():
            engine.server.stop()


class Bench:
    """One trainer and one engine under test."""

    def __init__(self, served: Served, half_for, *, in_place: bool = True, control: EngineControl | None = None) -> None:
        self.served = served
        self.trainer = ReferenceTrainer(served.model_path, half_for)
        self.control = control or served.control()
        self.publisher = Publisher(
            self.trainer, probe=ProbeSettings(ids=probe_ids(VOCAB)), engine_options={"in_place": in_place}
        )
        self.publisher.set_engines([self.control])
        self.step = 0

    async def publish(self, **checks):
        self.step += 1
        self.trainer.perturb()
        return await self.publisher.publish(PolicyVersion(0, self.step), **checks)

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        await self.publisher.close()
        self.trainer.close()


def shm(manifest):
    return HostShmTrainer(run_id="sync-tests", manifest=manifest)


def collective(manifest):
    return CollectiveTrainer(manifest=manifest, bucket_bytes=20_000, timeout_s=60)


def device_ipc(manifest):
    """Over memory of the host, which is what every process of a node can open."""
    context = TransferContext("sync-tests", manifest, 0, "127.0.0.1", Path("/dev/shm"), 20_000, 60.0, lead={})
    return DeviceIpcTrainer.from_context(context, exporter="vime.weights.transports.exporters:HostExporter")


async def generate(served: Served, timeout_s: float = 30.0):
    """(status, version stamps) of an ordinary request."""
    body = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 2, "temperature": 0, "ignore_eos": True}}
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    async with (
        aiohttp.ClientSession(trust_env=False, headers={"Authorization": "Bearer key"}, timeout=timeout) as session,
        session.post(served.server.url + "/inference/v1/generate", json=body) as response,
    ):
        answer = await response.json()
        return response.status, [v["version"] for c in answer.get("choices", []) for v in c["weight_versions"]]


async def assert_held(served: Served) -> None:
    """Paused, gate shut, and an ordinary request waits instead of being answered."""
    async with served.control() as control:
        assert (await control.identity()).gate == "shut"
        assert await control.is_paused()
    with pytest.raises(TimeoutError):
        await generate(served, timeout_s=0.3)


@pytest.mark.parametrize("in_place", [True, False], ids=["in_place", "layerwise"])
@pytest.mark.parametrize("transport", ["host_shm", "collective", "device_ipc", "disk"])
@pytest.mark.parametrize("model", ["tied", "untied-tp2"])
async def test_published_weights_give_the_trainers_log_probs(engines, tmp_path, model, transport, in_place):
    halves = {
        "host_shm": shm,
        "collective": collective,
        "device_ipc": device_ipc,
        "disk": lambda m: DiskTrainer(run_id="t", manifest=m, directory=tmp_path),
    }
    async with Bench(engines[model], halves[transport], in_place=in_place) as bench:
        for _ in range(2):
            report = await bench.publish(fingerprint=True, probe=True)
            assert report.probe_mean < 1e-5
            assert report.nbytes == sum(4 * p.numel() for p in bench.trainer.weights.values())
        told = await bench.control._call("POST", "/collective_rpc", {"method": "loads_in_place"})
        assert set(told["results"]) == {str(in_place)}, "this model is one that can be written in place"
        assert await generate(engines[model]) == (200, ["0.2"])


@pytest.mark.parametrize("transport", ["host_shm", "collective"])
@pytest.mark.parametrize("model", ["tied", "untied-tp2"])
async def test_a_tensor_altered_on_its_way_is_named_and_nothing_is_served(engines, model, transport):
    served = engines[model]
    async with Bench(served, {"host_shm": shm, "collective": collective}[transport]) as bench:
        await bench.publish()
        spec = next(t for t in bench.trainer.manifest.tensors if t.name == "model.layers.1.mlp.down_proj.weight")

        def tamper() -> None:
            """The segment, or where nothing is staged the tensor itself, which is then sent otherwise than its digest says."""
            if transport == "host_shm":
                bench.trainer.half._image.buffer[spec.offset + 5] ^= 1
            else:
                bench.trainer.weights[spec.name].data.view(torch.int32)[0, 0] ^= 1

        bench.trainer.after_stage = tamper
        with pytest.raises(
            WeightSyncError, match=rf"{model}: /vime/update .*model\.layers\.1\.mlp\.down_proj\.weight was altered"
        ):
            await bench.publish(fingerprint=True)
        await assert_held(served)
        bench.trainer.after_stage = None
        assert (await bench.publish(fingerprint=True, probe=True)).probe_mean < 1e-5
        assert await generate(served) == (200, ["0.3"])


@pytest.mark.parametrize("in_place", [True, False], ids=["in_place", "layerwise"])
@pytest.mark.parametrize("model", ["tied", "untied-tp2"])
async def test_after_an_update_that_fails_in_the_middle_the_next_full_one_works(engines, tmp_path, model, in_place):
    served = engines[model]
    half = lambda m: DiskTrainer(run_id="torn", manifest=m, directory=tmp_path)  # noqa: E731
    async with Bench(served, half, in_place=in_place) as bench:
        await bench.publish()
        whole = bench.trainer.half.stage

        def without_one(weights, **kwargs):
            staged = dict(whole(weights, **kwargs))
            staged["files"] = {n: f for n, f in staged["files"].items() if n != "model.layers.1.self_attn.k_proj.weight"}
            return staged

        bench.trainer.half.stage = without_one
        with pytest.raises(WeightSyncError, match=r"no file holds tensor model\.layers\.1\.self_attn\.k_proj\.weight"):
            await bench.publish()
        await assert_held(served)
        assert bench.publisher.version is None
        bench.trainer.half.stage = whole
        assert (await bench.publish(probe=True)).probe_mean < 1e-5


class SpoilingControl(EngineControl):
    """Spoils a parameter of the engine right after its update."""

    async def update(self, update_info, *, version):
        seconds = await super().update(update_info, version=version)
        await self._call("POST", "/collective_rpc", {"method": "spoil", "args": ["model.norm.weight"]})
        return seconds


async def test_a_tensor_altered_after_loading_is_stopped_by_the_probe(engines):
    served = engines["tied"]
    async with Bench(served, shm, control=served.control(cls=SpoilingControl)) as bench:
        with pytest.raises(ProbeError, match=r"tied: log-probs after the update differ"):
            await bench.publish(fingerprint=True, probe=True)
        await assert_held(served)
    async with Bench(served, shm) as bench:
        assert (await bench.publish(probe=True)).probe_mean < 1e-5


@pytest.mark.parametrize("model", ["tied", "untied-tp2"])
async def test_tensors_that_the_model_lacks_are_refused_before_anything_is_touched(engines, model):
    refusals = engines[model].refusals
    assert re.search(r"cannot take (\d+) of \1 tensors: module\.", refusals["prefix"])
    assert "mtp.lm_head.weight" in refusals["extra"]
    assert "qkv_proj.weight has only" in refusals["missing"]
    assert "model.norm.weight" in refusals["shape"]
    assert refusals["status"] == "200 start"


async def test_a_later_offer_must_bring_the_same_tensors_and_a_known_transport(engines):
    served = engines["tied"]
    async with Bench(served, shm) as bench:
        await bench.publish()
        offer = (await bench.trainer.init_info({ANYWHERE: 1}))[ANYWHERE]
        with pytest.raises(WeightSyncError, match=r"missing: model\.norm\.weight"):
            await bench.control.init({**offer, "manifest": [r for r in offer["manifest"] if r[0] != "model.norm.weight"]})
        with pytest.raises(WeightSyncError, match=r"no half for transport pigeon; it knows .*host_shm"):
            await bench.control.init({**offer, "protocol": "pigeon"})
        assert await generate(served) == (200, ["0.1"])
        assert (await bench.publish(probe=True)).probe_mean < 1e-5


async def test_an_engine_that_has_stopped_is_named_at_the_deadline_and_recovers(engines):
    served = engines["tied"]
    group = served.server.group
    async with Bench(served, shm, control=served.control(timeout_s=1.5)) as bench:
        await bench.publish()
        bench.trainer.after_stage = lambda: os.killpg(group, signal.SIGSTOP)
        begin = time.monotonic()
        try:
            with pytest.raises(DeadlineError, match=r"tied: no answer to .* within 1\.5 s"):
                await bench.publish()
            assert time.monotonic() - begin < 4
        finally:
            os.killpg(group, signal.SIGCONT)
        bench.trainer.after_stage = None
        assert bench.publisher.version is None
    async with Bench(served, shm) as bench:
        assert (await bench.publish(probe=True)).probe_mean < 1e-5


async def test_requests_wait_at_the_gate_and_are_answered_by_the_new_version(engines):
    served = engines["tied"]
    async with Bench(served, shm) as bench:
        await bench.publish()
        bench.publisher.prepare()
        await asyncio.sleep(0.1)
        waiting = [asyncio.create_task(generate(served)) for _ in range(3)]
        await asyncio.sleep(0.1)
        assert not any(task.done() for task in waiting)
        await bench.publish()
        assert await asyncio.gather(*waiting) == [(200, ["0.2"])] * 3


@pytest.mark.parametrize("half", [shm, collective, device_ipc])
async def test_a_restarted_engines_admission_brings_the_last_published_weights(engines, half):
    """Although the trainer's are newer by then: the probe compares with the log-probs of the published ones."""
    served = engines["untied-tp2"]
    async with Bench(served, half) as bench:
        await bench.publish(fingerprint=True, probe=True)
        bench.trainer.perturb()
        await bench.control.shut()
        again = served.control()
        await bench.publisher.admit(again)
        assert await generate(served) == (200, ["0.1"])
        await bench.control.close()


@pytest.mark.parametrize("half", [collective, device_ipc])
async def test_an_engine_that_restarts_while_its_copy_is_being_made_waits_for_it(engines, half):
    served = engines["tied"]
    async with Bench(served, half) as bench:
        begun, go_on = threading.Event(), threading.Event()

        def slowly() -> None:
            begun.set()
            assert go_on.wait(30)

        bench.trainer.before_keep = slowly
        await bench.publish(fingerprint=True, probe=True)
        assert await generate(served) == (200, ["0.1"]), "the gate is open before the copy is whole"
        await asyncio.to_thread(begun.wait, 30)
        await bench.control.shut()
        again = served.control()
        admission = asyncio.create_task(bench.publisher.admit(again))
        step = asyncio.create_task(asyncio.to_thread(bench.trainer.perturb))
        await asyncio.sleep(0.2)
        assert not admission.done()
        assert not step.done(), "the rank copies first and steps then"
        go_on.set()
        await asyncio.gather(admission, step)
        assert await generate(served) == (200, ["0.1"])
        await bench.control.close()


async def test_a_copy_that_could_not_be_made_surfaces_at_the_next_publish(engines):
    served = engines["tied"]
    async with Bench(served, collective) as bench:

        def fail() -> None:
            raise WeightSyncError("no memory of the host is left")

        bench.trainer.before_keep = fail
        await bench.publish()
        assert await generate(served) == (200, ["0.1"])
        bench.trainer.before_keep = None
        with pytest.raises(WeightSyncError, match="no memory of the host is left"):
            await bench.publish()
        assert await generate(served) == (200, ["0.1"]), "the engine goes on serving what it has"
        assert (await bench.publish(probe=True)).probe_mean < 1e-5


async def test_temperature_one_prompt_log_probs_equal_a_log_softmax_for_every_token(engines):
    served = engines["tied"]
    async with Bench(served, shm) as bench:
        await bench.publish()
        ids = probe_ids(VOCAB, seed=9, sequences=3, length=40)
        measured, expected = await bench.control.probe(ids), await bench.trainer.probe_log_probs(ids)
        difference = (torch.tensor(measured) - torch.tensor(expected)).abs()
        assert difference.shape == (3, 39)
        assert difference.mean() < 1e-5
        assert difference.max() < 2e-4
