"""A publication to a real engine server by the transport that the plan chooses, beside copies of the same bytes.

With `--apart` the engine is on a device of its own, and a copy and a broadcast between the two devices stand beside it too.
The trainer's half is fed with random device tensors of the checkpoint's names and shapes in this process; no trainer runs.
Two sets of weights take turns. The log-probs that the engine gives after each publication say whether it arrived: a
publication that does nothing fails.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any

from vime.benchmarks import between, moves
from vime.benchmarks.engines import (
    Clock,
    Here,
    Planned,
    add_engine_arguments,
    as_trainer,
    bounded,
    control_of,
    finish,
    look,
    model_of,
    open_record,
    plan_run,
    served,
    table,
    with_logs,
)
from vime.benchmarks.layouts import one_each, topology
from vime.errors import ProbeError, WeightSyncError
from vime.facts.process import Factory
from vime.weights.hosts import ANYWHERE

ON_HOST = (
    Factory(
        "vime.weights.transports.device_ipc:DeviceIpcTrainer", {"exporter": "vime.weights.transports.exporters:HostExporter"}
    ),
    Factory("vime.weights.transports.device_ipc:DeviceIpcEngine"),
)
"""What goes from process to process where the plan's own transport does not stream."""
BUCKETS = {True: {64 << 20: 2, 20 << 20: 6}, False: {1 << 30: 8, 20 << 20: 400}}
"""How many moves of how many bytes measure the way between two devices: on slots of a host, on devices."""
CLEAR = 10.0
"""Two sets of weights differ in log-probs by at least this many times what one set differs from itself."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine_arguments(parser, residency="resident", kv_gib=4)
    parser.add_argument("--repeats", type=int, default=4, help="measured publications of each kind (4)")
    parser.add_argument("--apart", action="store_true", help="the engine on a device of its own")
    parser.add_argument("--transport", metavar="NAME", help="the only way for weights (the plan's choice)")


def run(args: argparse.Namespace) -> int:
    """Measure, print, record. 1 where a part failed."""
    clock, here = Clock(args.limit), look(args)
    record = open_record(args, "sync")
    model = model_of(args, here, clock)
    planned = plan_run(args, here, model, topology=_topology(args, here))
    record.parts["plan"] = {"ok": True, **planned.told()}
    sizes, repeats = moves.sizes_of(model), args.repeats
    where = moves.Where(planned.device_type, planned.plan.dtype)
    halves, mask = halves_of(planned), planned.plan.engines[0].mask
    record.run(
        "publications",
        lambda: with_logs(lambda: bounded(lambda: publications(planned, (where, sizes), repeats, clock), clock), planned),
    )
    buckets = BUCKETS[here.node.virtual]
    floors = {"copy between": between.copy_between, "broadcast": between.broadcast_between} if args.apart else {}
    for name, floor in floors.items():
        record.run(name, lambda f=floor: f(planned, buckets, clock))
    as_trainer(planned)
    for name, work in (
        ("copies", lambda: moves.copies(where, sizes)),
        ("stream from tensors", lambda: moves.transfer(where, sizes, halves, kept=False, repeats=repeats, env=mask)),
        ("stream from host", lambda: moves.transfer(where, sizes, halves, kept=True, repeats=repeats, env=mask)),
    ):
        where.tidy()
        record.run(name, lambda w=work: within(clock, w))
    record.parts.pop("ratios", None)
    if record.ok:
        record.run("ratios", lambda: ratios(record.parts))
    return finish(record, planned, report(record.parts))


def _topology(args: argparse.Namespace, here: Here) -> dict[str, Any]:
    """One trainer rank and one engine, on one device or on two."""
    layout, virtual = one_each("apart" if args.apart else "shared", here.node), here.node.virtual
    return topology(layout, args.residency, virtual=virtual, transport=args.transport, name="bench")


def within(clock: Clock, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The part, if there is time to begin it."""
    clock.left()
    return work()


