"""The two ends of device_ipc in processes of their own; run by path, with PIPE and ROLE among the globals."""

import os
import time
from pathlib import Path

import torch

from vime.errors import VimeError
from vime.weights.fingerprint import check_digest
from vime.weights.manifest import build_manifest
from vime.weights.transports.base import TransferContext
from vime.weights.transports.device_ipc import DeviceIpcEngine, DeviceIpcTrainer

EXPORTER = "vime.weights.transports.device_ipc:HostExporter"


def make_weights(seed):
    """Fused groups, a tensor of 16-bit words with an odd size, a large one and an empty one."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {f"layers.{i}.{part}_proj.weight": (7, 5) for i in range(3) for part in ("q", "k", "v", "o")}
    shapes |= {"embed": (60, 11), "empty": (0, 4), "norm": (33,)}
    weights = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return weights | {"head": torch.randn(3, generator=generator).bfloat16()}


def manifest_of(weights):
    return build_manifest((name, str(t.dtype).removeprefix("torch."), t.shape) for name, t in weights.items())


def make_trainer(directory, *, bucket_bytes=200, timeout_s=20.0, rank=0, **options):
    manifest = manifest_of(make_weights(0))
    run_id = Path(directory).name
    context = TransferContext(run_id, manifest, rank, "127.0.0.1", Path(directory), bucket_bytes, timeout_s, lead={})
    return DeviceIpcTrainer.from_context(context, exporter=EXPORTER, directory=directory, **options)


def engine_info(offer, worker=0):
    return {**offer["info"], "manifest": offer["manifest"], "rank_offset": 0, "worker_rank": worker}


def receive(engine, staged, *, pause_s=0.0, stop_after=None, die_after=None):
    """[(name, values)] in the order of arrival, or the error's text."""
    arrived = []
    stream = engine.receive(staged)
    try:
        for name, tensor in stream:
            if "digests" in staged:
                check_digest(staged["digests"], name, tensor)
            arrived.append((name, tensor.tolist()))
            if len(arrived) == die_after:
                os._exit(3)
            if len(arrived) == stop_after:
                break
            time.sleep(pause_s)
    except VimeError as error:
        return str(error)
    finally:
        stream.close()
    return arrived


def serve_engine(pipe):
    """Commands from the test; a live worker answers each."""
    engine = DeviceIpcEngine()
    while True:
        match pipe.recv():
            case "be on", identity:
                engine = DeviceIpcEngine(identity=identity)
                pipe.send(f"on {identity}")
            case "connect", info:
                engine.connect(info)
                pipe.send("connected")
            case "receive", staged, options:
                pipe.send(receive(engine, staged, **options))
            case "close":
                engine.close()
                pipe.send("closed")
            case "exit":
                return


def trainer_that_dies(pipe):
    """Streams until a few tensors have been read from it, then ends without a word."""
    half = make_trainer(pipe.recv())
    pipe.send(half.init_info(1))
    half.connect()
    half.stage(make_weights(1).items(), version="0.1", fingerprint=False)

    def weights():
        for count, item in enumerate(make_weights(1).items()):
            if count == 6:
                os._exit(3)
            yield item

    half.stream(weights())


if __name__ == "role":
    {"engine": serve_engine, "trainer": trainer_that_dies}[globals()["ROLE"]](globals()["PIPE"])
