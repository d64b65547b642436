"""Who holds a device: for every role and tag whether it is on the device, on the host or gone, and what may follow."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from vime.errors import MemoryStateError
from vime.facts.memory import Tag, TagSemantics

TRAINER_TAGS = (Tag.PARAMS, Tag.GRADS, Tag.OPTIMIZER)
ENGINE_TAGS = (Tag.ENGINE_WEIGHTS, Tag.KV)


class Place(StrEnum):
    """device: usable. host: a copy is kept there. gone: no content anywhere. stale: on the device, content not valid yet."""

    DEVICE = "device"
    HOST = "host"
    GONE = "gone"
    STALE = "stale"


ON_DEVICE = frozenset({Place.DEVICE, Place.STALE})


@dataclass(frozen=True, slots=True)
class Holder:
    """A tag of a role."""

    role: str
    tag: Tag

    def __str__(self) -> str:
        return f"{self.role}'s {self.tag}"


@dataclass(frozen=True, slots=True)
class Rule:
    """`first` may not come onto the device while `second` is on it, nor the other way round."""

    first: Holder
    second: Holder


def time_sharing_rules(trainer: str, engine: str) -> tuple[Rule, ...]:
    """What may not meet when a trainer and an engine share devices by turns.

    The engine's cache meets nothing of the trainer's; its weights meet the trainer's parameters during an update, and
    neither gradients nor optimizer.
    """
    cache, weights = Holder(engine, Tag.KV), Holder(engine, Tag.ENGINE_WEIGHTS)
    against_cache = tuple(Rule(cache, Holder(trainer, tag)) for tag in TRAINER_TAGS)
    against_weights = tuple(Rule(weights, Holder(trainer, tag)) for tag in (Tag.GRADS, Tag.OPTIMIZER))
    return against_cache + against_weights


def turn_rules(roles: Mapping[str, Iterable[Tag]]) -> tuple[Rule, ...]:
    """What may not meet when training roles use the same devices by turns: nothing of two of them. `roles`: tags by role."""
    holders = {role: _holders(role, tags) for role, tags in roles.items()}
    return tuple(
        Rule(one, other)
        for first, second in itertools.combinations(holders, 2)
        for one, other in itertools.product(holders[first], holders[second])
    )


class Residency:
    """The state machine. A call either makes all of its transitions or raises MemoryStateError and makes none.

    device -park-> host -wake-> device; device -discard-> gone -wake-> device, or -wake-> stale -refresh-> device where
    the tag's content has to be sent again (an engine's weights). An engine's cache does not wake before its weights are
    on the device and valid: what it would compute meanwhile is garbage.
    """

    def __init__(self, rules: Iterable[Rule] = ()) -> None:
        self._places: dict[Holder, Place] = {}
        self._rules = tuple(rules)

    def register(self, role: str, tags: Iterable[Tag], place: Place = Place.DEVICE) -> None:
        """Name what a role owns and where it is now. Raises MemoryStateError for a tag registered before."""
        holders = _holders(role, tags)
        for holder in holders:
            if holder in self._places:
                raise MemoryStateError(f"{holder} is registered twice")
        self._move(holders, place)

    def place(self, role: str, tag: Tag) -> Place:
        return self._place(Holder(role, tag))

    def places(self) -> Mapping[Holder, Place]:
        """A copy of the whole state."""
        return dict(self._places)

    def require(self, role: str, tags: Iterable[Tag], *, to: str) -> None:
        """Raise MemoryStateError unless all tags are usable; `to` says what for."""
        for holder in _holders(role, tags):
            if (place := self._place(holder)) is not Place.DEVICE:
                raise MemoryStateError(f"cannot {to}: {holder} is {_words(place)}", fix=f"wake {holder.tag} first")

    def park(self, role: str, tags: Iterable[Tag]) -> None:
        """Leave the device and keep the content on the host."""
        holders = _holders(role, tags)
        self._check(holders, {Place.DEVICE}, action="park")
        self._move(holders, Place.HOST)

    def discard(self, role: str, tags: Iterable[Tag]) -> None:
        """Leave the device and lose the content."""
        holders = _holders(role, tags)
        self._check(holders, ON_DEVICE, action="discard")
        self._move(holders, Place.GONE)

    def wake(self, role: str, tags: Iterable[Tag]) -> None:
        """Come back to the device, in the order given."""
        holders = _holders(role, tags)
        self._check(holders, {Place.HOST, Place.GONE}, action="wake")
        before = dict(self._places)
        try:
            for holder in holders:
                self._check_alone(holder)
                self._check_cache(holder)
                lost = self._places[holder] is Place.GONE
                self._places[holder] = Place.STALE if lost and holder.tag is Tag.ENGINE_WEIGHTS else Place.DEVICE
        except MemoryStateError:
            self._places = before
            raise

    def refresh(self, role: str, tags: Iterable[Tag]) -> None:
        """The content has been sent again in full."""
        holders = _holders(role, tags)
        self._check(holders, ON_DEVICE, action="refresh")
        self._move(holders, Place.DEVICE)

    def _check(self, holders: list[Holder], allowed: Iterable[Place], *, action: str) -> None:
        for holder in holders:
            if (place := self._place(holder)) not in allowed:
                raise MemoryStateError(f"cannot {action} {holder}: it is {_words(place)}")

    def _check_alone(self, holder: Holder) -> None:
        for rule in self._rules:
            if holder not in (rule.first, rule.second):
                continue
            other = rule.second if holder == rule.first else rule.first
            if self._places.get(other) in ON_DEVICE:
                raise MemoryStateError(
                    f"cannot wake {holder}: {other} is on the same device",
                    fix=f"park or discard {other.tag} of {other.role} first",
                )

    def _check_cache(self, holder: Holder) -> None:
        weights = Holder(holder.role, Tag.ENGINE_WEIGHTS)
        if holder.tag is Tag.KV and self._places.get(weights, Place.DEVICE) is not Place.DEVICE:
            raise MemoryStateError(
                f"cannot wake {holder}: {weights} is {_words(self._places[weights])}",
                fix="wake the engine's weights and send them in full first",
            )

    def _place(self, holder: Holder) -> Place:
        if holder not in self._places:
            raise MemoryStateError(f"{holder} is not registered")
        return self._places[holder]

    def _move(self, holders: Iterable[Holder], place: Place) -> None:
        self._places.update(dict.fromkeys(holders, place))


def check_semantics(tags: Iterable[Tag], semantics: Mapping[Tag, TagSemantics], *, platform: str) -> None:
    """Raise MemoryStateError for a tag that the platform cannot take off the device."""
    for tag in tags:
        if tag not in semantics or not semantics[tag].frees:
            why = semantics[tag].why if tag in semantics else "the platform names no way"
            raise MemoryStateError(f"{platform} cannot park {tag}: {why}", fix="use residency: resident")


def _holders(role: str, tags: Iterable[Tag]) -> list[Holder]:
    return [Holder(role, Tag(tag)) for tag in dict.fromkeys(tags)]


def _words(place: Place) -> str:
    return {
        Place.DEVICE: "on the device",
        Place.HOST: "parked on the host",
        Place.GONE: "discarded",
        Place.STALE: "on the device without valid content",
    }[place]