def halves_of(planned: Planned) -> tuple[Factory, Factory]:
    transport = planned.plan.transport
    if transport is None or not transport.trainer.factory.load().streams:
        return ON_HOST
    return transport.trainer.factory, transport.engine.factory


# ---- publications


class LocalTrainer:
    """Implements `vime.weights.protocol.TrainerLink` for one half in this process; its calls run in threads.

    `weights` is what the next publication sends.
    """

    def __init__(self, half: Any, manifest: Any) -> None:
        self._half, self._manifest = half, manifest
        self.weights: Mapping[str, Any] = {}
        self._keeping: asyncio.Future[float] | None = None

    @property
    def streams(self) -> bool:
        return self._half.streams

    @property
    def by_host(self) -> bool:
        return False

    async def init_info(self, receivers: Mapping[str, int]) -> Mapping[str, Mapping[str, Any]]:
        return {ANYWHERE: await asyncio.to_thread(self._half.init_info, sum(receivers.values()))}

    async def connect(self) -> None:
        await asyncio.to_thread(self._half.connect)

    async def stage(self, version: str, fingerprint: bool) -> Mapping[str, Any]:
        return await asyncio.to_thread(self._half.stage, self._ordered(), version=version, fingerprint=fingerprint)

    async def stream(self, *, kept: bool = False) -> None:
        await asyncio.to_thread(self._half.stream, () if kept else self._ordered())

    def keep(self) -> Awaitable[None]:
        self._keeping = asyncio.ensure_future(asyncio.to_thread(self._keep))
        return self._kept(self._keeping)

    async def kept_s(self) -> float:
        """Seconds that the copy for later engines took, once it is made; 0 where none was."""
        keeping, self._keeping = self._keeping, None
        return await keeping if keeping is not None else 0.0

    async def probe_log_probs(self, sequences: Sequence[Sequence[int]]) -> Any:
        raise WeightSyncError("no trainer computes log-probs here", fix="publish without a probe")

    def close(self) -> None:
        self._half.close()

    def _keep(self) -> float:
        began = time.perf_counter()
        self._half.keep(self._ordered())
        return time.perf_counter() - began

    @staticmethod
    async def _kept(keeping: asyncio.Future[float]) -> None:
        await keeping

    def _ordered(self) -> Iterator[tuple[str, Any]]:
        return ((spec.name, self.weights[spec.name]) for spec in self._manifest.tensors)


async def publications(planned: Planned, what: tuple[moves.Where, moves.Sizes], repeats: int, clock: Clock) -> dict[str, Any]:
    """Start an engine, publish two sets of weights in turn, and look at what it answers after each."""
    from vime.assemble.setups import sleep_level

    where, sizes = what
    async with served(planned, clock) as server, control_of(planned, server, clock) as control:
        as_trainer(planned)
        manifest = moves.manifest_of(sizes, where.dtype)
        sets = [where.drawn(sizes, seed) for seed in (1, 2)]
        trainer = LocalTrainer(_half(planned, manifest), manifest)
        try:
            series = series_of(planned, control, trainer, sets)
            checked = await series.check()
            rows = {name: [await series.publish(fingerprint=f) for _ in range(repeats)] for name, f in KINDS.items()}
            checked["after the last publication"] = await series.check_last()
            await series.publisher.close()
        finally:
            trainer.close()
    medians = {name: summary(found) for name, found in rows.items()}
    return {
        "bytes": manifest.nbytes,
        "tensors": len(manifest.tensors),
        "transport": planned.plan.transport.protocol,
        "sleep_level": sleep_level(planned.plan),
        "checked": checked,
        "medians": medians,
        "rows": rows,
        "publication_s": medians["plain"]["seconds"]["total"],
        "rates": rates(manifest.nbytes, medians["plain"]["seconds"]),
    }


def rates(nbytes: int, seconds: Mapping[str, float]) -> dict[str, float]:
    """GB/s of the update alone and of the whole publication."""
    spans = {"update": seconds.get("update", 0.0), "publication": seconds["total"]}
    return {f"{name}_gb_per_s": nbytes / span / 1e9 for name, span in spans.items() if span > 0}


