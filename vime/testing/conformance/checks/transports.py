"""Half offers of weight transports: that they pair, are whole, refuse what is too far, and carry weights."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator, Mapping
from typing import Any

from vime.facts.process import Factory
from vime.facts.transports import Relation, Side, TransportOffer
from vime.testing.conformance.checks.memory import device_of
from vime.testing.conformance.engine_side import ChildPeer, Message, Peer, ThreadPeer, content
from vime.testing.conformance.registry import NotRun, check, fail, require
from vime.testing.conformance.source import bad_options, members_of, problem
from vime.testing.conformance.subject import AskedEdge, Case, Subject
from vime.weights.manifest import build_manifest, manifest_to_json
from vime.weights.transports.base import EngineHalf, Manifest, TrainerHalf, TransferContext

DISK = "disk"
NEAR = ("device_ipc", "host_shm")
"""Protocols of the core that pass memory of one node."""

PROVENANCES = ("spec", "measured", "derived", "nominal")
_CORE = "vime.weights.transports."
_HOST = "cpu"
_WAIT_S = 30.0

Offers = Mapping[str, TransportOffer]


def offers_of(subject: Subject, asked: AskedEdge) -> dict[Side, Offers]:
    """The offers of both sides by protocol."""
    return {side: {offer.protocol: offer for offer in subject.ask("vime_transports", asked.edge, side)} for side in Side}


def refusals(offers: Mapping[Side, Offers], protocol: str) -> list[str]:
    """Why a protocol cannot be used for an edge; empty where it can."""
    return [p.reason for side in Side for p in offers[side][protocol].preconditions if not p.holds]


@check("C29", hooks=["vime_transports"], title="half offers pair up")
def offers_pair_up(subject: Subject) -> None:
    """Between two roles of the platform every protocol that one side offers is offered by the other, with equal values for
    the options that both factories have, and disk is always among them."""
    for asked in subject.edges():
        offers = offers_of(subject, asked)
        names = {side: set(offers[side]) for side in Side}
        for side, other in ((Side.TRAINER, Side.ENGINE), (Side.ENGINE, Side.TRAINER)):
            alone = sorted(names[side] - names[other])
            what = f"only the {side} side offers {', '.join(alone)} ({asked.about})"
            require(not alone, what, "offer both halves, with a failed precondition where one cannot be used")
        require(DISK in names[Side.TRAINER], f"disk is not offered ({asked.about})", "leave the parent's disk offer in")
        for protocol in names[Side.TRAINER]:
            one, two = (offers[side][protocol].factory.options for side in Side)
            odd = sorted(name for name in set(one) & set(two) if one[name] != two[name])
            what = f"the halves of {protocol} disagree on {', '.join(odd)} ({asked.about})"
            require(not odd, what, "give both factories the same value")


@check("C30", hooks=["vime_transports"], title="offers are whole")
def offers_are_whole(subject: Subject) -> None:
    """Both factories exist and have the methods of their half, preconditions say why they matter, costs are not negative
    and say where they come from."""
    halves = {Side.TRAINER: members_of(TrainerHalf), Side.ENGINE: members_of(EngineHalf)}
    for asked in subject.edges():
        for side, offers in offers_of(subject, asked).items():
            methods, attributes = halves[side]
            for protocol, offer in offers.items():
                at = f"{protocol}, {side} side, {asked.about}"
                wrong = problem(offer.factory, methods=methods, attributes=attributes)
                if side is Side.ENGINE:
                    wrong = wrong or bad_options(offer.factory)
                require(not wrong, f"{wrong} ({at})", "implement the half of vime.weights.transports.base")
                mute = [p for p in offer.preconditions if not p.reason.strip()]
                require(not mute, f"a precondition has no reason ({at})", "say what a rejection prints")
                _check_cost(offer, at)


def _check_cost(offer: TransportOffer, at: str) -> None:
    cost = offer.cost
    numbers = [n for n in (cost.bytes_per_s, cost.fixed_s, cost.per_chunk_s) if n is not None]
    sane = all(math.isfinite(n) and n >= 0 for n in numbers) and cost.bytes_per_s != 0
    require(sane, f"the cost is {cost} ({at})", "give seconds of 0 or more and a positive rate")
    if cost.bytes_per_s is None:
        require(cost.provenance == "unknown", f"an unknown rate has provenance {cost.provenance} ({at})", "write unknown")
    else:
        sourced = cost.provenance in PROVENANCES
        require(sourced, f"the rate has provenance {cost.provenance!r} ({at})", f"write one of {', '.join(PROVENANCES)}")


@check("C31", hooks=["vime_transports"], title="what is too far is refused with a reason")
def too_far_is_refused(subject: Subject) -> None:
    """Across the network what passes memory of one node is refused with a reason, and something is left that works. Roles that
    share devices on two hosts do not share one host's memory either; device_ipc may serve them where every engine has a rank
    on its own host."""
    for asked in subject.edges():
        relation = asked.edge.relation
        offers = offers_of(subject, asked)
        shared = [name for name in offers[Side.TRAINER] if name in offers[Side.ENGINE]]
        left = [name for name in shared if not refusals(offers, name)]
        require(left, f"no transport is left ({asked.about})", "disk needs nothing of the hardware")
        local = NEAR if relation is Relation.NETWORK else () if asked.edge.on_one_host else ("host_shm",)
        usable = sorted(set(local) & set(left))
        what = f"{', '.join(usable)} is offered without a failed precondition ({asked.about})"
        require(not usable, what, "add a precondition: edge.on_one_host, or edge.rank_beside_engines for device_ipc")


@check("C32", hooks=["vime_transports"], title="weights arrive")
def weights_arrive(subject: Subject) -> str | None:
    """Two updates of a few tensors travel over every transport that can run here, bit for bit and in order. What streams
    brings each once more from what it kept, when the trainer's tensors have changed. No half holds on to those tensors'
    storages. On a platform of devices, without --device, only transports of the core that use the host's memory run."""
    for library in ("torch", "xxhash", "safetensors"):
        if importlib.util.find_spec(library) is None:
            raise NotRun(f"{library} is not installed")
    if not subject.cases:
        raise NotRun("there is no node to ask about")
    case = subject.real[0] if subject.device else subject.cases[0]
    device = _device(subject, case)
    ran: list[str] = []
    skipped: list[str] = []
    for protocol, offers, relation in _nearest(subject, case):
        if device is None and not all(_host_only(offers[side][protocol].factory) for side in Side):
            skipped.append(f"{protocol} needs a device")
            continue
        trip = _Trip(subject, protocol, {side: offers[side][protocol] for side in Side}, device or _HOST)
        trip.run(index=1 if relation is Relation.SAME_NODE else 0)
        ran.append(protocol)
    if not ran:
        raise NotRun("; ".join(skipped) or "no transport works between roles of one machine")
    return f"ran {', '.join(ran)}; not run: {'; '.join(skipped)}" if skipped else None


