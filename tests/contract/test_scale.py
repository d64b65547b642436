"""Nothing on the driver's side grows with the square of the devices: planning, control messages, rollout and buffer."""

from __future__ import annotations

import asyncio
import importlib
import json
import math
import random
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from vime.data.buffer import Buffer, Order, next_by_completion, next_by_prompt
from vime.data.source import PromptSource
from vime.errors import RolloutError
from vime.models.registry import read_shape
from vime.testing.fakes import fake_group
from vime.types import Group, PolicyVersion, PromptId

SIZES = (8, 64, 512)
LIMIT = 1.3
BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture(scope="module")
def sim() -> Iterator[Any]:
    sys.path.insert(0, str(BENCH))
    try:
        yield importlib.import_module("scale_sim")
    finally:
        sys.path.remove(str(BENCH))


@pytest.fixture(scope="module")
def grown(sim: Any) -> Mapping[str, Mapping[str, list[float]]]:
    """By layout and measure, the exponents between the sizes."""
    model = read_shape(sim.MODEL)
    rows = sim.model_rows(json.loads((sim.MODEL / "config.json").read_text()))
    tables = {layout: {n: sim.simulate(sim.Cluster(n, layout), model, rows) for n in SIZES} for layout in sim.LAYOUTS}
    return {layout: sim.exponents(table, floors=sim.floor_of) for layout, table in tables.items()}


@pytest.mark.parametrize("layout", ["colocate", "disaggregated"])
def test_no_count_and_no_time_grows_faster_than_the_devices(layout: str, grown: Mapping[str, Any]) -> None:
    assert {name: steps for name, steps in grown[layout].items() if max(steps) > LIMIT} == {}


async def test_the_measure_notices_ranks_that_all_know_all_workers(sim: Any) -> None:
    """As they do on one host: within it, rings and pages grow with the square of its devices."""
    rows = [["a", "float32", [2], 0, 8]]
    small, large = [await sim.publish_row(n, n // sim.TP, rows, every_rank=True, per_node=n) for n in (64, 512)]
    square = {name for name in small if sim.exponent((64, small[name]), (512, large[name])) > 1.9}
    assert square == {"rings_sent", "ring_bytes_to_engines", "control_page_bytes", "offer_bytes_to_engines"}


async def test_the_manifest_leaves_rank_0_once_and_the_driver_packed(sim: Any) -> None:
    rows = sim.model_rows(json.loads((sim.MODEL / "config.json").read_text()))
    row = await sim.publish_row(64, 16, rows, every_rank=True)
    whole = len(json.dumps(rows))
    assert whole < row["offer_bytes_from_ranks"] < 1.1 * whole
    assert row["offer_bytes_per_engine"] < whole / 10


class PlainLedger(Buffer):
    """Looks through everything that is out at every change, as a plain ledger would."""

    def _on_source_change(self) -> None:
        super()._on_source_change()
        self._in_flight = {n: self._in_flight[n] for n in self._source.out if n in self._in_flight}


class PlainBuffer(Buffer):
    """Looks through all groups whenever one finishes."""

    def _complete(self, step: int) -> list[Group] | None:
        if self._order == "prompt":
            waiting = [*self._in_flight, *([] if (low := self._source.lowest_returned) is None else [low])]
            return next_by_prompt(self._ready, size=self._batch_size, barrier=min(waiting, default=math.inf))
        slack = {number: self._slack(group, step) for number, group in self._ready.items()}
        in_flight = [left for v in self._in_flight.values() if (left := v + self._max_staleness + 1 - step) >= 0]
        return next_by_completion([*self._ready.values()], size=self._batch_size, slack=slack, slack_in_flight=in_flight)

    def _return_stale(self, step: int) -> None:
        self._checked_step = -1
        super()._return_stale(step)


@pytest.mark.parametrize("kind", [PlainLedger, PlainBuffer])
def test_the_measure_notices_a_square(sim: Any, kind: type[Buffer]) -> None:
    name = "rollout_lines_staleness1"
    rows = [(n, sim.rollout_row(sim.Cluster(n, "colocate"), staleness=1, buffer_class=kind)[name]) for n in (32, 256)]
    assert sim.exponent(*rows) > LIMIT


# ---- the index gives what looking through everything gives


class Lockstep:
    """Two buffers that live through the same events; the second looks through everything every time."""

    def __init__(self, *, size: int, staleness: int, order: Order) -> None:
        self.sources = [PromptSource(50, identity="A", seed=0, shuffle=False) for _ in range(2)]
        kinds = (Buffer, PlainBuffer)
        self.buffers = [
            k(s, batch_size=size, max_staleness=staleness, order=order) for k, s in zip(kinds, self.sources, strict=True)
        ]
        self.flying: list[tuple[PromptId, int]] = []
        self.version = 0

    async def start(self, limit: int) -> None:
        if self.buffers[0].free > 0:
            taken = [s.take(await b.admit(limit)) for s, b in zip(self.sources, self.buffers, strict=True)]
            assert taken[0] == taken[1]
            self.flying += [(prompt, self.version) for prompt in taken[0]]

    async def end(self, at: int, how: str) -> None:
        prompt, version = self.flying.pop(at)
        for source, buffer in zip(self.sources, self.buffers, strict=True):
            if how == "put":
                await buffer.put(fake_group(prompt, PolicyVersion(0, version)))
                continue
            source.drop([prompt]) if how == "drop" else source.give_back([prompt], regenerate=True)
            buffer.readmit(1)

    def lose(self, chance: random.Random) -> None:
        ready = sorted(self.buffers[0]._ready)
        if ready:
            prompt = self.buffers[0]._ready[chance.choice(ready)].prompt
            for buffer in self.buffers:
                buffer.lose([prompt])

    def publish(self, step: int) -> None:
        self.version = step
        for buffer in self.buffers:
            buffer.advance(PolicyVersion(0, step))


@pytest.mark.parametrize("order", ["prompt", "completion"])
@pytest.mark.parametrize("staleness", [0, 1, 3])
@pytest.mark.parametrize("seed", range(4))
async def test_what_is_skipped_never_changes_a_batch(seed: int, staleness: int, order: Order) -> None:
    chance = random.Random(seed)
    world = Lockstep(size=chance.randint(1, 6), staleness=staleness, order=order)
    step, taking = 1, [asyncio.create_task(b.take(1)) for b in world.buffers]
    for _ in range(1200):
        await world.start(chance.randint(1, 8))
        how = chance.choices(["put", "drop", "fail", "lose"], [8, 2, 1, 0.3])[0]
        if how == "lose":
            world.lose(chance)
        elif world.flying:
            # Old ones stay behind now and then, so that batches wait for single groups.
            await world.end(chance.randrange(len(world.flying)) if chance.random() < 0.7 else -1, how)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert taking[0].done() == taking[1].done()
        if taking[0].done():
            first, second = (task.result() for task in taking)
            assert [g.prompt for g in first.groups] == [g.prompt for g in second.groups]
            world.publish(step)
            step += 1
            taking = [asyncio.create_task(b.take(step)) for b in world.buffers]
    for task in taking:
        task.cancel()
    await asyncio.gather(*taking, return_exceptions=True)
    assert step > 20
    assert world.buffers[0].counters == world.buffers[1].counters
    with pytest.raises(RolloutError):
        await world.buffers[0].take(step - 1)
