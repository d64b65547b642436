"""What of the trainer is on shared devices at the edges of a step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from vime.cluster.memory_role import Parked
from vime.facts.memory import Tag

STATE = (Tag.PARAMS, Tag.GRADS, Tag.OPTIMIZER)


@dataclass
class Trainer:
    """Refuses to park or wake twice."""

    here: set[Tag]
    calls: list[str] = field(default_factory=list)

    async def all(self, method: str, *words: Any) -> list[Any]:
        match method:
            case "park":
                assert self.here.issuperset(words[0])
                self.here -= set(words[0])
            case "wake":
                assert self.here.isdisjoint(words[0])
                self.here |= set(words[0])
        self.calls.append(method)
        return [{}]


@pytest.mark.parametrize("away", [(), STATE], ids=["it starts on the devices", "it starts off them"])
async def test_each_edge_has_its_own_tags_on_the_device(away: tuple[Tag, ...]) -> None:
    trainer = Trainer(set(STATE) - set(away))
    edges: list[str] = []
    memory: Any = Parked(trainer, {}, lambda edge, _: edges.append(edge), away=away)  # type: ignore[arg-type]
    for _ in range(2):
        await memory.to_publish()
        assert trainer.here == {Tag.PARAMS}
        await memory.to_serve()
        assert trainer.here == set()
        await memory.to_train()
        assert trainer.here == set(STATE)
    assert edges == ["updating", "serving", "training"] * 2


async def test_an_edge_again_moves_nothing() -> None:
    trainer = Trainer(set(STATE))
    memory: Any = Parked(trainer, {}, lambda *_: None)  # type: ignore[arg-type]
    await memory.to_publish()
    await memory.to_publish()
    assert trainer.calls.count("park") == 1