KINDS = {"plain": False, "fingerprint": True}


class Series:
    """Publications of two sets of weights in turn to one engine."""

    def __init__(
        self,
        publisher: Any,
        control: Any,
        trainer: LocalTrainer,
        sets: Sequence[Mapping[str, Any]],
        ids: Sequence[Sequence[int]],
    ) -> None:
        self.publisher, self._control, self._trainer = publisher, control, trainer
        self._sets, self._ids = sets, ids
        self._count = 0
        self._known: list[Any] = []

    async def publish(self, *, fingerprint: bool) -> dict[str, Any]:
        """The set whose turn it is. Waits for the copy for later engines, whose seconds stand apart."""
        from vime.types import PolicyVersion

        self._trainer.weights = self._sets[self._count % 2]
        self._count += 1
        report = await self.publisher.publish(PolicyVersion(0, self._count), fingerprint=fingerprint)
        keep_s = await self._trainer.kept_s()
        seconds = {**report.seconds, "total": sum(report.seconds.values())}
        return {"seconds": seconds, "engine_s": dict(next(iter(report.engine_seconds.values()))), "keep_s": keep_s}

    async def check(self) -> dict[str, Any]:
        """Both sets, then the first again. Raises ProbeError where log-probs do not follow the weights."""
        loaded = await self._log_probs()
        first = await self.publish(fingerprint=True)
        self._known = [await self._log_probs()]
        await self.publish(fingerprint=True)
        self._known.append(await self._log_probs())
        await self.publish(fingerprint=False)
        again = await self._log_probs()
        await self.publish(fingerprint=False)
        other = await self._log_probs()
        one, two = self._known
        found = {
            "one set from itself": max(apart(one, again), apart(two, other)),
            "one set from the other": min(apart(one, two), apart(again, other)),
            "the first set from the model's own weights": apart(loaded, one),
        }
        _require_clear(found)
        return {"log_prob_differences": found, "first": first}

    async def _log_probs(self) -> Any:
        """At temperature 1, of tokens that are the same in every call."""
        return await self._control.probe(self._ids)

    async def check_last(self) -> dict[str, float]:
        """The engine has the set that was published last."""
        log_probs, last = await self._log_probs(), (self._count - 1) % 2
        found = {
            "one set from itself": apart(self._known[last], log_probs),
            "one set from the other": apart(self._known[1 - last], log_probs),
        }
        _require_clear(found)
        return found


def series_of(planned: Planned, control: Any, trainer: LocalTrainer, sets: Sequence[Mapping[str, Any]]) -> Series:
    """Publications as a run of the plan makes them."""
    from vime.assemble.setups import sleep_level
    from vime.weights.probe import probe_ids
    from vime.weights.protocol import ProbeSettings, Publisher

    plan = planned.plan
    probe = ProbeSettings(probe_ids(plan.model.vocab), plan.dtype)
    publisher = Publisher(trainer, probe=probe, engine_options=plan.transport.engine.options, sleep_level=sleep_level(plan))
    publisher.set_engines([control])
    return Series(publisher, control, trainer, sets, probe.ids)


def _require_clear(found: Mapping[str, float]) -> None:
    itself = found["one set from itself"]
    if not all(value > CLEAR * itself for name, value in found.items() if name != "one set from itself"):
        text = "; ".join(f"{name} {value:.3g}" for name, value in found.items())
        raise ProbeError(f"log-probs do not follow the published weights: {text}", fix="the transport lost or mixed weights")


def apart(one: Sequence[Sequence[float]], other: Sequence[Sequence[float]]) -> float:
    """Mean absolute difference of log-probs."""
    differences = [abs(a - b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True)]
    return sum(differences) / len(differences)