def _device(subject: Subject, case: Case) -> str | None:
    """Torch's device to try transports on; None where only the host's memory is here."""
    try:
        return device_of(subject, case)
    except NotRun:
        return None


def _host_only(factory: Factory) -> bool:
    return factory.target.startswith(_CORE) and not factory.options


def _nearest(subject: Subject, case: Case) -> Iterator[tuple[str, dict[Side, Offers], Relation]]:
    """Every protocol with the nearest relation inside a node that allows it."""
    found: set[str] = set()
    for asked in subject.edges(cases=[case]):
        if not asked.edge.on_one_host:
            continue
        offers = offers_of(subject, asked)
        for protocol in offers[Side.TRAINER]:
            if protocol not in found and protocol in offers[Side.ENGINE] and not refusals(offers, protocol):
                found.add(protocol)
                yield protocol, offers, asked.edge.relation


class _Trip:
    """One transport between a trainer's half here and an engine's half in a thread, or on a device in a child process."""

    def __init__(self, subject: Subject, protocol: str, offers: Mapping[Side, TransportOffer], device: str) -> None:
        self._folder, self._protocol, self._offers, self._device = subject.folder, protocol, offers, device

    def run(self, *, index: int) -> None:
        factory = self._offers[Side.ENGINE].factory
        on_host = self._device == _HOST
        peer: Peer = ThreadPeer(factory) if on_host else ChildPeer(factory, device_type=self._device, index=index)
        trainer = self._offers[Side.TRAINER].factory
        manifest = build_manifest((name, kind, shape) for name, kind, shape in _TENSORS)
        half = trainer.load().from_context(self._context(manifest), **trainer.options)
        try:
            told = half.init_info(1)
            rows = {"manifest": manifest_to_json(manifest), "rank_offset": 0, "worker_rank": 0}
            peer.tell({"action": "connect", "info": {**told["info"], **rows}})
            half.connect()
            self._heard(peer, "connect")
            for version in ("1", "2"):
                self._update(half, peer, manifest, version)
        finally:
            peer.close()
            half.close()

    def _context(self, manifest: Manifest) -> TransferContext:
        return TransferContext(
            run_id=f"conformance-{self._protocol}",
            manifest=manifest,
            rank=0,
            host="127.0.0.1",
            directory=self._folder,
            bucket_bytes=0,
            timeout_s=_WAIT_S,
            lead={},
        )

    def _update(self, half: Any, peer: Peer, manifest: Manifest, version: str) -> None:
        weights = _weights(self._device, int(version))
        staged = dict(half.stage(weights.items(), version=version, fingerprint=True))
        if "digests" in staged:
            absent = sorted(set(weights) - set(staged["digests"]))
            require(not absent, f"{self._protocol} gives no digest for {', '.join(absent)}", "digest every tensor")
        self._deliver(half, peer, staged, weights.items())
        wanted = [[t.name, *content(weights[t.name].clone())] for t in manifest.tensors]
        self._compare(peer, wanted, f"in update {version}")
        half.keep(weights.items())
        held = [name for name, tensor in weights.items() if not tensor.untyped_storage().resizable()]
        what = f"{self._protocol} holds on to the storage of {', '.join(held)}, so it cannot leave the device"
        require(not held, what, "copy a tensor before taking a numpy view of it")
        if half.streams:
            for tensor in weights.values():
                tensor.zero_()
            self._deliver(half, peer, staged, ())
            self._compare(peer, wanted, f"for an engine that starts after update {version}")

    def _deliver(self, half: Any, peer: Peer, staged: Message, weights: Any) -> None:
        peer.tell({"action": "receive", "info": staged})
        if half.streams:
            half.stream(weights)

    def _compare(self, peer: Peer, wanted: list[list[Any]], when: str) -> None:
        got = self._heard(peer, f"receive {when}")["tensors"]
        for one, other in zip(got, wanted, strict=False):
            what = f"{self._protocol} delivers {one[:3]} where {other[:3]} was sent {when}"
            require(one[:3] == other[:3], what, "yield the manifest's tensors in its order")
            require(one == other, f"{self._protocol} changes the content of {other[0]} {when}", "carry every byte")
        full = len(got) == len(wanted)
        require(full, f"{self._protocol} delivers {len(got)} of {len(wanted)} tensors {when}", "yield them all")

    def _heard(self, peer: Peer, action: str) -> Message:
        answer = peer.answer()
        if "error" in answer:
            fail(f"the engine's half of {self._protocol} fails to {action}: {answer['error']}", "mend the half")
        return answer


_TENSORS = (
    ("model.embed_tokens.weight", "float32", (64, 16)),
    ("model.layers.0.mlp.down_proj.weight", "bfloat16", (16, 48)),
    ("model.norm.weight", "float32", (5,)),
)


def _weights(device: str, seed: int) -> dict[str, Any]:
    import torch

    made = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=made).to(getattr(torch, kind)).to(device) for name, kind, shape in _TENSORS}
