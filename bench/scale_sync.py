"""One publication of a model to so many engines: messages and bytes that the real publisher, links and controls send.

Ranks and engines' servers are stand-ins that answer at once; every message is counted with its size as JSON.
"""

from __future__ import annotations

import asyncio
import functools
import json
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from vime.cluster.links import TrainerLink
from vime.cluster.trainer_process import HalfInfo
from vime.types import PolicyVersion
from vime.weights.control import EngineControl
from vime.weights.manifest import build_manifest, manifest_to_json, pack_manifest
from vime.weights.probe import probe_ids
from vime.weights.protocol import ProbeSettings, Publisher
from vime.weights.transports.base import TransferContext

TP = 4
PER_NODE = 8
"""Devices of a host: ranks, or workers of engines."""
Row = dict[str, float]


class Wire:
    """Counts messages and their bytes as JSON, by what they say."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.nbytes: Counter[str] = Counter()
        self._sizes: dict[int, tuple[Any, int]] = {}

    def clear(self) -> None:
        self.calls.clear()
        self.nbytes.clear()

    def note(self, what: str, value: Any) -> None:
        self.calls[what] += 1
        self.nbytes[what] += self.size(value)

    def size(self, value: Any) -> int:
        """Bytes of the JSON text. Long lists and their holders are encoded once; they are kept, so that ids stay theirs."""
        if isinstance(value, Mapping):
            return 2 + sum(len(json.dumps(k)) + self.size(v) + 4 for k, v in value.items())
        if not isinstance(value, list | tuple) or len(value) < 64:
            return len(json.dumps(value, default=str))
        if id(value) not in self._sizes:
            self._sizes[id(value)] = value, len(json.dumps(value))
        return self._sizes[id(value)][1]


class CountedEngine(EngineControl):
    """The real control of an engine whose server answers at once."""

    def __init__(self, index: int, wire: Wire, host: str) -> None:
        super().__init__(f"http://engine-{index}:8000", name=f"rollout-{index}")
        self._wire, self._place = wire, host
        self.rings_seen = 0

    async def _call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        self._wire.note("engine " + path.partition("?")[0], body or {})
        await asyncio.sleep(0)
        if path == "/get_world_size":
            return {"world_size": TP}
        if path == "/vime/identity":
            known = {"run_token": "token", "pid": 4_000_000, "gate": "shut", "version": None, "running": 0}
            return {**known, "host": self._place}
        if path == "/vime/update":
            return {"seconds": {"update": 0.0}}
        if path == "/vime/init" and body is not None:
            self.rings_seen = len(body["info"].get("rings", ()))
        if body is not None and "token_ids" in body:
            return {"prompt_logprobs": [{str(t): {"logprob": -1.0}} for t in body["token_ids"]]}
        return {}


class _Method:
    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    async def remote(self, *words: Any) -> Any:
        await asyncio.sleep(0)
        return self._call(*words)


class CountedRank:
    """The actor of a trainer rank; its offer is a real half's, with a ring of this rank's own where every rank has one.

    `page` is the size of its control page after the last offer.
    """

    def __init__(self, rank: int, wire: Wire, offer: Mapping[str, Any], *, host: str | None) -> None:
        self._rank, self._wire, self._offer, self._host = rank, wire, offer, host
        self.page = 0

    def __getattr__(self, name: str) -> _Method:
        if name.startswith("_"):
            raise AttributeError(name)
        return _Method(lambda *words: self._answer(name, words))

    def _answer(self, name: str, words: tuple[Any, ...]) -> Any:
        answers: dict[str, Callable[[], Any]] = {
            "open_transfer": lambda: HalfInfo(
                streams=True,
                every_rank=self._host is not None,
                num_tensors=len(self._offer["manifest"]),
                lead={},
                host=self._host or "",
            ),
            "init_info": lambda: self._own_offer(*words),
            "connect_transfer": lambda: TP,
            "stage": lambda: {"version": words[0], "tensors": 0 if self._rank else len(self._offer["manifest"])},
            "log_probs": lambda: [[-1.0] * (len(ids) - 1) for ids in words[0]],
        }
        answer = answers.get(name, lambda: None)()
        self._wire.note("rank " + name, [list(map(str, words)), ""] if name == "open_transfer" else list(words))
        self._wire.nbytes["rank " + name] += 0 if name == "open_transfer" else self._wire.size(answer)
        return answer

    def _own_offer(self, receivers: int) -> Mapping[str, Any]:
        """As `TrainerProcess` answers: rank 0 alone tells the manifest."""
        offer = self._offer if self._rank == 0 else {**self._offer, "manifest": []}
        if self._host is None:
            return offer
        self.page = page_bytes(receivers)
        ring = {**offer["info"]["rings"][0], "identity": f"GPU-{self._rank:032x}"}
        return {**offer, "info": {**offer["info"], "rings": [ring]}}


def model_rows(config: Mapping[str, Any]) -> list[list[Any]]:
    """The manifest of a published Qwen3-MoE model, as an offer carries it."""
    h, f, d = config["hidden_size"], config["moe_intermediate_size"], config["head_dim"]
    q, kv, v = config["num_attention_heads"] * d, config["num_key_value_heads"] * d, config["vocab_size"]
    named: list[tuple[str, tuple[int, ...]]] = [("model.embed_tokens.weight", (v, h))]
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        named += [
            (f"{at}self_attn.{n}_proj.weight", s) for n, s in (("q", (q, h)), ("k", (kv, h)), ("v", (kv, h)), ("o", (h, q)))
        ]
        named += [(f"{at}self_attn.{n}_norm.weight", (d,)) for n in "qk"]
        named += [(f"{at}{n}.weight", (h,)) for n in ("input_layernorm", "post_attention_layernorm")]
        named.append((f"{at}mlp.gate.weight", (config["num_experts"], h)))
        for e in range(config["num_experts"]):
            shapes = (("gate", (f, h)), ("up", (f, h)), ("down", (h, f)))
            named += [(f"{at}mlp.experts.{e}.{n}_proj.weight", s) for n, s in shapes]
    named += [("model.norm.weight", (h,)), ("lm_head.weight", (v, h))]
    return manifest_to_json(build_manifest((name, "bfloat16", shape) for name, shape in named))


def offer_of(rows: list[list[Any]], *, every_rank: bool) -> dict[str, Any]:
    """A `device_ipc` half's offer with host memory as the device (a vendor's handles are larger), or a group's address."""
    if not every_rank:
        return {"protocol": "collective", "manifest": rows, "info": {"host": "10.0.0.1", "port": 29500, "backend": "acme"}}
    from vime.weights.transports.device_ipc import DeviceIpcTrainer

    manifest = build_manifest([("a", "bfloat16", (8, 8))])
    folder = Path(tempfile.gettempdir())
    name = f"scale-{time.time_ns():x}"
    context = TransferContext(
        name, manifest, rank=0, host="10.0.0.1", directory=folder, bucket_bytes=2**20, timeout_s=60.0, lead={}
    )
    half = DeviceIpcTrainer.from_context(context, exporter="vime.weights.transports.device_ipc:HostExporter")
    try:
        return {**half.init_info(TP), "manifest": rows}
    finally:
        half.close()