def _half(planned: Planned, manifest: Any) -> Any:
    from vime.assemble.setups import transfer_setup
    from vime.weights.transports.base import TransferContext

    setup = transfer_setup(planned.config, planned.plan, run_id=planned.keys.run_id)
    context = TransferContext(
        setup.run_id, manifest, 0, setup.host, setup.directory, setup.bucket_bytes, setup.timeout_s, lead={}
    )
    return setup.factory.load().from_context(context, **setup.factory.options)


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Medians by phase."""
    return {
        "seconds": {name: moves.median(row["seconds"].get(name, 0.0) for row in rows) for name in rows[-1]["seconds"]},
        "engine_s": {name: moves.median(row["engine_s"].get(name, 0.0) for row in rows) for name in rows[-1]["engine_s"]},
        "keep_s": moves.median(row["keep_s"] for row in rows),
    }


# ---- what it means


def ratios(parts: Mapping[str, Any]) -> dict[str, float]:
    """To a copy of as many bytes on the device; above 1 is slower. The host's copy beside it."""
    plain, medians = parts["copies"], parts["publications"]["medians"]
    floor = plain["on_device_s"]
    found = {
        "stream between processes / copy on device": parts["stream from tensors"]["stream_s"] / floor,
        "stream from the host's copy / copy from host": parts["stream from host"]["stream_s"] / plain["from_host_s"],
        "with fingerprint / copy on device": medians["fingerprint"]["seconds"]["total"] / floor,
        "the engine's update / copy on device": medians["plain"]["engine_s"].get("update", 0.0) / floor,
        "publication / copy on device": medians["plain"]["seconds"]["total"] / floor,
    }
    between_s = {name: floor_s(parts, name) for name in ("copy between", "broadcast") if name in parts}
    for name, seconds in between_s.items():
        words = {"copy between": "copy between devices", "broadcast": "broadcast between processes"}[name]
        found[f"update / {words}"] = medians["plain"]["seconds"]["update"] / seconds
        found[f"publication / {words}"] = medians["plain"]["seconds"]["total"] / seconds
    return found


def floor_s(parts: Mapping[str, Any], name: str) -> float:
    """Seconds that the publication's bytes would take between the two devices, in the larger buckets."""
    return parts["publications"]["bytes"] / parts[name]["bytes_per_s"]


def report(parts: Mapping[str, Any]) -> str:
    rows: list[Sequence[Any]] = []
    found, plain = parts.get("publications", {}), parts.get("copies", {})
    if found.get("ok"):
        rows += [("bytes of a publication", found["bytes"] / 1e9, f"GB by {found['transport']}")]
        for kind, median in found["medians"].items():
            rows += [(f"{kind}: {name}", value, "s") for name, value in median["seconds"].items() if value >= 5e-5]
            rows += [(f"{kind}: engine's {name}", value, "s") for name, value in median["engine_s"].items()]
        rows += [(name.removesuffix("_gb_per_s"), value, "GB/s") for name, value in found["rates"].items()]
        rows += [("copy for later engines, beside the run", found["medians"]["plain"]["keep_s"], "s")]
    if plain.get("ok"):
        rows += [("copy on the device: the floor", plain["on_device_s"], f"s, {plain['on_device_bytes_per_s'] / 1e9:.4g} GB/s")]
        rows += [("copy to the host", plain["to_host_s"], f"s, {plain['to_host_bytes_per_s'] / 1e9:.4g} GB/s")]
    for name in ("copy between", "broadcast"):
        if parts.get(name, {}).get("ok"):
            sized = parts[name]["buckets"].items()
            rows += [(f"{name}, {int(nbytes) >> 20} MiB at once", row["gb_per_s"], "GB/s") for nbytes, row in sized]
    for name in ("stream from tensors", "stream from host"):
        if parts.get(name, {}).get("ok"):
            rows += [(f"{name}, no engine", parts[name]["stream_s"], f"s, {parts[name]['stream_bytes_per_s'] / 1e9:.4g} GB/s")]
    rows += [(f"{name} failed: {part['error']}",) for name, part in parts.items() if not part["ok"]]
    ratio = {name: value for name, value in parts.get("ratios", {}).items() if "/" in name}
    return table("sync", [*rows, *((name, value, "of the floor's time") for name, value in ratio.items())])
