"""Bytes that move without an engine: plain copies, a trainer's parking, and weights from one process to another.

A child process stands for the engine's worker: it copies what arrives into tensors of its own, as a model's loader does, then
draws the expected values from the same seed and compares every bit. `python -m vime.benchmarks.moves ORDER` is that child.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vime.errors import EngineError
from vime.facts.process import Factory

MARK = "moved:"
BUFFER_BYTES = 256 << 20
WAIT_S = 60.0

Sizes = tuple[tuple[str, tuple[int, ...]], ...]
"""(name, shape) of every tensor."""


@dataclass(frozen=True)
class Where:
    """A device by torch's name, and the element type of what moves."""

    device: str
    dtype: str

    def ready(self) -> None:
        """Wait for all work on the device."""
        import torch

        if self.device != "cpu":
            torch.get_device_module(self.device).synchronize()

    def free_bytes(self) -> int | None:
        """What any process could take at this moment; None on a host, where memory goes back to no one in particular."""
        import torch

        return None if self.device == "cpu" else int(torch.get_device_module(self.device).mem_get_info()[0])

    def tidy(self) -> None:
        """Give torch's cached device memory back."""
        import torch

        if self.device != "cpu":
            torch.get_device_module(self.device).empty_cache()

    def timed(self, work: Callable[[], Any]) -> float:
        """Seconds until the device is done with it."""
        self.ready()
        began = time.perf_counter()
        work()
        self.ready()
        return time.perf_counter() - began

    def drawn(self, sizes: Sizes, seed: int) -> dict[str, Any]:
        """Random tensors of a model's scale; the same seed gives the same bits on the same device."""
        import torch

        generator = torch.Generator(self.device).manual_seed(seed)
        kind: torch.dtype = getattr(torch, self.dtype)
        found: dict[str, Any] = {}
        for name, shape in sizes:
            noise = torch.randn(shape, generator=generator, device=self.device, dtype=torch.float32).mul_(0.02)
            found[name] = (noise + 1 if len(shape) == 1 else noise).to(kind)
        return found


def median(values: Iterable[float]) -> float:
    return statistics.median(list(values))


