"""Weights by device_ipc between two processes on one device, and a trainer's parking, beside plain copies of the same bytes.

A child process stands for the engine: it copies what arrives into tensors of its own, as a model's loader does, then draws
the expected values from the same seed and compares every bit. Figures count only inside one run of this script.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from vime.benchmarks.record import Record, arguments

EXPORTERS = {"cpu": "vime.weights.transports.exporters:HostExporter", "cuda": "vime_cuda.device_export:CudaExporter"}
MEMORIES = {"cpu": "vime.memory.storages:StorageMemory", "cuda": "vime_cuda.device_memory:DeviceMemory"}
MARK = "ipc:"
REPEATS = 4
WAIT_S = 120.0


def drawn(names: list[str], numel: int, *, device: str, seed: int) -> Iterator[tuple[str, Any]]:
    """Random bf16 tensors; the same seed gives the same bits on the same device."""
    import torch

    generator = torch.Generator(device).manual_seed(seed)
    for name in names:
        yield name, torch.randn(numel, generator=generator, device=device, dtype=torch.float32).bfloat16()


def device_of(platform: str) -> tuple[str, Callable[[], None]]:
    """torch's name of the device, and how to wait for it."""
    import torch

    if platform == "cpu":
        return "cpu", lambda: None
    module = torch.get_device_module(platform)
    module.set_device(0)
    return platform, module.synchronize


def timed(work: Callable[[], Any], synchronize: Callable[[], None]) -> float:
    synchronize()
    began = time.perf_counter()
    work()
    synchronize()
    return time.perf_counter() - began


# ---- the engine's end, in a process of its own


def engine(platform: str, count: int, numel: int) -> None:
    """Answers `connect`, `receive` and `check` on stdin with marked lines."""
    import torch

    from vime.weights.transports.device_ipc import DeviceIpcEngine

    device, synchronize = device_of(platform)
    names = [f"tensor{i:03}" for i in range(count)]
    own = {name: torch.zeros(numel, dtype=torch.bfloat16, device=device) for name in names}
    half = DeviceIpcEngine()

    def load(staged: Mapping[str, Any]) -> None:
        for name, tensor in half.receive(staged):
            own[name].copy_(tensor)

    for line in sys.stdin:
        message = json.loads(line)
        match message["action"]:
            case "connect":
                half.connect(message["info"])
                answer: dict[str, Any] = {}
            case "receive":
                answer = {"seconds": timed(lambda staged=message["staged"]: load(staged), synchronize)}
            case "check":
                expected = drawn(names, numel, device=device, seed=message["seed"])
                answer = {
                    "different": [n for n, t in expected if not torch.equal(own[n].view(torch.int16), t.view(torch.int16))]
                }
            case _:
                half.close()
                return
        print(MARK + json.dumps(answer), flush=True)


class Peer:
    """The engine's process."""

    def __init__(self, platform: str, count: int, numel: int) -> None:
        words = [sys.executable, __file__, "--engine", f"{platform},{count},{numel}"]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def tell(self, action: str, **words: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"action": action, **words}) + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(MARK):
                return json.loads(line.removeprefix(MARK))
        raise RuntimeError(f"the engine's process ended with {self._process.wait(10)}")

    def ask(self, action: str, **words: Any) -> dict[str, Any]:
        self.tell(action, **words)
        return self.answer()

    def close(self) -> None:
        if self._process.poll() is None:
            self.tell("close")
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                self._process.kill()


# ---- the trainer's end


def transfer(platform: str, count: int, numel: int, *, from_host: bool) -> dict[str, Any]:
    """Stage and stream new weights a few times; every arrival is compared bit by bit."""
    from vime.weights.manifest import build_manifest
    from vime.weights.transports.base import TransferContext
    from vime.weights.transports.device_ipc import DeviceIpcTrainer

    device, synchronize = device_of(platform)
    names = [f"tensor{i:03}" for i in range(count)]
    manifest = build_manifest((name, "bfloat16", (numel,)) for name in names)
    folder = Path(tempfile.mkdtemp(prefix="vime-ipc-"))
    context = TransferContext(f"ipc{os.getpid()}", manifest, 0, "127.0.0.1", folder, 256 << 20, WAIT_S, lead={})
    half = DeviceIpcTrainer.from_context(context, exporter=EXPORTERS[platform])
    peer = Peer(platform, count, numel)
    rows = []
    try:
        offer = half.init_info(1)
        peer.tell("connect", info={**offer["info"], "manifest": offer["manifest"], "rank_offset": 0, "worker_rank": 0})
        half.connect()
        peer.answer()
        for seed in range(1, REPEATS + 1):
            weights = dict(drawn(names, numel, device=device, seed=seed))
            staged: dict[str, Any] = {}
            stage_s = timed(
                lambda w=weights, s=staged, v=seed: s.update(half.stage(w.items(), version=f"0.{v}", fingerprint=False)),
                synchronize,
            )
            peer.tell("receive", staged=staged)
            stream_s = timed(lambda w=weights: half.stream(() if from_host else w.items()), synchronize)
            received = peer.answer()["seconds"]
            different = peer.ask("check", seed=seed)["different"]
            rows.append({"stage_s": stage_s, "stream_s": stream_s, "receive_s": received, "different": different})
    finally:
        peer.close()
        half.close()
    different = [name for row in rows for name in row["different"]]
    best = statistics.median(row["stream_s"] for row in rows[1:])
    return {
        "ok": not different,
        "bytes": manifest.nbytes,
        "tensors": count,
        "bits_equal": not different,
        "sent_from": "the host's copy" if from_host else "the tensors",
        "first": rows[0],
        "later": rows[1:],
        "stream_s": best,
        "stream_bytes_per_s": manifest.nbytes / best,
    }


