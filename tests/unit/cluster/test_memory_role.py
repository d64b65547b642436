"""What of the training roles is on shared devices at the edges of a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from vime.cluster.memory_role import Parked, Resident
from vime.facts.memory import Tag

STATE = (Tag.PARAMS, Tag.GRADS, Tag.OPTIMIZER)
FROZEN = (Tag.PARAMS,)


@dataclass
class Devices:
    """What of whom is on the devices; nobody may come while something else is leaving."""

    here: dict[str, set[Tag]]
    most: set[tuple[str, ...]] = field(default_factory=set)

    def note(self) -> None:
        self.most.add(tuple(sorted(role for role, tags in self.here.items() if tags)))


@dataclass
class Trainer:
    """Refuses to park or wake twice."""

    role: str
    devices: Devices
    calls: list[str] = field(default_factory=list)

    async def all(self, method: str, *words: Any) -> list[Any]:
        here = self.devices.here[self.role]
        match method:
            case "park":
                assert here.issuperset(words[0])
                here -= set(words[0])
            case "wake":
                assert here.isdisjoint(words[0])
                here |= set(words[0])
                self.devices.note()
        self.calls.append(method)
        return [{}]


def parked(tags: Mapping[str, tuple[Tag, ...]], *, away: bool, edges: list[str]) -> tuple[Any, Devices, dict[str, Trainer]]:
    devices = Devices({role: set() if away else set(held) for role, held in tags.items()})
    links = {role: Trainer(role, devices) for role in tags}
    memory = Parked(links, {}, lambda edge, _: edges.append(edge), tags=tags, away=away)  # type: ignore[arg-type]
    return memory, devices, links


@pytest.mark.parametrize("away", [False, True], ids=["it starts on the devices", "it starts off them"])
async def test_each_edge_has_its_own_tags_on_the_device(away: bool) -> None:
    edges: list[str] = []
    memory, devices, _ = parked({"actor": STATE}, away=away, edges=edges)
    for _ in range(2):
        await memory.to_publish()
        assert devices.here == {"actor": {Tag.PARAMS}}
        await memory.to_serve()
        assert devices.here == {"actor": set()}
        await memory.take_turn("actor", STATE)
        assert devices.here == {"actor": set(STATE)}
    assert edges == ["updating", "serving", "training"] * 2


async def test_an_edge_again_moves_nothing() -> None:
    memory, _, links = parked({"actor": STATE}, away=False, edges=[])
    await memory.to_publish()
    await memory.to_publish()
    assert links["actor"].calls.count("park") == 1


@pytest.mark.parametrize("away", [False, True])
async def test_only_the_role_in_turn_is_on_the_devices(away: bool) -> None:
    edges: list[str] = []
    tags = {"actor": STATE, "critic": STATE, "ref": FROZEN}
    memory, devices, _ = parked(tags, away=away, edges=edges)
    for _ in range(2):
        await memory.take_turn("ref", FROZEN)
        assert devices.here == {"actor": set(), "critic": set(), "ref": set(FROZEN)}
        await memory.take_turn("critic", FROZEN)
        assert devices.here == {"actor": set(), "critic": {Tag.PARAMS}, "ref": set()}
        await memory.take_turn("critic", STATE)
        await memory.take_turn("actor", STATE)
        assert devices.here == {"actor": set(STATE), "critic": set(), "ref": set()}
        await memory.to_publish()
        await memory.to_serve()
        assert devices.here == {"actor": set(), "critic": set(), "ref": set()}
    assert edges == ["scoring ref", "scoring critic", "training critic", "training", "updating", "serving"] * 2
    assert devices.most == {("actor",), ("critic",), ("ref",)}


async def test_a_role_on_its_own_devices_never_moves() -> None:
    memory, devices, links = parked({"actor": STATE}, away=False, edges=[])
    await memory.take_turn("critic", STATE)
    assert devices.here == {"actor": set(STATE)}
    assert links["actor"].calls == []


async def test_residents_stay_and_every_edge_is_logged_once() -> None:
    devices = Devices({"actor": set(STATE), "critic": set(STATE)})
    links = {role: Trainer(role, devices) for role in devices.here}
    edges: list[tuple[str, tuple[str, ...]]] = []
    memory: Any = Resident(links, {}, lambda edge, held: edges.append((edge, tuple(held))))  # type: ignore[arg-type]
    for _ in range(2):
        await memory.take_turn("critic", STATE)
        await memory.take_turn("actor", STATE)
        await memory.to_publish()
        await memory.to_serve()
    assert edges == [(edge, ("actor", "critic")) for edge in ("training", "updating", "serving")]
    assert devices.here == {"actor": set(STATE), "critic": set(STATE)}