def sizes_of(model: Path) -> Sizes:
    """Names and shapes of a checkpoint, from the heads of its files."""
    from safetensors import safe_open

    found: list[tuple[str, tuple[int, ...]]] = []
    for path in sorted(model.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found += [(name, tuple(file.get_slice(name).get_shape())) for name in file.keys()]  # noqa: SIM118
    return tuple(found)


def manifest_of(sizes: Sizes, dtype: str) -> Any:
    from vime.weights.manifest import build_manifest

    return build_manifest((name, dtype, shape) for name, shape in sizes)


# ---- plain copies, the floor


def copies(where: Where, sizes: Sizes) -> dict[str, Any]:
    """The same bytes copied tensor by tensor on the device, and through a page-locked host buffer both ways."""
    import torch

    source = where.drawn(sizes, 1)
    target = {name: torch.empty_like(tensor) for name, tensor in source.items()}
    nbytes = sum(tensor.numel() * tensor.element_size() for tensor in source.values())

    def on_device() -> None:
        for name, tensor in source.items():
            target[name].copy_(tensor)

    on_device()
    found: dict[str, Any] = {"bytes": nbytes, "tensors": len(sizes)}
    spans = {"on_device": median(where.timed(on_device) for _ in range(5))}
    host = torch.empty(min(1 << 30, nbytes), dtype=torch.uint8, pin_memory=where.device != "cpu")

    def through_host(*, back: bool) -> None:
        for tensor in source.values():
            for piece in tensor.view(-1).view(torch.uint8).split(host.numel()):
                there, here = (piece, host[: piece.numel()]) if back else (host[: piece.numel()], piece)
                there.copy_(here, non_blocking=True)

    for name, back in (("to_host", False), ("from_host", True)):
        through_host(back=back)
        spans[name] = median(where.timed(lambda b=back: through_host(back=b)) for _ in range(3))
    for name, seconds in spans.items():
        found |= {f"{name}_s": seconds, f"{name}_bytes_per_s": nbytes / seconds}
    return found


# ---- parking


def park(where: Where, sizes: Sizes, memory: Factory, repeats: int) -> dict[str, Any]:
    """Park and wake a trainer's parameters by the platform's backend; the first park also page-locks host memory."""
    import torch

    from vime.facts.memory import Tag

    tensors = where.drawn(sizes, 7)
    backend = memory.build()
    backend.region(Tag.PARAMS, lambda: list(tensors.values()))
    nbytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    rows = []
    for _ in range(repeats + 1):
        before = where.free_bytes()
        down = where.timed(lambda: backend.pause([Tag.PARAMS]))
        freed = None if before is None else (where.free_bytes() or 0) - before
        rows.append({"park_s": down, "wake_s": where.timed(lambda: backend.resume([Tag.PARAMS])), "freed_bytes": freed})
    expected = where.drawn(sizes, 7)
    different = [name for name, tensor in expected.items() if not torch.equal(tensors[name], tensor)]
    park_s, wake_s = (median(row[key] for row in rows[1:]) for key in ("park_s", "wake_s"))
    return {
        "ok": not different,
        **({"error": f"{len(different)} tensors came back changed: {different[:4]}"} if different else {}),
        "bytes": nbytes,
        "bits_equal": not different,
        "first": rows[0],
        "later": rows[1:],
        "park_s": park_s,
        "wake_s": wake_s,
        "park_bytes_per_s": nbytes / park_s,
        "wake_bytes_per_s": nbytes / wake_s,
    }


# ---- from process to process


def transfer(
    where: Where,
    sizes: Sizes,
    halves: tuple[Factory, Factory],
    *,
    kept: bool,
    repeats: int,
    env: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Stream new weights a few times from their tensors, or with `kept` from the host's copy; every bit is compared.

    `env` is over this process's own environment for the one that receives.
    """
    from vime.weights.transports.base import TransferContext

    manifest = manifest_of(sizes, where.dtype)
    order = {"device": where.device, "dtype": where.dtype, "sizes": sizes, "half": halves[1].target, **halves[1].options}
    with tempfile.TemporaryDirectory(prefix="vime-moves-") as folder:
        context = TransferContext(f"m{os.getpid()}", manifest, 0, "127.0.0.1", Path(folder), BUFFER_BYTES, WAIT_S, lead={})
        half = halves[0].load().from_context(context, **halves[0].options)
        peer = Peer(Path(folder), order, env)
        try:
            offer = half.init_info(1)
            peer.tell("connect", info={**offer["info"], "manifest": offer["manifest"], "rank_offset": 0, "worker_rank": 0})
            half.connect()
            peer.answer()
            rows = [_sent(where, (sizes, manifest), half, peer, seed=seed, kept=kept) for seed in range(1, repeats + 2)]
        finally:
            peer.close()
            half.close()
    different = [name for row in rows for name in row["different"]]
    stream_s = median(row["stream_s"] for row in rows[1:])
    return {
        "ok": not different,
        **({"error": f"{len(different)} tensors arrived changed: {different[:4]}"} if different else {}),
        "bytes": manifest.nbytes,
        "bits_equal": not different,
        "sent_from": "the host's copy" if kept else "the tensors",
        "first": rows[0],
        "later": rows[1:],
        "stream_s": stream_s,
        "stream_bytes_per_s": manifest.nbytes / stream_s,
    }


def _sent(where: Where, what: tuple[Sizes, Any], half: Any, peer: Peer, *, seed: int, kept: bool) -> dict[str, Any]:
    """One set of weights of its own seed."""
    sizes, manifest = what
    weights, version = where.drawn(sizes, seed), f"0.{seed}"

    def ordered() -> Iterator[tuple[str, Any]]:
        return ((spec.name, weights[spec.name]) for spec in manifest.tensors)

    staged: dict[str, Any] = {}
    stage_s = where.timed(lambda: staged.update(half.stage(ordered(), version=version, fingerprint=False)))
    keep_s = where.timed(lambda: half.keep(ordered())) if kept else 0.0
    peer.tell("receive", staged=staged)
    stream_s = where.timed(lambda: half.stream(() if kept else ordered()))
    received = peer.answer()["seconds"]
    different = peer.ask("check", seed=seed)["different"]
    return {"stage_s": stage_s, "keep_s": keep_s, "stream_s": stream_s, "receive_s": received, "different": different}


class Peer:
    """The child that receives."""

    def __init__(self, folder: Path, order: Mapping[str, Any], env: Mapping[str, str] | None = None) -> None:
        path, self._log = folder / "order.json", folder / "peer.log"
        path.write_text(json.dumps(order))
        words = [sys.executable, "-m", "vime.benchmarks.moves", str(path)]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                words, env={**os.environ, **(env or {})}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
            )

    def tell(self, action: str, **words: Any) -> None:
        assert self._process.stdin is not None
        try:
            print(json.dumps({"action": action, **words}), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise self._gone() from None

    def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(MARK):
                return json.loads(line.removeprefix(MARK))
        raise self._gone()

    def ask(self, action: str, **words: Any) -> dict[str, Any]:
        self.tell(action, **words)
        return self.answer()

    def close(self) -> None:
        """Its input ends, and so does it; killed where it does not."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
            self._process.wait(20)
        except (subprocess.TimeoutExpired, BrokenPipeError):
            self._process.kill()
            self._process.wait(10)

    def _gone(self) -> EngineError:
        code, text = self._process.wait(10), self._log.read_text(errors="replace")[-2000:]
        return EngineError(f"the receiving process ended with {code}: {text}", fix="the last line says why")


def receive(path: str) -> int:
    """The child: answers `connect`, `receive` and `check` on stdin with marked lines until stdin ends."""
    import torch

    order = json.loads(Path(path).read_text())
    where = Where(order["device"], order["dtype"])
    sizes: Sizes = tuple((name, tuple(shape)) for name, shape in order["sizes"])
    own = {name: torch.zeros_like(tensor) for name, tensor in where.drawn(sizes, 0).items()}
    half = Factory(order["half"]).build()

    def load(staged: Mapping[str, Any]) -> None:
        for name, tensor in half.receive(staged):
            own[name].copy_(tensor)

    for line in sys.stdin:
        message = json.loads(line)
        answer: dict[str, Any] = {}
        match message["action"]:
            case "connect":
                half.connect(message["info"])
            case "receive":
                answer = {"seconds": where.timed(lambda staged=message["staged"]: load(staged))}
            case _:
                expected = where.drawn(sizes, message["seed"])
                answer = {"different": [name for name, t in expected.items() if not torch.equal(own[name], t)]}
        print(MARK + json.dumps(answer), flush=True)
    half.close()
    return 0


if __name__ == "__main__":
    sys.exit(receive(sys.argv[1]))