def copies(platform: str, count: int, numel: int) -> dict[str, Any]:
    """A copy of as many bytes on the device, tensor by tensor, and through a page-locked host buffer both ways."""
    import torch

    device, synchronize = device_of(platform)
    source = torch.zeros(count, numel, dtype=torch.bfloat16, device=device)
    target = torch.empty_like(source)
    nbytes = source.numel() * 2

    def on_device() -> None:
        for there, here in zip(target, source, strict=True):
            there.copy_(here)

    found: dict[str, Any] = {"bytes": nbytes, "on_device_s": statistics.median(timed(on_device, synchronize) for _ in range(5))}
    found["on_device_bytes_per_s"] = nbytes / found["on_device_s"]
    flat = source.view(-1).view(torch.uint8)
    host = torch.empty(min(1 << 30, flat.numel()), dtype=torch.uint8, pin_memory=device != "cpu")

    def through_host(*, back: bool) -> None:
        for piece in flat.split(host.numel()):
            there, here = (piece, host[: piece.numel()]) if back else (host[: piece.numel()], piece)
            there.copy_(here, non_blocking=True)

    for name, back in (("to_host", False), ("from_host", True)):
        seconds = statistics.median(timed(lambda b=back: through_host(back=b), synchronize) for _ in range(3))
        found |= {f"{name}_s": seconds, f"{name}_bytes_per_s": nbytes / seconds}
    return found


def park(platform: str, count: int, numel: int) -> dict[str, Any]:
    """Park and wake the same bytes; the first park also page-locks host memory."""
    import torch

    from vime.facts.memory import Tag
    from vime.facts.process import Factory

    device, synchronize = device_of(platform)
    names = [f"tensor{i:03}" for i in range(count)]
    tensors = dict(drawn(names, numel, device=device, seed=7))
    memory = Factory(MEMORIES[platform]).build()
    memory.region(Tag.PARAMS, lambda: list(tensors.values()))
    nbytes = sum(t.numel() * t.element_size() for t in tensors.values())
    rows = []
    for _ in range(REPEATS):
        free = free_bytes(platform)
        down = timed(lambda: memory.pause([Tag.PARAMS]), synchronize)
        freed = free_bytes(platform) - free
        rows.append({"park_s": down, "wake_s": timed(lambda: memory.resume([Tag.PARAMS]), synchronize), "freed_bytes": freed})
    expected = drawn(names, numel, device=device, seed=7)
    different = [n for n, t in expected if not torch.equal(tensors[n].view(torch.int16), t.view(torch.int16))]
    park_s, wake_s = (statistics.median(row[key] for row in rows[1:]) for key in ("park_s", "wake_s"))
    return {
        "ok": not different,
        "bytes": nbytes,
        "bits_equal": not different,
        "first": rows[0],
        "later": rows[1:],
        "park_bytes_per_s": nbytes / park_s,
        "wake_bytes_per_s": nbytes / wake_s,
    }


def free_bytes(platform: str) -> int:
    """Device bytes that any process could take; 0 on a host, where nothing is given back to anybody."""
    import torch

    return 0 if platform == "cpu" else int(torch.get_device_module(platform).mem_get_info()[0])


def emptied(platform: str, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The part, with torch's cached device memory given back before it."""
    import torch

    if platform != "cpu":
        torch.get_device_module(platform).empty_cache()
    return work()


def ratios(parts: Mapping[str, Any]) -> dict[str, Any]:
    """To the plain copies of this run; above 1 is slower than the plain copy."""
    plain, found = parts["plain copies"], {}
    for name in ("stream from tensors", "stream from host"):
        if parts.get(name, {}).get("ok"):
            found[f"{name} / copy on device"] = parts[name]["stream_s"] / plain["on_device_s"]
            found[f"{name} / copy from host"] = parts[name]["stream_s"] / plain["from_host_s"]
    if parts.get("park", {}).get("ok"):
        found["park / copy to host"] = plain["to_host_bytes_per_s"] / parts["park"]["park_bytes_per_s"]
        found["wake / copy from host"] = plain["from_host_bytes_per_s"] / parts["park"]["wake_bytes_per_s"]
    return found


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--gigabytes", type=float, default=8.0, help="bytes in all, in 10^9 (8)")
    parser.add_argument("--tensors", type=int, default=400)
    parser.add_argument("--engine", metavar="PLATFORM,COUNT,NUMEL", help="be the engine's end")
    args = parser.parse_args()
    if args.engine:
        platform, count, numel = args.engine.split(",")
        engine(platform, int(count), int(numel))
        return 0
    size = (args.tensors, int(args.gigabytes * 1e9 / args.tensors / 2))
    record = Record(args.out / "ipc.json", args.platform, again=args.again)
    record.run("plain copies", lambda: emptied(args.platform, lambda: copies(args.platform, *size)))
    for name, from_host in (("stream from tensors", False), ("stream from host", True)):
        record.run(name, lambda f=from_host: emptied(args.platform, lambda: transfer(args.platform, *size, from_host=f)))
    record.run("park", lambda: emptied(args.platform, lambda: park(args.platform, *size)))
    record.parts.pop("ratios", None)
    record.run("ratios", lambda: ratios(record.parts))
    return 0 if record.ok else 1


if __name__ == "__main__":
    sys.exit(main())
