"""The transport of an edge: half offers of the two sides are paired, filtered and ranked; every rejection keeps its reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vime.errors import PlanError
from vime.facts.inventory import NodeInventory, in_one_domain
from vime.facts.process import Slot
from vime.facts.transports import Edge, Hosts, Relation, TransportOffer
from vime.planning.place import nodes_of
from vime.planning.plan import Rejection, TransportPlan
from vime.planning.time import NOT_COUNTED, Estimate, transfer


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the topology says about an edge."""

    prefer: tuple[str, ...] = ()
    forbid: tuple[str, ...] = ()
    require: tuple[str, ...] = ()
    buffer_bytes: int = 512 * 2**20


@dataclass(frozen=True, slots=True)
class End:
    """One end of an edge: pool, its nodes, and the slots of all its ranks or workers."""

    pool: str
    nodes: tuple[NodeInventory, ...]
    slots: tuple[Slot, ...]


@dataclass(frozen=True, slots=True)
class _Pair:
    trainer: TransportOffer
    engine: TransportOffer
    estimate: Estimate

    @property
    def protocol(self) -> str:
        return self.trainer.protocol


def relation(trainer: End, engine: End) -> Relation:
    """How near the two ends are at their farthest pair."""
    if trainer.pool == engine.pool and set(engine.slots) <= set(trainer.slots):
        return Relation.SAME_DEVICE
    if len(_machines(trainer, trainer.slots) | _machines(engine, engine.slots)) == 1:
        return Relation.SAME_NODE
    nodes = [end.nodes[node] for end in (trainer, engine) for node in nodes_of(end.slots)]
    return Relation.SAME_DOMAIN if in_one_domain(nodes) else Relation.NETWORK


def hosts(trainer: End, engine: End, engines: Sequence[Sequence[Slot]]) -> Hosts:
    """Which machines the two ends span. `engines` are the slots of each engine, `engine` is the end of all of them."""
    beside = _machines(trainer, trainer.slots)
    places = [_machines(engine, slots) for slots in engines]
    if any(len(place) > 1 or not place <= beside for place in places):
        return Hosts.APART
    return Hosts.ONE if len(beside.union(*places)) == 1 else Hosts.EACH


def _machines(end: End, slots: Sequence[Slot]) -> set[str]:
    """Host names. Nodes of two pools are one machine when they have one, also where two platforms look at it."""
    return {end.nodes[slot.node].hostname for slot in slots}


def choose(
    edge: Edge,
    offers: tuple[Sequence[TransportOffer], Sequence[TransportOffer]],
    wishes: Wishes,
    *,
    where: str | None,
    load: Estimate = NOT_COUNTED,
) -> TransportPlan:
    """Pair, filter and rank. `offers` are the trainer's and the engine's; `load` is what the two sides need with any of them.

    Preferred protocols come first in the order given, then by estimated time; unknown times come last.

    Raises:
        PlanError: E241 when nothing is left, E242 when a required protocol cannot be used.
    """
    pairs, rejected = _pairs(edge, offers, wishes, load)
    _check_required(pairs, rejected, wishes, where)
    if not pairs:
        listed = "; ".join(f"{r.protocol}: {r.reason}" for r in rejected) or "neither side offers any"
        name = f"{edge.trainer.role} -> {edge.engine.role}"
        raise PlanError(f"E241 no transport is left for {name}: {listed}", where=where, fix="loosen `forbid` or `require`")
    ranked = sorted(pairs, key=lambda pair: _rank(pair, wishes))
    best = ranked[0]
    rejected += [Rejection(pair.protocol, _why_not(pair, best, wishes)) for pair in ranked[1:]]
    return TransportPlan(
        edge=edge,
        trainer=best.trainer,
        engine=best.engine,
        seconds=best.estimate.seconds,
        provenance=best.estimate.provenance,
        rejected=tuple(rejected),
        buffer_bytes=wishes.buffer_bytes,
        how=best.estimate.how,
    )


def _pairs(
    edge: Edge, offers: tuple[Sequence[TransportOffer], Sequence[TransportOffer]], wishes: Wishes, load: Estimate
) -> tuple[list[_Pair], list[Rejection]]:
    trainer, engine = ({offer.protocol: offer for offer in side} for side in offers)
    pairs: list[_Pair] = []
    rejected: list[Rejection] = []
    for protocol in dict.fromkeys((*trainer, *engine, *wishes.require)):
        reason = _reason(protocol, trainer.get(protocol), engine.get(protocol), wishes)
        if reason is not None:
            rejected.append(Rejection(protocol, reason))
            continue
        one, other = trainer[protocol], engine[protocol]
        cost = transfer(one.cost, other.cost, num_bytes=edge.num_bytes, buffer_bytes=wishes.buffer_bytes, load=load)
        pairs.append(_Pair(one, other, cost))
    return pairs, rejected


def _reason(protocol: str, trainer: TransportOffer | None, engine: TransportOffer | None, wishes: Wishes) -> str | None:
    """Why a protocol is out, the facts before the wishes."""
    if trainer is None or engine is None:
        sides = [name for name, offer in (("trainer", trainer), ("engine", engine)) if offer is None]
        return f"the {' and the '.join(sides)} side does not offer it"
    failed = [p.reason for offer in (trainer, engine) for p in offer.preconditions if not p.holds]
    if failed:
        return "; ".join(dict.fromkeys(failed))
    if protocol in wishes.forbid:
        return "forbidden by the topology"
    if wishes.require and protocol not in wishes.require:
        return f"the topology requires {' or '.join(wishes.require)}"
    return None


def _check_required(pairs: Sequence[_Pair], rejected: Sequence[Rejection], wishes: Wishes, where: str | None) -> None:
    reasons = {r.protocol: r.reason for r in rejected}
    if wishes.require and not pairs:
        listed = "; ".join(f"{protocol}: {reasons.get(protocol, 'unknown')}" for protocol in wishes.require)
        fix = "remove `require`, or change what it needs"
        raise PlanError(f"E242 a required transport cannot be used: {listed}", where=where, fix=fix)


def _rank(pair: _Pair, wishes: Wishes) -> tuple[int, bool, float]:
    place = wishes.prefer.index(pair.protocol) if pair.protocol in wishes.prefer else len(wishes.prefer)
    return place, pair.estimate.seconds is None, pair.estimate.seconds or 0.0


def _why_not(pair: _Pair, best: _Pair, wishes: Wishes) -> str:
    if best.protocol in wishes.prefer and _rank(pair, wishes)[0] > _rank(best, wishes)[0]:
        return f"the topology prefers {best.protocol}"
    if pair.estimate.seconds is None:
        return f"its time is unknown ({pair.estimate.how})"
    assert best.estimate.seconds is not None
    return f"slower here: {pair.estimate.seconds:.3g} s against {best.estimate.seconds:.3g} s"