@functools.cache
def page_bytes(receivers: int) -> int:
    """Size of the control page that a rank makes for so many engine workers."""
    from vime.weights.transports.control_page import ControlPage

    with tempfile.TemporaryDirectory(prefix="vime-scale-") as folder:
        page = ControlPage.create(Path(folder) / "page", receivers)
        try:
            return page.path.stat().st_size
        finally:
            page.close()


def host_of(device: int, per_node: int) -> str:
    """A host as `vime.weights.hosts` names it, of devices that are numbered through."""
    return f"{device // per_node:08x}-0000-4000-8000-000000000000/25/4026531836"


async def publish_row(ranks: int, engines: int, rows: list[list[Any]], *, every_rank: bool, per_node: int = PER_NODE) -> Row:
    """The first publication, with offers and probe, then a later one without either.

    With `every_rank` ranks and engines share their devices.
    """
    wire = Wire()
    offer = offer_of(rows, every_rank=every_rank)
    actors = [CountedRank(r, wire, offer, host=host_of(r, per_node) if every_rank else None) for r in range(ranks)]
    link = TrainerLink(actors)
    transfer: Any = None
    await link.open_transfer(transfer)
    controls = [CountedEngine(i, wire, host_of(i * TP, per_node)) for i in range(engines)]
    probe = ProbeSettings(probe_ids(1000), dtype="bfloat16")
    publisher = Publisher(link, probe=probe, sleep_level=1 if every_rank else 0)
    publisher.set_engines(controls)
    wire.clear()
    cpu = time.process_time()
    await publisher.publish(PolicyVersion(0, 1), probe=True)
    spent = time.process_time() - cpu
    first = {
        "first_sync_messages": wire.calls.total(),
        "offer_bytes_from_ranks": wire.nbytes["rank init_info"],
        "offer_bytes_to_engines": wire.nbytes["engine /vime/init"],
        "offer_bytes_per_engine": wire.nbytes["engine /vime/init"] / engines,
        "rings_sent": sum(e.rings_seen for e in controls),
        "ring_bytes_to_engines": wire.nbytes["engine /vime/init"] - engines * wire.size(pack_manifest(rows)),
        "control_page_bytes": sum(actor.page for actor in actors),
        "first_sync_cpu_s": spent,
    }
    wire.clear()
    cpu = time.process_time()
    await publisher.publish(PolicyVersion(0, 2))
    later = {"sync_messages": wire.calls.total(), "sync_bytes": wire.nbytes.total(), "sync_cpu_s": time.process_time() - cpu}
    await publisher.close()
    return {**first, **later}
